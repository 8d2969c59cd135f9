"""Z-Image and Z-Image-Turbo (arXiv 2511.22699), through diffusers' ZImagePipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts, Point, classifier_free
from unirl.models.latents import Grid
from unirl.models.pretrained import check_count, check_euler, ragged_embedding
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class ZImage(PublishedFamily):
    """The model's time is `1 - sigma` and its output `x0 - eps`: negated here. Rows of text have their own lengths.

    Guidance is counted as everywhere in this project, `v_u + g (v_c - v_u)`, off at 1. The pipeline writes
    `v_c + g' (v_c - v_u)`, off at 0, so its 4 is 5 here; the Turbo checkpoint takes none, 0 there and 1 here. Its
    `cfg_truncation`, which drops guidance late in a walk, is not offered.

    norm_limit:          bound on the norm of a guided velocity, in norms of the conditional one (`cfg_normalization` of
                         the pipeline); None for no bound
    max_sequence_length: tokens of a prompt, chat template included
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo"),
        parameters="6.2B",
        licence="Apache-2.0",
        guidance="classifier-free, off at 1; 5 is usual (4 as the pipeline counts), 1 for Turbo",
        advice="Flow-GRPO on one step of 1, 2, 3 (z_image_flow_grpo); Turbo is distilled to 8 steps",
    )
    # Bare names reach the refiners of image and caption as well, blocks like all others.
    lora_targets: ClassVar[tuple[str, ...]] = (*ATTENTION, "w1", "w2", "w3")
    block_names: ClassVar[tuple[str, ...]] = ("ZImageTransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("ZImagePipeline",)
    published: ClassVar[Grid] = Grid(scale=8)

    norm_limit: float | None = None
    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length)
        if self.norm_limit is not None and not self.norm_limit > 0:
            raise ValueError(f"norm_limit must be positive, or null for none, got {self.norm_limit}")

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        return dataclasses.replace(super().grid(vae, transformer), largest=min(transformer["axes_lens"][1:]))

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return 1 - sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        rows, _ = bundle.pipeline.encode_prompt(
            list(prompts.required_texts),  # a copy: the pipeline writes its chat template into the list
            device=bundle.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return ragged_embedding(rows)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None, "rows of text have lengths of their own"
        lengths = embedding.mask.sum(dim=1).tolist()
        output = bundle.transformer(
            x=list(latents.unsqueeze(2)),  # (C, frames, H, W) each
            t=step.time,
            cap_feats=[tokens[:length] for tokens, length in zip(embedding.tokens, lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(output).squeeze(2)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        velocity = classifier_free(conditional, unconditional, at.guidance)
        if self.norm_limit is None:
            return velocity
        norm, limit = _row_norm(velocity), self.norm_limit * _row_norm(conditional)
        return velocity * (limit / norm).clamp(max=1)


def _row_norm(velocity: torch.Tensor) -> torch.Tensor:
    """Of each row's whole latent, in a shape that divides it."""
    norms = torch.linalg.vector_norm(velocity.flatten(1), dim=1)
    return norms.reshape(-1, *([1] * (velocity.ndim - 1)))
