"""Sana (arXiv 2410.10629), through diffusers' SanaPipeline."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.models.pretrained import check_checkpoint, check_size, load_pipeline
from unirl.sde.schedule import pin, twice_shifted_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# The name of the shift in the config of each scheduler whose flow has one; the table is Euler's for all of them.
_SHIFTS = {"DPMSolverMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}


@dataclasses.dataclass(frozen=True)
class Sana(DiffusionFamily):
    """Velocity `eps - x0` at time `1000 sigma`; text with a mask; a deep-compression autoencoder (32 pixels a latent).

    The published scheduler is DPM-Solver++, whose steps depend on earlier ones. The schedule here is Euler's, at the
    same shift; `sampling.solver: dpmpp_2m` brings the solver back where no step is stochastic.

    checkpoint:          hub id, or folder of a saved pipeline
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
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    block_names: ClassVar[tuple[str, ...]] = ("SanaTransformerBlock",)

    checkpoint: str
    instruction: tuple[str, ...] | None = None
    max_sequence_length: int = 300

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "SanaPipeline")
        if self.max_sequence_length < 2:
            raise ValueError(f"max_sequence_length must be at least 2, got {self.max_sequence_length}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: rewards look at what it draws."""
        from diffusers import SanaPipeline

        if (frozen_dtype or dtype) == torch.float16:
            raise ValueError("the text encoder of Sana overflows in float16; take bfloat16 or float32")
        pipeline = load_pipeline(SanaPipeline, self.checkpoint, device, dtype=dtype, frozen_dtype=frozen_dtype)
        _check_scheduler(pipeline.scheduler.config)
        frozen = {"text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
        return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = _pipeline(bundle)
        config, factor = pipeline.transformer.config, pipeline.vae_scale_factor
        check_size(sampling, factor * config.patch_size)
        return config.in_channels, sampling.height // factor, sampling.width // factor

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        config = _pipeline(bundle).scheduler.config
        shift = config[_SHIFTS[config["_class_name"]]] if sampling.shift is None else sampling.shift
        sigmas = pin(twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        pipeline = _pipeline(bundle)
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

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pipeline = _pipeline(bundle)
        decoded = pipeline.vae.decode(latents.float() / pipeline.vae.config.scaling_factor, return_dict=False)[0]
        return Media(images=pipeline.image_processor.postprocess(decoded, output_type="pt").cpu())

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        assert media.images is not None, "supervised training of this family needs images"
        vae = _pipeline(bundle).vae
        pixels = media.images.to(bundle.device, torch.float32) * 2 - 1
        return vae.encode(pixels, return_dict=False)[0] * vae.config.scaling_factor

    def _encode(self, bundle: Bundle, prompts: Media, lines: list[str]) -> Embedding:
        tokens, mask, _, _ = _pipeline(bundle).encode_prompt(
            prompts.required_texts,
            do_classifier_free_guidance=False,
            device=bundle.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=lines,
        )
        return Embedding(tokens=tokens, mask=mask.bool())


def _pipeline(bundle: Bundle) -> Any:
    """The SanaPipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]


def _own_instruction(bundle: Bundle) -> list[str]:
    """What a call of the pipeline puts before a prompt; `encode_prompt` by itself puts nothing."""
    call = inspect.signature(type(_pipeline(bundle)).__call__)
    return call.parameters["complex_human_instruction"].default


def _check_scheduler(config: Any) -> None:
    if config["_class_name"] not in _SHIFTS:
        raise ValueError(
            f"Sana's schedule is that of {' or '.join(_SHIFTS)}, the checkpoint has {config['_class_name']} "
            "(Sana-Sprint is another kind of model)"
        )
