"""What a person would see or hear of a sample."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.batch import Rows, dense, listed, shared
from unirl.types.conversation import Conversation
from unirl.types.kinds import Kind


@dataclasses.dataclass(frozen=True, eq=False)
class Media(Rows):
    """N rows of content; a kind that a Part does not carry is None.

    texts:      N strings (a prompt, or what a language model wrote)
    images:     `(N, 3, H, W)` float32 in [0, 1]
    sources:    N lists of pictures `(3, H, W)` in [0, 1] that a prompt comes with (editing, image-to-video)
    videos:     `(N, F, 3, H, W)` float32 in [0, 1]; fps: frames a second
    audio:      `(N, channels, samples)` float32 in [-1, 1]; audio_rate: samples a second
    conversations: N conversations, for supervised training of a language model
    """

    texts: list[str] | None = listed(None)
    images: torch.Tensor | None = dense(None)
    sources: list[list[torch.Tensor]] | None = listed(None)
    videos: torch.Tensor | None = dense(None)
    fps: float | None = shared(None)
    audio: torch.Tensor | None = dense(None)
    audio_rate: int | None = shared(None)
    conversations: list[Conversation] | None = listed(None)

    @property
    def kinds(self) -> frozenset[Kind]:
        """What there is to be seen, heard or read."""
        carried: dict[Kind, object] = {
            "picture": self.images,
            "video": self.videos,
            "sound": self.audio,
            "text": self.texts,
        }
        return frozenset(kind for kind, values in carried.items() if values is not None)

    @property
    def required_texts(self) -> list[str]:
        """The texts, where there must be some."""
        assert self.texts is not None, "a prompt has a text"
        return self.texts


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """`(N, 3, H, W)` in [0, 1] -> `(N, H, W, 3)` uint8, rounded to the nearest level: what scorers and files see."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
