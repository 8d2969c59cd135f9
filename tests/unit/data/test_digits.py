from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from unirl.data.digits import digit_halves, digit_prompt


def test_halves_have_898_and_899_pictures_with_the_digits_in_equal_shares():
    images_a, labels_a, images_b, labels_b = digit_halves()
    assert images_a.shape == (898, 8, 8)
    assert images_b.shape == (899, 8, 8)
    assert np.abs(np.bincount(labels_a, minlength=10) - np.bincount(labels_b, minlength=10)).max() <= 1


def test_halves_together_are_the_whole_data_set_with_its_labels():
    images_a, labels_a, images_b, labels_b = digit_halves()
    images, labels = load_digits(return_X_y=True)
    halves = np.column_stack([np.concatenate([images_a, images_b]).reshape(-1, 64) * 16, np.r_[labels_a, labels_b]])
    whole = np.column_stack([images, labels])
    assert sorted(map(tuple, halves.tolist())) == sorted(map(tuple, whole.tolist()))


def test_pictures_are_float32_multiples_of_a_sixteenth_in_0_1():
    images = digit_halves()[0]
    assert images.dtype == np.float32
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert np.array_equal(images * 16, np.rint(images * 16))


def test_halves_cannot_be_changed_by_one_user_under_another():
    with pytest.raises(ValueError, match="read-only"):
        digit_halves()[0][0] = 0.0


def test_a_prompt_names_the_digit():
    assert digit_prompt(7) == "a handwritten seven"
    assert len({digit_prompt(digit) for digit in range(10)}) == 10
    with pytest.raises(ValueError, match="got 10"):
        digit_prompt(10)
