"""Pictures as tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch


class DrawnPicture(ABC):
    """A picture without a file, drawn when a rollout needs it."""

    @abstractmethod
    def pixels(self) -> torch.Tensor:
        """`(3, H, W)` float32 in [0, 1]."""


def read_picture(path: Path, size: tuple[int, int] | None = None) -> torch.Tensor:
    """`(3, H, W)` float32 in [0, 1]; size: (height, width) to resize to, bicubic."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    if size is not None:
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255
