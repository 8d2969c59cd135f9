from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.unit.reward.samples import entry
from tests.unit.reward.scorers.blip import SIDE, bert_tokenizer, published_state, rating, save_image_reward
from tests.unit.reward.scorers.tiny_clip import picture, samples
from unirl.reward.scorers.image_reward import ImageReward


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    return save_image_reward(tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="module")
def scorer(folders) -> ImageReward:
    return ImageReward(**folders)


def test_the_score_is_that_of_the_published_arithmetic_in_float64(scorer):
    state, tokenizer = published_state(), bert_tokenizer()
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE)
    for sample in samples()[:4]:
        pixels = processor([Image.fromarray(sample.picture)], return_tensors="pt").pixel_values
        tokens = tokenizer([sample.prompt], return_tensors="pt", padding="max_length", truncation=True, max_length=35)
        assert scorer.score([sample]) == [
            pytest.approx(rating(state, pixels, tokens.input_ids, tokens.attention_mask), abs=2e-5)
        ]


def test_padding_does_not_count(scorer):
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE)
    pixels = processor([Image.fromarray(picture())], return_tensors="pt").pixel_values
    ids = bert_tokenizer()(["a red fox"], return_tensors="pt").input_ids
    bare = rating(published_state(), pixels, ids, torch.ones_like(ids))
    assert scorer.score([entry(picture(), "a red fox")]) == [pytest.approx(bare, abs=2e-5)]


def test_scores_do_not_depend_on_the_batch(scorer, folders):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=2e-5)
    assert ImageReward(**folders, batch_size=3).score(samples()) == pytest.approx(singly, abs=2e-5)
    assert all(math.isfinite(score) for score in singly)


def test_another_prompt_and_another_picture_are_other_scores(scorer):
    scores = scorer.score([entry(picture(seed=seed), prompt) for seed in (0, 1) for prompt in ("a fox", "a dog", "")])
    assert len({round(score, 4) for score in scores}) == 6


def test_a_prompt_is_cut_after_35_tokens_and_counted(folders):
    scorer, long = ImageReward(**folders), "abcde" * 9
    scores = scorer.score([entry(picture(), long), entry(picture(), long[:33]), entry(picture(), long[:32])])
    assert scores[0] == pytest.approx(scores[1], abs=2e-5)
    assert scores[1] != pytest.approx(scores[2], abs=1e-4)
    assert scorer._loaded.prompts.cut == 1


def test_the_version_follows_the_weights(scorer, folders, tmp_path):
    assert ImageReward(**save_image_reward(tmp_path, seed=1)).version() != scorer.version()
    assert ImageReward(**folders).version() == scorer.version()


@pytest.mark.parametrize("lost", ["blip.visual_encoder.blocks.1.attn.qkv.weight", "blip.text_encoder.encoder.layer.1."])
def test_a_weight_that_is_missing_is_refused(folders, tmp_path, lost):
    save_image_reward(tmp_path)
    state = {name: value for name, value in published_state().items() if not name.startswith(lost + "crossattention")}
    state.pop(lost, None)
    torch.save(state, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match=r"ImageReward\.pt does not hold the weights of this scorer: \d+ are missing"):
        ImageReward(checkpoint=str(tmp_path), tokenizer=folders["tokenizer"]).prepare()


def test_a_file_of_other_weights_is_refused(folders, tmp_path):
    save_image_reward(tmp_path)
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match=r"holds no weights of BLIP: embeddings\.patch_embedding\.weight is missing"):
        ImageReward(checkpoint=str(tmp_path), tokenizer=folders["tokenizer"]).prepare()


def test_a_folder_without_the_weights_is_refused_before_anything_loads(tmp_path):
    with pytest.raises(ValueError, match=r"holds no ImageReward\.pt"):
        ImageReward(checkpoint=str(tmp_path))
