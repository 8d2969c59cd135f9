from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.unit.reward.samples import entry, service
from tests.unit.reward.scorers.tiny_clip import picture, samples, save_clip
from unirl.reward.scorers.clip_score import CLIPScore


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_clip(tmp_path_factory.mktemp("clip_score"))


@pytest.fixture(scope="module")
def scorer(checkpoint) -> CLIPScore:
    return CLIPScore(checkpoint=checkpoint)


@pytest.fixture(scope="module")
def processor(checkpoint) -> Any:
    return transformers.CLIPProcessor.from_pretrained(checkpoint, backend="pil")


def inputs_of(processor, sample):
    return processor(text=[sample.prompt], images=[Image.fromarray(sample.picture)], return_tensors="pt", padding=True)


def test_the_score_is_clips_own_logit_without_its_scale(scorer, checkpoint, processor):
    model = transformers.CLIPModel.from_pretrained(checkpoint)
    for sample in samples()[:4]:
        logit = model(**inputs_of(processor, sample)).logits_per_image.item()
        assert scorer.score([sample]) == [pytest.approx(logit / math.exp(4.6), abs=2e-6)]


def test_the_score_is_the_cosine_of_the_features_in_float64(scorer, checkpoint, processor):
    model: Any = transformers.CLIPModel.from_pretrained(checkpoint).double()
    for sample in samples()[:4]:
        inputs = inputs_of(processor, sample)
        image = model.get_image_features(inputs.pixel_values.double()).pooler_output
        text = model.get_text_features(inputs.input_ids).pooler_output
        expected = torch.nn.functional.cosine_similarity(image, text).item()
        assert scorer.score([sample]) == [pytest.approx(expected, abs=2e-6)]


def test_the_score_is_the_cosine_of_the_embeddings_of_forward(scorer, checkpoint, processor):
    model = transformers.CLIPModel.from_pretrained(checkpoint)
    for sample in samples()[:4]:
        out = model(**inputs_of(processor, sample))
        assert scorer.score([sample]) == [pytest.approx((out.image_embeds @ out.text_embeds.T).item(), abs=2e-6)]


def test_scores_do_not_depend_on_the_batch(scorer, checkpoint):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=2e-6)
    assert CLIPScore(checkpoint=checkpoint, batch_size=3).score(samples()) == pytest.approx(singly, abs=2e-6)
    assert all(-1 <= score <= 1 for score in singly)


def test_another_prompt_and_another_picture_are_other_scores(scorer):
    scores = scorer.score([entry(picture(seed=seed), prompt) for seed in (0, 1) for prompt in ("a fox", "a dog", "")])
    assert len({round(score, 4) for score in scores}) == 6


def test_the_version_follows_the_weights(scorer, tmp_path):
    assert scorer.version() != CLIPScore(checkpoint=save_clip(tmp_path, seed=1)).version()


def test_a_sample_without_a_picture_costs_only_itself(scorer):
    outcomes = service(clip=scorer)._outcomes("clip", [entry(picture(), "a"), entry(None, "a"), entry(picture(), "a")])
    assert [outcome.cause for outcome in outcomes] == [
        "",
        "clip: r0.p0/0: ValueError: r0.p0/0 holds no picture, and this scorer scores pictures",
        "",
    ]
