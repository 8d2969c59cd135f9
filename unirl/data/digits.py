"""scikit-learn's handwritten digits (1,797 of 8 x 8 pixels, BSD-3-Clause), cut once into two halves.

A model and the reward's judge are trained on half A; half B trains the independent judges and measures realism.
"""

from __future__ import annotations

import functools

import numpy as np

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HALF_A, HALF_B = 898, 899  # pictures
_SPLIT = 0  # which of the many stratified splits is THE split: every figure of the digits is measured on it


def digit_prompt(digit: int) -> str:
    """The caption of a digit: `digit_prompt(7) == "a handwritten seven"`."""
    if not 0 <= digit <= 9:
        raise ValueError(f"a digit is one of 0 to 9, got {digit}")
    return f"a handwritten {_NAMES[digit]}"


@functools.cache
def digit_halves() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`(images_a, labels_a, images_b, labels_b)`, stratified, the same on every call and machine; read-only.

    images: `(898, 8, 8)` and `(899, 8, 8)` float32 in [0, 1], multiples of 1/16 (1 = ink)
    labels: `(898,)` and `(899,)` int64 in 0..9
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rows_a, rows_b = train_test_split(np.arange(len(labels)), test_size=0.5, stratify=labels, random_state=_SPLIT)
    pictures: np.ndarray = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    classes: np.ndarray = np.asarray(labels, dtype=np.int64)
    halves = (pictures[rows_a], classes[rows_a], pictures[rows_b], classes[rows_b])
    for array in halves:
        array.setflags(write=False)
    return halves
