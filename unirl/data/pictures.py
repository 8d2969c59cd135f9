"""Picture files as tensors."""

from __future__ import annotations

from pathlib import Path

import torch


def read_picture(path: Path, size: tuple[int, int] | None = None) -> torch.Tensor:
    """`(3, H, W)` float32 in [0, 1]; size: (height, width) to resize to, bicubic."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    if size is not None:
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255
