"""A small SD3-type model in pixel space that trains on a CPU in a minute, with the stage and stack of the big ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclasses.dataclass(frozen=True)
class TinySD3(DiffusionFamily):
    """diffusers' SD3 transformer on pixels, with a learned embedding of words as its text encoder.

    checkpoint: a folder that `save` wrote, whose shape must equal the settings; None draws weights from `init_seed`
    size:       pixels of a side; channels: 1 (grey) or 3
    vocabulary: the words a prompt may use, any other is an error
    words:      the length to which every prompt is padded: the network attends to the padding, so that a length taken
                from the batch would let the other prompts change a picture
    predicts:   what the network puts out: "x0" (the velocity is `(x - x0) / max(sigma, 0.05)`) or the "velocity"
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=(),
        parameters="0.6M by default",
        licence="Apache-2.0",
        guidance="classifier-free, off at 1",
        advice="for a CPU: the quickstart's model",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
    )
    block_names: ClassVar[tuple[str, ...]] = ("JointTransformerBlock",)

    checkpoint: Path | None = None
    size: int = 8
    channels: int = 1
    patch: int = 4
    layers: int = 2
    heads: int = 2
    head_dim: int = 48
    embedding_dim: int = 64
    vocabulary: tuple[str, ...] = ("a", "handwritten", *_DIGITS)
    words: int = 3
    predicts: Literal["x0", "velocity"] = "x0"
    init_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "patch", "layers", "heads", "head_dim", "embedding_dim", "words"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")
        if self.size % self.patch:
            raise ValueError(f"size {self.size} must be a multiple of patch {self.patch}")
        if self.heads * self.head_dim % 4:
            raise ValueError(
                f"heads x head_dim must be a multiple of 4 (two sines and two cosines of a position), got {self.heads} "
                f"x {self.head_dim}"
            )
        if not self.vocabulary or len(set(self.vocabulary)) < len(self.vocabulary):
            raise ValueError(f"vocabulary must be distinct words, at least one, got {list(self.vocabulary)}")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        if self.predicts not in ("x0", "velocity"):
            raise ValueError(f"predicts must be x0 or velocity, got {self.predicts!r}")
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint)

    def check(self, prompts: Iterable[str], sampling: DiffusionSamplingParams) -> None:
        for prompt in dict.fromkeys(prompts):
            self._tokens(prompt)
        self._tokens(sampling.negative_prompt)
        self._check_size(sampling)

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        from safetensors.torch import load_file

        from unirl.models.tiny_modules import WordConditionedSD3

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            module = WordConditionedSD3(self)
        if self.checkpoint is not None:
            module.load_state_dict(load_file(self.checkpoint / "model.safetensors"))
        return Bundle(transformer=module.to(device, dtype))

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        self._check_size(sampling)
        return self.channels, self.size, self.size

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), sampling.shift or 1.0))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * 1000

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens = [self._tokens(text) for text in prompts.required_texts]
        return Embedding(tokens=torch.tensor(tokens, device=bundle.device))

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        output = bundle.transformer(latents, step.time, embedding.tokens)
        if self.predicts == "velocity":
            return output
        return (latents - output) / step.sigma.clamp(min=0.05)[:, None, None, None]

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        images = ((latents.float() + 1) / 2).clamp(0, 1)
        return Media(images=images.expand(-1, 3, -1, -1).cpu())

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        assert media.images is not None, "supervised training of this family needs images"
        return media.images[:, : self.channels].to(bundle.device) * 2 - 1

    def save(self, bundle: Bundle, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in bundle.transformer.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self._shape(), indent=2) + "\n")

    def _check_checkpoint(self, folder: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"checkpoint {folder} holds no {name}; name a folder that `unirl export` has written")
        saved = json.loads((folder / "config.json").read_text())
        if saved != self._shape():
            different = [
                f"{key}={saved.get(key)} there, {value} here"
                for key, value in self._shape().items()
                if saved.get(key) != value
            ]
            raise ValueError(f"checkpoint {folder} holds a model of another shape: {'; '.join(different)}")

    def _check_size(self, sampling: DiffusionSamplingParams) -> None:
        if (sampling.height, sampling.width) != (self.size, self.size):
            asked = f"{sampling.height} x {sampling.width}"
            raise ValueError(f"this model makes {self.size} x {self.size} pixels, asked for {asked}")

    def _tokens(self, prompt: str) -> list[int]:
        """Ids of the words; 0 is the padding."""
        words = prompt.split()
        unknown = [word for word in words if word not in self.vocabulary]
        if unknown:
            raise ValueError(f"prompt {prompt!r} uses {unknown}, this model knows the words {list(self.vocabulary)}")
        if len(words) > self.words:
            raise ValueError(f"prompt {prompt!r} has {len(words)} words, this model takes {self.words}")
        return [self.vocabulary.index(word) + 1 for word in words] + [0] * (self.words - len(words))

    def _shape(self) -> dict[str, object]:
        return {
            "size": self.size,
            "channels": self.channels,
            "patch": self.patch,
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "embedding_dim": self.embedding_dim,
            "vocabulary": list(self.vocabulary),
            "words": self.words,
            "predicts": self.predicts,
        }
