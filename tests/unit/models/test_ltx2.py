"""LTX-2: the two streams of one latent."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.families.cases.ltx2 import CASES, family
from unirl.models.base import Bundle
from unirl.models.diffusion.ltx2 import LTX2
from unirl.models.random_weights.ltx2 import write
from unirl.sde.strategy import row_mean
from unirl.types.media import Media

SAMPLING = CASES[0].sampling


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[LTX2, Bundle]:
    own = family(write(tmp_path_factory.mktemp("ltx2") / "model"))
    return own, own.load(torch.device("cpu"), torch.float32)


def test_streams_count_one_half_each_or_by_their_elements(loaded: tuple[LTX2, Bundle]) -> None:
    own, bundle = loaded
    halves = dataclasses.replace(own, stream_weights="streams")
    with torch.no_grad():
        by_elements, by_streams = (one.encode(bundle, CASES[0].prompts, SAMPLING) for one in (own, halves))
    size = math.prod(by_streams.video_shape)
    # 3 in every element of the video, 5 in every one of the sound.
    x = torch.full((1, *own.latent_shape(bundle, SAMPLING)), 3.0)
    x[:, size:] = 5.0
    sound = math.prod(by_streams.audio_shape)
    assert by_elements.weights is None
    assert row_mean(x, by_streams.weights).item() == pytest.approx(4.0)
    assert row_mean(x).item() == pytest.approx((3 * size + 5 * sound) / (size + sound))
    assert by_streams.weights is not None
    assert by_streams.weights.mean().item() == pytest.approx(1.0)


def test_the_length_of_the_sound_follows_the_frame_rate(loaded: tuple[LTX2, Bundle]) -> None:
    own, bundle = loaded
    slow = dataclasses.replace(own, frame_rate=12.0)
    with torch.no_grad():
        shapes = [one.encode(bundle, CASES[0].prompts, SAMPLING).audio_shape for one in (own, slow)]
    # 5 frames at 24 and 12 a second; 16000 / 160 / 4 = 25 latent moments a second.
    assert [shape[1] for shape in shapes] == [round(5 / 24 * 25), round(5 / 12 * 25)]


def test_the_sound_alone_may_be_guided(loaded: tuple[LTX2, Bundle]) -> None:
    own, _ = loaded
    assert own.guided(1.0)
    assert not dataclasses.replace(own, audio_guidance=None).guided(1.0)
    assert dataclasses.replace(own, audio_guidance=None).guided(3.0)


def test_one_step_and_frames_that_do_not_fit_are_refused(loaded: tuple[LTX2, Bundle]) -> None:
    own, bundle = loaded
    with pytest.raises(ValueError, match="at least 2 steps"):
        own.schedule(bundle, dataclasses.replace(SAMPLING, steps=1).deterministic())
    with pytest.raises(ValueError, match="the nearest is 5 of 64 x 32"):
        own.latent_shape(bundle, dataclasses.replace(SAMPLING, frames=6))


def test_supervised_training_is_refused_by_name(loaded: tuple[LTX2, Bundle]) -> None:
    own, bundle = loaded
    with pytest.raises(ValueError, match="supervised training of LTX-2"):
        own.encode_media(bundle, Media(videos=torch.zeros(1, 5, 3, 64, 32)), SAMPLING)


@pytest.mark.parametrize(
    "setting",
    [{"frame_rate": 0.0}, {"audio_guidance": 0.5}, {"guidance_rescale": 1.5}, {"max_sequence_length": 0}],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_with_its_name(tmp_path: Path, setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        LTX2("owner/name", **setting)  # type: ignore[arg-type]
