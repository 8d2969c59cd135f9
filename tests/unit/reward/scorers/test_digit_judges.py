from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.reward.samples import entry
from unirl.data.digits import digit_halves
from unirl.reward.scorers.digits import DigitDiversity, DigitJudge
from unirl.types.media import to_uint8


def pictured(images: np.ndarray, digits) -> list:
    """What a scorer sees of grey pictures `(N, 8, 8)` in [0, 1] that ask for `digits`."""
    rgb = torch.tensor(images)[:, None].expand(-1, 3, -1, -1)
    return [entry(image, digit=int(digit)) for image, digit in zip(to_uint8(rgb).numpy(), digits, strict=True)]


@pytest.fixture(scope="module")
def half_a():
    images, labels, _, _ = digit_halves()
    return pictured(images, labels)


@pytest.fixture(scope="module")
def half_b():
    _, _, images, labels = digit_halves()
    return pictured(images, labels)


@pytest.mark.parametrize(
    ("kind", "fitted_on", "accuracy"), [("svm", "a", 0.989), ("knn", "b", 0.984), ("forest", "b", 0.977)]
)
def test_accuracy_on_the_half_that_a_judge_has_not_seen(kind, fitted_on, accuracy, half_a, half_b):
    unseen = half_b if fitted_on == "a" else half_a
    scores = DigitJudge(kind, half=fitted_on, output="correct").score(unseen)
    assert np.mean(scores) == pytest.approx(accuracy, abs=0.003)


def test_pictures_come_back_to_the_greys_of_the_data_exactly(half_b):
    from unirl.reward.scorers.digits import _grey

    assert np.array_equal(np.stack([_grey(sample) for sample in half_b]), 16 * digit_halves()[2].reshape(-1, 64))


def test_the_reward_is_the_softmax_of_twice_the_decision_of_an_svm_of_half_a(half_b):
    from sklearn.svm import SVC

    images_a, labels_a, images_b, labels_b = digit_halves()
    svm = SVC(C=10, gamma=0.001).fit(16 * images_a.reshape(-1, 64), labels_a)  # pyright: ignore[reportArgumentType]
    logits = torch.tensor(2 * svm.decision_function(16 * images_b[:50].reshape(-1, 64)))
    expected = torch.softmax(logits, dim=1)[torch.arange(50), torch.tensor(labels_b[:50])]
    assert DigitJudge().score(half_b[:50]) == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("kind", ["svm", "knn", "forest"])
def test_probabilities_add_up_to_1(kind, half_b):
    judge = DigitJudge(kind)
    asked = [[entry(half_b[0].image, digit=digit)] for digit in range(10)]
    assert sum(judge.score(samples)[0] for samples in asked) == pytest.approx(1.0)


def test_prompts_that_are_swapped_score_low(half_b):
    one, other = half_b[0], next(sample for sample in half_b if sample.metadata != half_b[0].metadata)
    swapped = [entry(one.image, **other.metadata), entry(other.image, **one.metadata)]
    judge = DigitJudge()
    assert min(judge.score([one, other])) > 0.75
    assert max(judge.score(swapped)) < 0.15


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scores_do_not_depend_on_the_batch(batch, half_b):
    judge = DigitJudge()
    pieces = [judge.score(half_b[i : i + batch]) for i in range(0, 10, batch)]
    assert [v for piece in pieces for v in piece] == pytest.approx(judge.score(half_b[:10]), abs=1e-12)


@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_plain_picture_is_no_sure_digit(level):
    plain = np.full((8, 8, 3), level, np.uint8)
    assert max(DigitJudge().score([entry(plain, digit=digit) for digit in range(10)])) < 0.9


@pytest.mark.parametrize("metadata", [{}, {"digit": 10}, {"digit": "7"}, {"digit": None}])
def test_a_sample_that_asks_for_no_digit_is_an_error(metadata):
    with pytest.raises(ValueError, match=r"metadata\['digit'\] must be 0 to 9"):
        DigitJudge().score([entry(np.zeros((8, 8, 3), np.uint8), **metadata)])


def test_a_picture_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"\(8, 8, 3\), got \(16, 16, 3\)"):
        DigitJudge().score([entry(np.zeros((16, 16, 3), np.uint8), digit=1)])


# --- diversity ---


def test_real_digits_of_the_other_half_set_the_scale(half_a):
    figures = DigitDiversity().measure(half_a)
    assert figures["diversity"] == pytest.approx(0.977, abs=0.005)
    assert figures["nearest"] == pytest.approx(1.0, abs=1e-9)
    assert figures["accepted"] == pytest.approx(0.984, abs=0.003)


def test_diversity_is_the_mean_distance_of_pairs_against_half_b(half_a):
    _, _, images_b, labels_b = digit_halves()
    sevens = [sample for sample in half_a if sample.metadata["digit"] == 7][:3]
    greys = [sample.picture[..., 0].ravel() * (16 / 255) for sample in sevens]
    made = np.mean([np.linalg.norm(greys[i] - greys[j]) for i, j in ((0, 1), (0, 2), (1, 2))])
    real = torch.pdist(torch.tensor(16 * images_b[labels_b == 7].reshape(-1, 64))).mean().item()
    assert DigitDiversity().measure(sevens)["diversity"] == pytest.approx(made / real, rel=0.01)


def test_a_collapsed_model_has_full_accuracy_and_no_diversity(half_b):
    one_each = [next(sample for sample in half_b if sample.metadata["digit"] == digit) for digit in range(10)]
    figures = DigitDiversity().measure([sample for sample in one_each for _ in range(4)])
    assert figures == {"diversity": 0.0, "nearest": 0.0, "accepted": 1.0}


def test_noise_is_far_from_real_digits_and_a_single_picture_has_no_diversity(half_a):
    noise = np.random.default_rng(0).random((100, 8, 8)).astype(np.float32)
    assert DigitDiversity().measure(pictured(noise, [3] * 100))["nearest"] > 1.5
    assert np.isnan(DigitDiversity().measure(half_a[:1])["diversity"])
