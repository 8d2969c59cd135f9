"""Sana (arXiv 2410.10629), through diffusers' SanaPipeline."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid, given_pictures
from unirl.models.pretrained import check_count, flow_shift
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.schedule import twice_shifted_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Sana(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`; text with a mask; a deep-compression autoencoder (32 pixels a latent).

    The published scheduler is DPM-Solver++, whose steps depend on earlier ones. The schedule here is Euler's, at the
    same shift; `sampling.solver: dpmpp_2m` brings the solver back where no step is stochastic.

    instruction:         lines put before every prompt, not before the negative one; None takes the pipeline's own
    max_sequence_length: tokens of a prompt that are kept: the first one and the last of instruction and prompt
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=(
            "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
            "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
            "Efficient-Large-Model/Sana_600M_1024px_diffusers",
        ),
        parameters="1.6B / 1.6B / 0.6B",
        licence="NVIDIA, non-commercial",
        guidance="classifier-free, off at 1; 4.5 is usual",
        advice="the text encoder (Gemma 2) overflows in float16: bfloat16 or float32",
    )
    # The feed-forward layers are convolutions.
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("SanaTransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("SanaPipeline",)
    published: ClassVar[Grid] = Grid(scale=32, patch=1)
    overflows: ClassVar[bool] = True

    instruction: tuple[str, ...] | None = None
    max_sequence_length: int = 300

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length, least=2)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        return Grid(2 ** (len(vae["encoder_block_out_channels"]) - 1), patch=transformer["patch_size"])

    def prepare(self, pipeline: Any) -> None:
        """Without a scheduler of a flow, such as that of Sana-Sprint, it is another kind of model."""
        flow_shift(pipeline.scheduler.config)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        config = bundle.pipeline.scheduler.config
        shift = flow_shift(config) if sampling.shift is None else sampling.shift
        return twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        pipeline = bundle.pipeline
        return sigma * pipeline.scheduler.config.num_train_timesteps * pipeline.transformer.config.timestep_scale

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        lines = _own_instruction(bundle) if self.instruction is None else list(self.instruction)
        return self._encode(bundle, prompts, lines)

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self._encode(bundle, prompts, [])

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return bundle.transformer(
            hidden_states=latents,
            timestep=step.time,
            encoder_hidden_states=embedding.tokens,
            encoder_attention_mask=embedding.mask,
            return_dict=False,
        )[0]

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """This autoencoder gives the latent itself, no distribution."""
        vae = bundle.pipeline.vae
        pixels = given_pictures(media).to(bundle.device, torch.float32)
        return vae.encode(pixels, return_dict=False)[0] * vae.config.scaling_factor

    def _encode(self, bundle: Bundle, prompts: Media, lines: list[str]) -> Embedding:
        tokens, mask, _, _ = bundle.pipeline.encode_prompt(
            prompts.required_texts,
            do_classifier_free_guidance=False,
            device=bundle.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=lines,
        )
        return Embedding(tokens=tokens, mask=mask.bool())


def _own_instruction(bundle: Bundle) -> list[str]:
    """What a call of the pipeline puts before a prompt; `encode_prompt` by itself puts nothing."""
    call = inspect.signature(type(bundle.pipeline).__call__)
    return call.parameters["complex_human_instruction"].default
