"""Cosmos 3 as a text-to-image model, through diffusers' Cosmos3OmniPipeline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.models.pretrained import check_checkpoint, resolve
from unirl.sde.schedule import pin, twice_shifted_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.batch import pad_to_longest
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# What the shift is called in the config of each scheduler; the table is Euler's for both.
_SHIFTS = {"UniPCMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}


@dataclasses.dataclass(frozen=True)
class Cosmos3(DiffusionFamily):
    """Velocity `eps - x0` at time `1000 sigma`; the transformer embeds the text itself, one sample a call.

    The published scheduler is UniPC, whose steps depend on earlier ones. The schedule here is Euler's, at its shift.
    The pipeline's guardrails are not loaded; whether they must be is a question to the licence of the checkpoint.

    checkpoint: hub id, or folder of a saved pipeline
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("nvidia/Cosmos3-Nano", "nvidia/Cosmos3-Super", "nvidia/Cosmos3-Super-Text2Image"),
        parameters="16B / 65B / 65B",
        licence="NVIDIA Open Model License",
        guidance="classifier-free, off at 1; 6 is usual",
        advice="prompts are expected as long JSON captions; a batch is a loop, so small ones cost nothing",
    )
    # The branch that draws. The branch that reads (to_q, mlp, ...) also writes text, and stays as it is.
    lora_targets: ClassVar[tuple[str, ...]] = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    block_names: ClassVar[tuple[str, ...]] = ("Cosmos3VLTextMoTDecoderLayer",)

    checkpoint: str

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "Cosmos3OmniPipeline")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import Cosmos3OmniPipeline

        dtypes = {"default": frozen_dtype or dtype, "transformer": dtype, "vae": torch.float32}
        pipeline: Any = Cosmos3OmniPipeline.from_pretrained(
            resolve(self.checkpoint), dtype=dtypes, safety_checker=None, enable_safety_checker=False
        ).to(device)
        scheduler = pipeline.scheduler.config["_class_name"]
        if scheduler not in _SHIFTS:
            raise ValueError(f"checkpoint {self.checkpoint}: the scheduler is one of {list(_SHIFTS)}, not {scheduler}")
        pipeline.vae.enable_slicing()
        return Bundle(transformer=pipeline.transformer, frozen={"vae": pipeline.vae}, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        config = _pipeline(bundle).vae.config
        cell = config.scale_factor_spatial
        wanted = (sampling.frames, sampling.height, sampling.width)
        height, width = (max(round(side / cell), 1) for side in wanted[1:])
        if wanted != (1, height * cell, width * cell):
            raise ValueError(
                f"this family makes 1 frame of multiples of {cell} pixels, asked for {wanted[0]} of {wanted[1]} x "
                f"{wanted[2]}; the nearest is 1 of {height * cell} x {width * cell}"
            )
        return config.z_dim, height, width

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        config = _pipeline(bundle).scheduler.config
        shift = config[_SHIFTS[config["_class_name"]]] if sampling.shift is None else sampling.shift
        sigmas = pin(twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return sigma * _pipeline(bundle).scheduler.config.num_train_timesteps

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """tokens: `(N, L)` ids of the system prompt, the prompt, and a sentence that states the size."""
        return _embedding(bundle, [_token_ids(bundle, text, "", sampling)[0] for text in prompts.required_texts])

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """The sentence that states the size is negated."""
        return _embedding(bundle, [_token_ids(bundle, "", text, sampling)[1] for text in prompts.required_texts])

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        # One packed sequence has no mask between samples.
        assert embedding.mask is not None
        rows = zip(latents, step.time, embedding.tokens, embedding.mask, strict=True)
        return torch.cat([_velocity(bundle, x, time, ids[real]) for x, time, ids, real in rows])

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pipeline = _pipeline(bundle)
        mean, std = _statistics(bundle)
        decoded = pipeline.vae.decode(latents.float()[:, :, None] * std + mean, return_dict=False)[0]
        return Media(images=pipeline.video_processor.postprocess_video(decoded, output_type="pt")[:, 0].cpu())

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """The mode of the autoencoder's posterior, not a draw: the same picture is the same latent."""
        assert media.images is not None, "supervised training of this family needs images"
        mean, std = _statistics(bundle)
        pixels = media.images.to(bundle.device, torch.float32)[:, :, None] * 2 - 1
        return ((_pipeline(bundle).vae.encode(pixels, return_dict=False)[0].mode() - mean) / std)[:, :, 0]


def _pipeline(bundle: Bundle) -> Any:
    """The Cosmos3OmniPipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]


def _statistics(bundle: Bundle) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the autoencoder's latents, `(C, 1, 1, 1)`."""
    config = _pipeline(bundle).vae.config
    mean, std = (torch.tensor(values, device=bundle.device) for values in (config.latents_mean, config.latents_std))
    return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)


def _token_ids(
    bundle: Bundle, prompt: str, negative: str, sampling: DiffusionSamplingParams
) -> tuple[list[int], list[int]]:
    """Of a prompt and of a negative prompt."""
    return _pipeline(bundle).tokenize_prompt(
        prompt, negative, num_frames=1, height=sampling.height, width=sampling.width
    )


def _embedding(bundle: Bundle, ids: list[list[int]]) -> Embedding:
    """Rows of different length, padded to the longest."""
    tokens = pad_to_longest([torch.tensor([row], device=bundle.device) for row in ids])
    mask = pad_to_longest([torch.ones(1, len(row), dtype=torch.bool, device=bundle.device) for row in ids])
    return Embedding(tokens=torch.cat(tokens), mask=torch.cat(mask))


def _velocity(bundle: Bundle, latent: torch.Tensor, time: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of one sample. latent: `(C, H, W)`; time: a number; ids: `(L,)`. Returns `(1, C, H, W)`."""
    from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as cosmos

    config: Any = bundle.transformer.config
    grid = [math.ceil(side / config.latent_patch_size) for side in latent.shape[1:]]
    length, patches = len(ids), math.prod(grid)
    text, end = cosmos.get_3d_mrope_ids_text_tokens(
        length, temporal_offset=0, use_float_positions=config.enable_fps_modulation
    )
    picture, _ = cosmos.get_3d_mrope_ids_vae_tokens(
        1,
        *grid,
        temporal_offset=end + config.unified_3d_mrope_temporal_modality_margin,
        reset_spatial_indices=config.unified_3d_mrope_reset_spatial_ids,
    )
    sequence = torch.arange(length + patches, device=latent.device)
    (velocity,), *_ = bundle.transformer(
        input_ids=ids,
        text_indexes=sequence[:length],
        position_ids=torch.cat([text, picture], dim=1).to(latent.device),
        und_len=length,
        sequence_length=length + patches,
        vision_tokens=[latent[None, :, None]],
        vision_token_shapes=[(1, *grid)],
        vision_sequence_indexes=sequence[length:],
        vision_mse_loss_indexes=sequence[length:],
        vision_timesteps=time.expand(patches),
        vision_noisy_frame_indexes=[torch.zeros(1, dtype=torch.long, device=latent.device)],
        return_dict=False,
    )
    return velocity[:, :, 0]
