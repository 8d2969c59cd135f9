from __future__ import annotations

import pytest
import torch

from unirl.data.digit_captions import DigitCaptions, DigitPrompts
from unirl.data.digits import digit_halves, digit_prompt


def said(captions: DigitCaptions) -> list[str]:
    return captions.load().captions


def truth() -> list[str]:
    return [digit_prompt(label) for label in digit_halves()[1].tolist()]


@pytest.mark.parametrize(("share", "wrong"), [(0.0, 0), (0.45, 404), (0.9, 808)])
def test_exactly_the_share_of_captions_names_another_digit(share: float, wrong: int) -> None:
    pairs = zip(said(DigitCaptions(wrong_share=share)), truth(), strict=True)
    assert sum(caption != label for caption, label in pairs) == wrong


def test_a_wrong_caption_may_name_any_other_digit() -> None:
    wrong = {(right, wrong) for wrong, right in zip(said(DigitCaptions(0.9)), truth(), strict=True) if wrong != right}
    assert len(wrong) == 90


def test_the_seed_says_which_captions_are_wrong() -> None:
    assert said(DigitCaptions(seed=1)) == said(DigitCaptions(seed=1)) != said(DigitCaptions(seed=2))


def test_pictures_are_half_a_in_three_equal_channels() -> None:
    images = DigitCaptions().load().images
    assert images is not None
    assert images.shape == (898, 3, 8, 8)
    assert torch.equal(images[:, 0], torch.tensor(digit_halves()[0]))
    assert torch.equal(images, images[:, :1].expand(-1, 3, -1, -1))


def test_there_are_ten_prompts_each_with_its_digit() -> None:
    rows = DigitPrompts().rows()
    assert [(row.prompt, row.metadata) for row in rows] == [(digit_prompt(d), {"digit": d}) for d in range(10)]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"wrong_share must be in .0, 1., got {share}"):
        DigitCaptions(wrong_share=share)
