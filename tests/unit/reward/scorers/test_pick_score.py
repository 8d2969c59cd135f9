from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.unit.reward.samples import entry
from tests.unit.reward.scorers.tiny_clip import picture, samples, save_clip
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.pick_score import PickScore, VideoPickScore, frame_rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_clip(tmp_path_factory.mktemp("pick_score"))


@pytest.fixture(scope="module")
def scorer(checkpoint) -> PickScore:
    return PickScore(checkpoint=checkpoint)


def test_the_score_is_the_logit_that_clip_itself_computes(scorer, checkpoint):
    model = transformers.CLIPModel.from_pretrained(checkpoint)
    processor: Any = transformers.CLIPProcessor.from_pretrained(checkpoint, backend="pil")
    for sample in samples()[:4]:
        inputs = processor(
            text=[sample.prompt], images=[Image.fromarray(sample.picture)], return_tensors="pt", padding=True
        )
        assert scorer.score([sample]) == [pytest.approx(model(**inputs).logits_per_image.item(), abs=1e-4)]


def test_the_score_is_the_scaled_cosine_of_the_features_in_float64(scorer, checkpoint):
    model: Any = transformers.CLIPModel.from_pretrained(checkpoint).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    for sample in samples():
        height, width, _ = sample.picture.shape
        size = (32 * width // min(height, width), 32 * height // min(height, width))
        resized = Image.fromarray(sample.picture).resize(size, Image.Resampling.BICUBIC)
        left, top = (size[0] - 32) // 2, (size[1] - 32) // 2
        values = np.asarray(resized)[top : top + 32, left : left + 32] / 255
        image = model.get_image_features(torch.tensor((values - mean) / std).permute(2, 0, 1)[None]).pooler_output[0]
        text = model.get_text_features(tokenizer([sample.prompt], return_tensors="pt").input_ids).pooler_output[0]
        expected = np.exp(4.6) * (image @ text / image.norm() / text.norm()).item()
        assert scorer.score([sample]) == [pytest.approx(expected, abs=1e-3)]


def test_scores_do_not_depend_on_the_batch(scorer, checkpoint):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=1e-4)
    assert PickScore(checkpoint=checkpoint, batch_size=3).score(samples()) == pytest.approx(singly, abs=1e-4)
    assert scorer.score(samples()[::-1])[::-1] == pytest.approx(singly, abs=1e-4)


def test_another_prompt_is_another_score(scorer):
    scores = scorer.score([entry(picture(), prompt) for prompt in ("a red fox", "a blue fox", "", "风筝")])
    assert len({round(score, 3) for score in scores}) == 4


def test_a_prompt_is_cut_after_77_tokens_and_counted(checkpoint, caplog):
    scorer, long = PickScore(checkpoint=checkpoint), "abcde " * 20
    with caplog.at_level(logging.WARNING):
        scores = scorer.score([entry(picture(), long), entry(picture(), long[:75]), entry(picture(), long + "!")])
    assert scores[1:] == pytest.approx(scores[:1] * 2, abs=1e-4)
    assert scorer._loaded.prompts.cut == 2
    assert [record.message.startswith("prompts of more than 77 tokens are cut") for record in caplog.records] == [True]


def test_the_version_follows_weights_and_preprocessing(scorer, checkpoint, tmp_path):
    assert scorer.version() == PickScore(checkpoint=checkpoint, batch_size=1).version()
    assert scorer.version().startswith("PickScore/")
    assert scorer.version().endswith("/pil-bicubic-crop")
    assert scorer.version() != PickScore(checkpoint=save_clip(tmp_path, seed=1)).version()
    assert VideoPickScore(checkpoint=checkpoint, frames="uniform:3", over="min").version().endswith("-uniform:3-min")


def test_half_precision_is_close(scorer, checkpoint):
    assert PickScore(checkpoint=checkpoint, dtype="bfloat16").score(samples()) == pytest.approx(
        scorer.score(samples()), abs=3
    )


def test_missing_weights_are_refused_and_not_drawn_at_random(checkpoint, tmp_path):
    model = transformers.CLIPModel.from_pretrained(checkpoint)
    state = {name: value for name, value in model.state_dict().items() if "fc1" not in name}
    save_clip(tmp_path)
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="does not hold the weights of this scorer: 8 are missing"):
        PickScore(checkpoint=str(tmp_path)).score(samples())


def test_a_folder_without_clip_is_refused_before_anything_loads(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        PickScore(checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["SiglipModel"]}')
    with pytest.raises(ValueError, match="holds a SiglipModel, this family is CLIPModel"):
        PickScore(checkpoint=str(tmp_path))


def test_what_is_no_picture_is_refused_by_name(scorer):
    with pytest.raises(ValueError, match=r"r0\.p0/0 holds no picture"):
        scorer.score([entry(None, "a red fox")])


def clip_of(frames: int, seed: int = 0) -> ScorerInput:
    video = np.stack([picture(seed=seed + row) for row in range(frames)])
    return ScorerInput(id="r0.p0/0", prompt="a red fox", video=video)


@pytest.mark.parametrize(
    ("frames", "count", "rows"),
    [
        ("first", 9, [0]),
        ("middle", 9, [4]),
        ("middle", 8, [4]),
        ("middle", 1, [0]),
        ("uniform:1", 9, [4]),
        ("uniform:2", 8, [2, 6]),
        ("uniform:3", 9, [1, 4, 7]),
        ("uniform:8", 3, [0, 1, 2]),
    ],
)
def test_the_frames_that_are_looked_at(frames, count, rows):
    assert frame_rows(frames, count) == rows


def test_a_video_has_the_mean_or_the_least_score_of_its_frames(scorer, checkpoint):
    videos = [clip_of(9), clip_of(2, seed=20), ScorerInput(id="r0.p1/0", prompt="a red fox", image=picture(seed=3))]
    singly = [scorer.score([entry(frame, "a red fox") for frame in video.frames]) for video in videos]

    def score(frames: str, over: Literal["mean", "min"] = "mean") -> list[float]:
        return VideoPickScore(checkpoint=checkpoint, frames=frames, over=over, batch_size=4).score(videos)

    assert score("first") == pytest.approx([rows[0] for rows in singly], abs=1e-4)
    assert score("middle") == pytest.approx([singly[0][4], singly[1][1], singly[2][0]], abs=1e-4)
    chosen = [[singly[0][row] for row in (0, 2, 3, 5, 6, 8)], singly[1], singly[2]]
    assert frame_rows("uniform:6", 9) == [0, 2, 3, 5, 6, 8]
    assert score("uniform:6") == pytest.approx([np.mean(rows) for rows in chosen], abs=1e-4)
    assert score("uniform:6", "min") == pytest.approx([min(rows) for rows in chosen], abs=1e-4)


@pytest.mark.parametrize("frames", ["last", "uniform", "uniform:0", "uniform:-1"])
def test_unknown_frames_are_refused(checkpoint, frames):
    with pytest.raises(ValueError, match=f"such as uniform:4, got '{frames}'"):
        VideoPickScore(checkpoint=checkpoint, frames=frames)


def test_a_batch_size_below_1_is_refused(scorer):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        dataclasses.replace(scorer, batch_size=0)
