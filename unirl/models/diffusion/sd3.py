"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206), through diffusers' StableDiffusion3Pipeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.models.pretrained import check_checkpoint, check_size, decode_images, encode_images, resolve, static_shift
from unirl.sde.schedule import pin, shift_sigmas, twice_shifted_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class SD3(DiffusionFamily):
    """Velocity `eps - x0` at time `1000 sigma`; text of fixed length without a mask; guidance as in classifier_free.

    checkpoint:          hub id, or folder of a saved pipeline
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
    lora_targets: ClassVar[tuple[str, ...]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    block_names: ClassVar[tuple[str, ...]] = ("JointTransformerBlock",)

    checkpoint: str
    t5: bool = True
    max_sequence_length: int = 256
    schedule_table: Literal["pipeline", "shifted"] = "pipeline"

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "StableDiffusion3Pipeline")
        index = Path(self.checkpoint) / "model_index.json"
        if self.t5 and index.is_file() and json.loads(index.read_text())["text_encoder_3"] == [None, None]:
            raise ValueError(f"checkpoint {self.checkpoint} was saved without its T5 encoder: set t5=false")
        if not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length must be in 1..512, got {self.max_sequence_length}")
        if self.schedule_table not in ("pipeline", "shifted"):
            raise ValueError(f"schedule_table must be pipeline or shifted, got {self.schedule_table!r}")

    def check(self, prompts: Iterable[str], sampling: DiffusionSamplingParams) -> None:
        """The size, where the checkpoint is a folder."""
        folder = Path(self.checkpoint)
        if folder.is_dir():
            transformer, autoencoder = (_config(folder, part) for part in ("transformer", "vae"))
            scale = 2 ** (len(autoencoder["block_out_channels"]) - 1)
            check_size(sampling, scale * transformer["patch_size"], transformer["pos_embed_max_size"])

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import StableDiffusion3Pipeline

        dtypes = {"default": frozen_dtype or dtype, "transformer": dtype, "vae": torch.float32}
        absent = {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            resolve(self.checkpoint), dtype=dtypes, **({} if self.t5 else absent)
        ).to(device)
        static_shift(pipeline.scheduler.config)
        # One picture at a time: the memory of a batch of decodes is that of one, and no picture depends on its batch.
        pipeline.vae.enable_slicing()
        names = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")
        frozen = {name: pipeline.components[name] for name in names if pipeline.components[name] is not None}
        return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = _pipeline(bundle)
        config = pipeline.transformer.config
        check_size(sampling, pipeline.vae_scale_factor * config.patch_size, config.pos_embed_max_size)
        sides = (sampling.height, sampling.width)
        return config.in_channels, *(side // pipeline.vae_scale_factor for side in sides)

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        config = _pipeline(bundle).scheduler.config
        shift = config.shift if sampling.shift is None else sampling.shift
        if self.schedule_table == "pipeline":
            sigmas = pin(twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps))
        else:
            sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), shift))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return sigma * _pipeline(bundle).scheduler.config.num_train_timesteps

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        # The negative prompt comes through here like any other, so "" is encoded and not replaced by zeros.
        tokens, _, pooled, _ = _pipeline(bundle).encode_prompt(
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

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        return decode_images(_pipeline(bundle), latents)

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        return encode_images(_pipeline(bundle), media)


def _pipeline(bundle: Bundle) -> Any:
    """The StableDiffusion3Pipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]


def _config(folder: Path, part: str) -> dict[str, Any]:
    file = folder / part / "config.json"
    if not file.is_file():
        raise ValueError(f"checkpoint {folder} holds no {part}/config.json: it is no whole diffusers pipeline")
    return json.loads(file.read_text())
