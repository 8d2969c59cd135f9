from __future__ import annotations

import numpy as np
import pytest

from tests.unit.reward.samples import entry
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.jpeg import JpegCompressibility, JpegIncompressibility

BLACK = np.zeros((512, 512, 3), np.uint8)
GRADIENT = np.broadcast_to(np.linspace(0, 255, 512).astype(np.uint8)[None, :, None], (512, 512, 3))
NOISE = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("picture", "kilobytes", "compressibility"),
    [(BLACK, 4.723, -0.009446), (GRADIENT, 15.593, -0.031186), (NOISE, 307.993, -0.615986)],
    ids=["black", "gradient", "noise"],
)
def test_golden_sizes(picture, kilobytes, compressibility):
    sample = entry(np.ascontiguousarray(picture))
    assert JpegIncompressibility().score([sample]) == [pytest.approx(kilobytes, rel=0.01)]
    assert JpegCompressibility().score([sample]) == [pytest.approx(compressibility, rel=0.01)]


def test_lower_quality_makes_smaller_files():
    sizes = [JpegIncompressibility(quality=quality).score([entry(NOISE)])[0] for quality in (1, 50, 95, 100)]
    assert sizes == sorted(set(sizes))


def test_scores_do_not_depend_on_the_batch():
    samples = [entry(picture[:64, :64]) for picture in (BLACK, NOISE, GRADIENT, NOISE, BLACK)]
    scorer = JpegIncompressibility()
    assert scorer.score(samples) == [scorer.score([sample])[0] for sample in samples]


def test_a_video_has_the_mean_of_its_frames():
    video = np.stack([BLACK, GRADIENT, NOISE])
    sample = ScorerInput(id="r0.p0/0", prompt="", video=video)
    for scorer in (JpegIncompressibility(), JpegCompressibility()):
        assert scorer.score([sample]) == [pytest.approx(np.mean(scorer.score([entry(frame) for frame in video])))]


def test_a_single_pixel_and_a_grey_picture_have_a_size():
    assert JpegIncompressibility().score([entry(np.full((1, 1, 3), 128, np.uint8))])[0] > 0


@pytest.mark.parametrize("scorer", [JpegIncompressibility, JpegCompressibility])
@pytest.mark.parametrize("quality", [0, 101])
def test_quality_has_a_range(scorer, quality):
    with pytest.raises(ValueError, match=f"1..100, got {quality}"):
        scorer(quality=quality)


def test_a_text_sample_is_refused_by_name():
    with pytest.raises(ValueError, match=r"r0\.p0/0 holds no picture"):
        JpegCompressibility().score([entry(None)])
