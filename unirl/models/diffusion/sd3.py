"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206), through diffusers' StableDiffusion3Pipeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid
from unirl.models.pretrained import check_count, check_euler
from unirl.models.published import JOINT_ATTENTION, PublishedFamily
from unirl.sde.schedule import shift_sigmas, twice_shifted_sigmas, uniform_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class SD3(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`; text of fixed length without a mask; guidance as in classifier_free.

    t5:                  False leaves the third text encoder out (most of the memory); its tokens are zeros then
    max_sequence_length: T5 tokens of a prompt; the CLIP encoders read 77
    schedule_table:      pipeline  the pipeline's own, which shifts twice (`twice_shifted_sigmas`)
                         shifted   `linspace(1, 1/T, T)` shifted once, as the pipeline does to given `sigmas`
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=(
            "stabilityai/stable-diffusion-3-medium-diffusers",
            "stabilityai/stable-diffusion-3.5-medium",
            "stabilityai/stable-diffusion-3.5-large",
        ),
        parameters="2.0B / 2.2B / 8.1B",
        licence="Stability AI Community License",
        gated=True,
        guidance="classifier-free, off at 1; 4.5 is usual",
        advice="Flow-GRPO: 10 steps, noise level 0.7, LoRA r32 alpha 64, lr 3e-4, KL 0.04 (sd3_flow_grpo)",
    )
    # Bare names: `attn.to_q` would miss `attn2`, the second attention of 3.5-medium.
    lora_targets: ClassVar[tuple[str, ...]] = JOINT_ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("JointTransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("StableDiffusion3Pipeline",)
    published: ClassVar[Grid] = Grid(scale=8)

    t5: bool = True
    max_sequence_length: int = 256
    schedule_table: Literal["pipeline", "shifted"] = "pipeline"

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        index = Path(self.checkpoint, "model_index.json")
        if self.t5 and index.is_file() and json.loads(index.read_text())["text_encoder_3"] == [None, None]:
            raise ValueError(f"checkpoint {self.checkpoint} was saved without its T5 encoder: set t5=false")
        check_count("max_sequence_length", self.max_sequence_length, most=512)
        if self.schedule_table not in ("pipeline", "shifted"):
            raise ValueError(f"schedule_table must be pipeline or shifted, got {self.schedule_table!r}")

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        return dataclasses.replace(super().grid(vae, transformer), largest=transformer["pos_embed_max_size"])

    def parts(self) -> dict[str, Any]:
        return {} if self.t5 else {"text_encoder_3": None, "tokenizer_3": None}

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        config = bundle.pipeline.scheduler.config
        shift = config.shift if sampling.shift is None else sampling.shift
        if self.schedule_table == "pipeline":
            return twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps)
        return shift_sigmas(uniform_sigmas(sampling.steps), shift)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * bundle.pipeline.scheduler.config.num_train_timesteps

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        # The negative prompt comes through here like any other, so "" is encoded and not replaced by zeros.
        tokens, _, pooled, _ = bundle.pipeline.encode_prompt(
            prompts.required_texts,
            None,
            None,
            device=bundle.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return Embedding(tokens=tokens, pooled=pooled)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return bundle.transformer(
            hidden_states=latents,
            timestep=step.time,
            encoder_hidden_states=embedding.tokens,
            pooled_projections=embedding.pooled,
            return_dict=False,
        )[0]
