"""What a person would see of a sample: texts and pictures."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.batch import Rows, dense, listed


@dataclasses.dataclass(frozen=True, eq=False)
class Media(Rows):
    """N rows of content; a kind that a Part does not carry is None.

    texts:  N strings (a prompt, or what a language model wrote)
    images: `(N, 3, H, W)` float32 in [0, 1]
    """

    texts: list[str] | None = listed(None)
    images: torch.Tensor | None = dense(None)


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """`(N, 3, H, W)` in [0, 1] -> `(N, H, W, 3)` uint8, rounded to the nearest level: what scorers and files see."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
