"""Pictures that a prompt comes with."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path

import torch


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
        import numpy as np
        from PIL import Image

        with Image.open(self.path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255
