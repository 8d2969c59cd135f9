"""Source pictures of an edit, for families that read them as latents beside the one that is made."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from unirl.types.batch import listed
from unirl.types.condition import Embedding
from unirl.types.media import to_uint8

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True, eq=False)
class EditEmbedding(Embedding):
    """sources: N lists of latents `(C, h, w)`, one for each source picture; None where nothing is edited."""

    sources: list[list[torch.Tensor]] | None = listed(None)

    def stacked_sources(self) -> list[torch.Tensor]:
        """`(N, C, h, w)` for each source of a row; ValueError unless all rows have sources of the same sizes."""
        rows = self.sources or []
        sizes = {tuple(tuple(picture.shape[-2:]) for picture in pictures) for pictures in rows}
        if len(sizes) > 1:
            raise ValueError(
                f"source pictures of one forward must be of the same sizes, got latents of {sorted(sizes)}: scale them "
                "alike in the data, or set rollout.batch_size=1 and train.geometry.micro_batch_size=1"
            )
        return [torch.stack(pictures) for pictures in zip(*rows, strict=True)]


def to_pil(picture: torch.Tensor) -> Image:
    """`(3, H, W)` in [0, 1] as the image processors of pipelines take it, in 8 bits."""
    from PIL.Image import fromarray

    return fromarray(to_uint8(picture[None])[0].numpy())
