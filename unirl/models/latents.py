"""Latents: how they lie over pixels, which tokens they make, and what an autoencoder makes of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Grid:
    """How latents lie over what is seen, and thereby which sizes a model makes.

    scale:   pixels of a latent's side
    patch:   latents of a token's side
    stride:  frames of a latent, but for the first frame, which has one of its own; None for single pictures
    largest: tokens of a side at most, None for any number
    """

    scale: int
    patch: int = 2
    stride: int | None = None
    largest: int | None = None

    def check(self, sampling: DiffusionSamplingParams) -> None:
        """ValueError, with the nearest size, for one that is not whole tokens and whole latent frames."""
        cell, wanted = self.scale * self.patch, (sampling.height, sampling.width)
        counts = [max(round(side / cell), 1) for side in wanted]
        nearest = tuple(min(count, self.largest or count) * cell for count in counts)
        frames = 1 if self.stride is None else round((sampling.frames - 1) / self.stride) * self.stride + 1
        if (sampling.frames, *wanted) == (frames, *nearest):
            return
        made = f"multiples of {cell} pixels" + (f" up to {self.largest * cell}" if self.largest else "")
        asked, near = f"{wanted[0]} x {wanted[1]}", f"{nearest[0]} x {nearest[1]}"
        if self.stride is not None or sampling.frames != 1:
            made = f"{'1 frame' if self.stride is None else f'{self.stride} k + 1 frames'} of {made}"
            asked, near = f"{sampling.frames} of {asked}", f"{frames} of {near}"
        raise ValueError(f"this model makes {made}, asked for {asked}; the nearest is {near}")

    def shape(self, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        """`(F, h, w)` in latents; `(h, w)` for single pictures."""
        sides = (sampling.height // self.scale, sampling.width // self.scale)
        return sides if self.stride is None else ((sampling.frames - 1) // self.stride + 1, *sides)

    def tokens(self, sampling: DiffusionSamplingParams) -> int:
        """How many tokens the model sees of one sample."""
        return math.prod(self.shape(sampling)) // self.patch**2


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Tokens `(N, h w, 4 C)`, one for each 2 x 2 patch of `(N, C, 2 h, 2 w)`."""
    return torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).mT


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`; height, width: in tokens."""
    return torch.nn.functional.pixel_shuffle(tokens.mT.unflatten(2, (height, width)), 2)


def channels(vae: Any) -> int:
    """Of the latents of an autoencoder."""
    return vae.config.z_dim if _takes_frames(vae) else vae.config.latent_channels


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """x_0 `(N, C, [F,] h, w)` to pixels `(N, 3, [F,] H, W)` in [0, 1], on the CPU."""
    mean, std = _statistics(vae, latents)
    scaled = latents.float() * std + mean
    if latents.ndim == 4 and _takes_frames(vae):
        return to_unit(vae.decode(scaled[:, :, None], return_dict=False)[0][:, :, 0])
    return to_unit(vae.decode(scaled, return_dict=False)[0])


def encode(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of `decode`, for pixels in [-1, 1].

    The mode of the posterior, not a draw: the same picture is the same latent.
    """
    pixels = pixels.to(vae.device, torch.float32)
    if pixels.ndim == 4 and _takes_frames(vae):
        latents = vae.encode(pixels[:, :, None], return_dict=False)[0].mode()[:, :, 0]
    else:
        latents = vae.encode(pixels, return_dict=False)[0].mode()
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std


def to_unit(pixels: torch.Tensor) -> torch.Tensor:
    """[-1, 1] to [0, 1], where it stays, on the CPU."""
    return (pixels / 2 + 0.5).clamp(0, 1).cpu()


def given_pictures(media: Media) -> torch.Tensor:
    """`(N, 3, H, W)` in [-1, 1]."""
    assert media.images is not None, "supervised training of this family needs images"
    return media.images * 2 - 1


def given_videos(media: Media) -> torch.Tensor:
    """`(N, 3, F, H, W)` in [-1, 1]."""
    assert media.videos is not None, "supervised training of this family needs videos"
    return media.videos.transpose(1, 2) * 2 - 1


def _takes_frames(vae: Any) -> bool:
    """Whether it is of Wan's kind: a picture is a video of one frame, and each channel has its own statistics."""
    return "z_dim" in vae.config


def _statistics(vae: Any, like: torch.Tensor) -> tuple[Any, Any]:
    """Mean and standard deviation of the latents: of each channel, as a tensor that fits `like`, or of all."""
    config = vae.config
    if not _takes_frames(vae):
        shift = config.shift_factor if "shift_factor" in config else None
        return shift or 0.0, 1 / config.scaling_factor
    shape = (config.z_dim, *[1] * (like.ndim - 2))
    values = (config.latents_mean, config.latents_std)
    mean, std = (torch.tensor(value, device=like.device).reshape(shape) for value in values)
    return mean, std
