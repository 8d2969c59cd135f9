"""Qwen-Image (arXiv 2508.02324), through diffusers' QwenImagePipeline, and what its editing models share with it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts, Point, classifier_free
from unirl.models.latents import Grid, pack, unpack
from unirl.models.pretrained import check_count, check_euler
from unirl.models.published import JOINT_ATTENTION, PublishedFamily
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class QwenImageBase(PublishedFamily):
    """Velocity `eps - x0` of 2 x 2 packed latents at time sigma; guidance keeps the norm of each token.

    The transformer rounds the time to the dtype of its activations, as it does inside the pipeline.
    """

    lora_targets: ClassVar[tuple[str, ...]] = JOINT_ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("QwenImageTransformerBlock",)
    published: ClassVar[Grid] = Grid(scale=8)

    def prepare(self, pipeline: Any) -> None:
        """The number of template tokens that are dropped, 34 and 64, is that of the published tokenizer."""
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting", "shift_terminal")
        prefix = pipeline.prompt_template_encode.split("{}")[0]
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        """Classifier-free guidance, each token scaled back to the norm of its conditional velocity."""
        target = pack(conditional)
        guided = classifier_free(target, pack(unconditional), at.guidance)
        norms = target.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * norms, *token_grid(conditional)[1:])


@dataclasses.dataclass(frozen=True)
class QwenImage(QwenImageBase):
    """Text of any length under a mask; the published unconditional prompt is one space.

    max_sequence_length: text tokens kept of a prompt
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
        parameters="20.4B",
        licence="Apache-2.0",
        guidance="classifier-free with the norm of each token kept, off at 1; 4 is usual, negative prompt ' '",
        plans=("sp", "tp"),
        advice="Flow-GRPO: 10 steps, noise level 1.2 on 2 of the first 5, LoRA r64 alpha 128 (qwen_image_flow_grpo)",
    )
    pipelines: ClassVar[tuple[str, ...]] = ("QwenImagePipeline",)

    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        QwenImageBase.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length, most=1024)

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, mask = bundle.pipeline.encode_prompt(
            prompts.required_texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, mask=explicit_mask(tokens, mask))

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return velocity(bundle, latents, step.time, embedding, references=[[]] * len(latents))


def token_grid(latents: torch.Tensor) -> tuple[int, int, int]:
    """Frames, height and width of packed `(..., H, W)` in tokens, where the rotary positions come from."""
    return 1, latents.shape[-2] // 2, latents.shape[-1] // 2


def velocity(
    bundle: Bundle,
    latents: torch.Tensor,
    time: torch.Tensor,
    embedding: Embedding,
    *,
    references: list[list[torch.Tensor]],
) -> torch.Tensor:
    """One forward. references: for each row the latents `(C, h, w)` that it reads beside its own, alike in shape."""
    own = pack(latents)
    read = [pack(torch.stack(column)) for column in zip(*references, strict=True)]
    grids = [token_grid(picture) for picture in (latents, *references[0])]
    tokens = bundle.transformer(
        hidden_states=torch.cat([own, *read], dim=1),
        timestep=time,
        encoder_hidden_states=embedding.tokens,
        encoder_hidden_states_mask=embedding.mask,
        img_shapes=[grids] * len(latents),
        return_dict=False,
    )[0]
    return unpack(tokens[:, : own.shape[1]], *token_grid(latents)[1:])


def explicit_mask(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The pipelines drop a mask that is full; rows that are joined later need it back."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask.bool()
