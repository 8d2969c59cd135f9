"""Pictures as tensors: read from files, or drawn."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path

import torch


def read_picture(path: Path, size: tuple[int, int] | None = None) -> torch.Tensor:
    """`(3, H, W)` float32 in [0, 1], transparency dropped; size: (height, width) to resize to, bicubic."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    if size is not None:
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


class Picture(ABC):
    """Read or drawn when a rollout needs it, so that a source of many rows holds none."""

    @abstractmethod
    def pixels(self) -> torch.Tensor:
        """`(3, H, W)` in [0, 1], in whole levels of 255."""


@dataclasses.dataclass(frozen=True)
class PictureFile(Picture):
    """A file that Pillow reads; transparency is dropped."""

    path: Path

    def pixels(self) -> torch.Tensor:
        return read_picture(self.path)
