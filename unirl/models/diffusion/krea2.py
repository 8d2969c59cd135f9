"""Krea 2, through diffusers' Krea2Pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.models.pretrained import check_checkpoint, check_euler, load_pipeline
from unirl.sde.schedule import exponential_shift, linear_mu, pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_DISTILLED_MU = 1.15


@dataclasses.dataclass(frozen=True)
class Krea2(DiffusionFamily):
    """Velocity `eps - x0` at time sigma; text as the states of several encoder layers, padded to one length, masked.

    Guidance is the usual scale, as in classifier_free: Krea's own number is one less (its 4.5 is 5.5 here, its 0 is 1).

    checkpoint:          hub id, or folder of a saved pipeline
    max_sequence_length: text tokens of a prompt, which take 61 kB each in bfloat16
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("krea/Krea-2-Raw", "krea/Krea-2-Turbo"),
        parameters="12.8B",
        licence="Krea 2 Community License",
        gated=True,
        guidance="classifier-free, off at 1; 5.5 for Raw (Krea's own 4.5), 1 for Turbo",
        advice="Raw is an undistilled checkpoint that was published for post-training",
    )
    # Bare names: the text fusion, which runs once a forward, is trained as well.
    lora_targets: ClassVar[tuple[str, ...]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "to_gate",
        "ff.gate",
        "ff.up",
        "ff.down",
    )
    block_names: ClassVar[tuple[str, ...]] = ("Krea2TransformerBlock", "Krea2TextFusionBlock")

    checkpoint: str
    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "Krea2Pipeline")
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be at least 1, got {self.max_sequence_length}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import Krea2Pipeline

        pipeline: Any = load_pipeline(Krea2Pipeline, self.checkpoint, device, dtype=dtype, frozen_dtype=frozen_dtype)
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting")
        if not pipeline.scheduler.config["use_dynamic_shifting"]:
            raise ValueError(
                "this family shifts by the size of what it makes, the checkpoint's scheduler by a constant"
            )
        # How many tokens the template takes is the tokenizer's affair; the pipeline has the numbers of one of them.
        prefix, suffix = pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
        pipeline.prompt_template_encode_num_suffix_tokens = len(pipeline.tokenizer(suffix).input_ids)
        frozen = {"text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
        return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = _pipeline(bundle)
        cell = pipeline.vae_scale_factor * pipeline.patch_size
        wanted = (sampling.height, sampling.width)
        nearest = [max(round(side / cell), 1) * cell for side in wanted]
        if list(wanted) != nearest:
            raise ValueError(
                f"this model makes multiples of {cell} pixels, asked for {sampling.height} x {sampling.width}; "
                f"the nearest is {nearest[0]} x {nearest[1]}"
            )
        return pipeline.vae.config.z_dim, *(side // pipeline.vae_scale_factor for side in wanted)

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        pipeline = _pipeline(bundle)
        grid = uniform_sigmas(sampling.steps)
        if sampling.shift is not None:
            sigmas = pin(shift_sigmas(grid, sampling.shift))
        elif pipeline.config.is_distilled:
            sigmas = pin(exponential_shift(grid, _DISTILLED_MU))
        else:
            config = pipeline.scheduler.config
            _, height, width = self.latent_shape(bundle, sampling)
            base = (config.base_image_seq_len, config.base_shift)
            top = (config.max_image_seq_len, config.max_shift)
            mu = linear_mu(height * width // pipeline.patch_size**2, base=base, top=top)
            sigmas = pin(exponential_shift(grid, mu))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """tokens: `(N, L, layers, D)`; the mask is False between a prompt and the end of its template."""
        tokens, mask = _pipeline(bundle).encode_prompt(
            prompts.required_texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, mask=mask)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        pipeline = _pipeline(bundle)
        patches = torch.nn.functional.pixel_unshuffle(latents, pipeline.patch_size)
        grid = patches.shape[2:]
        velocity = bundle.transformer(
            hidden_states=patches.flatten(2).transpose(1, 2),
            encoder_hidden_states=embedding.tokens,
            timestep=step.time,
            position_ids=pipeline.prepare_position_ids(embedding.tokens.shape[1], *grid, latents.device),
            encoder_attention_mask=embedding.mask,
            return_dict=False,
        )[0]
        return torch.nn.functional.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, grid), pipeline.patch_size)

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pipeline = _pipeline(bundle)
        mean, std = _statistics(bundle)
        decoded = pipeline.vae.decode(latents.float()[:, :, None] * std + mean, return_dict=False)[0][:, :, 0]
        return Media(images=pipeline.image_processor.postprocess(decoded, output_type="pt").cpu())

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """The mode of the autoencoder's posterior, not a draw: the same picture is the same latent."""
        assert media.images is not None, "supervised training of this family needs images"
        mean, std = _statistics(bundle)
        pixels = media.images.to(bundle.device, torch.float32)[:, :, None] * 2 - 1
        return ((_pipeline(bundle).vae.encode(pixels, return_dict=False)[0].mode() - mean) / std)[:, :, 0]


def _pipeline(bundle: Bundle) -> Any:
    """The Krea2Pipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]


def _statistics(bundle: Bundle) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the autoencoder's latents, `(C, 1, 1, 1)`."""
    config = _pipeline(bundle).vae.config
    mean, std = (torch.tensor(values, device=bundle.device) for values in (config.latents_mean, config.latents_std))
    return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)
