"""Qwen-Image (arXiv 2508.02324), through diffusers' QwenImagePipeline, and what its editing models share with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts, classifier_free
from unirl.models.pretrained import check_checkpoint, check_euler, check_size, resolve
from unirl.sde.schedule import exponential_shift, linear_mu, pin, stretch_to_terminal, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class QwenImageBase(DiffusionFamily):
    """Velocity `eps - x0` of 2 x 2 packed latents at time sigma; guidance keeps the norm of each token.

    The transformer rounds the time to the dtype of its activations, as it does inside the pipeline.

    checkpoint: hub id, or folder of a saved pipeline
    """

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
    block_names: ClassVar[tuple[str, ...]] = ("QwenImageTransformerBlock",)
    pipeline_name: ClassVar[str]

    checkpoint: str

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, self.pipeline_name)

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = bundle.processors["pipeline"]
        scale = pipeline.vae_scale_factor
        check_size(sampling, 2 * scale)
        return pipeline.vae.config.z_dim, sampling.height // scale, sampling.width // scale

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        _, height, width = self.latent_shape(bundle, sampling)
        config = bundle.processors["pipeline"].scheduler.config
        sigmas = pin(dynamic_sigmas(config, uniform_sigmas(sampling.steps), height * width // 4, sampling.shift))
        return Schedule(sigmas=sigmas, times=sigmas[:-1])

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return sigma

    def guide(
        self, conditional: torch.Tensor, unconditional: torch.Tensor, step: Step, guidance: float
    ) -> torch.Tensor:
        """Classifier-free guidance, each token scaled back to the norm of its conditional velocity."""
        target = pack(conditional)
        guided = classifier_free(target, pack(unconditional), guidance)
        norms = target.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * norms, conditional)

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pipeline = bundle.processors["pipeline"]
        mean, std = latent_statistics(pipeline.vae, latents)
        decoded = pipeline.vae.decode((latents.float() * std + mean)[:, :, None], return_dict=False)[0]
        return Media(images=pipeline.image_processor.postprocess(decoded[:, :, 0], output_type="pt").cpu())

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """The mode of the autoencoder's posterior, not a draw: the same picture is the same latent."""
        assert media.images is not None, "supervised training of this family needs images"
        return encode_pixels(bundle, media.images * 2 - 1)


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
        context_parallel=True,
        tensor_parallel=True,
        advice="Flow-GRPO: 10 steps, noise level 1.2 on 2 of the first 5, LoRA r64 alpha 128 (qwen_image_flow_grpo)",
    )
    pipeline_name: ClassVar[str] = "QwenImagePipeline"

    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        QwenImageBase.__post_init__(self)
        if not 1 <= self.max_sequence_length <= 1024:
            raise ValueError(f"max_sequence_length must be in 1..1024, got {self.max_sequence_length}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import QwenImagePipeline

        dtypes = {"default": frozen_dtype or dtype, "transformer": dtype, "vae": torch.float32}
        return bundle_of(QwenImagePipeline.from_pretrained(resolve(self.checkpoint), dtype=dtypes).to(device))

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, mask = bundle.processors["pipeline"].encode_prompt(
            prompts.required_texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, mask=explicit_mask(tokens, mask))

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return velocity(bundle, latents, step.time, embedding, references=[[]] * len(latents))


def bundle_of(pipeline: Any) -> Bundle:
    """The Bundle of a loaded Qwen-Image pipeline."""
    check_euler(pipeline.scheduler.config, "use_dynamic_shifting", "shift_terminal")
    # The number of template tokens that are dropped, 34 and 64 in the pipelines, is that of the published tokenizer.
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
    # One picture at a time: the memory of a batch of decodes is that of one, and no picture depends on its batch.
    pipeline.vae.enable_slicing()
    frozen = {"text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
    return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})


def dynamic_sigmas(config: Mapping[str, Any], base: torch.Tensor, tokens: int, shift: float | None) -> torch.Tensor:
    """`base` shifted as far as `tokens` image tokens ask for (or by `shift`), then stretched to `shift_terminal`."""
    if shift is None and config["use_dynamic_shifting"]:
        low = (config["base_image_seq_len"], config["base_shift"])
        mu = linear_mu(tokens, base=low, top=(config["max_image_seq_len"], config["max_shift"]))
    else:
        mu = math.log(config["shift"] if shift is None else shift)
    sigmas = exponential_shift(base, mu)
    return stretch_to_terminal(sigmas, config["shift_terminal"]) if config["shift_terminal"] else sigmas


def pack(latents: torch.Tensor) -> torch.Tensor:
    """`(B, C, H, W)` -> `(B, H/2 * W/2, 4 C)`: a token is a patch of 2 x 2."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`; `like`: a tensor of the shape wanted."""
    batch, channels, height, width = like.shape
    patches = tokens.reshape(batch, height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


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
    return unpack(tokens[:, : own.shape[1]], latents)


def in_groups(keys: Sequence[Hashable], forward: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    """`forward(rows)` once for the rows of each key, the results in the order of the rows.

    These transformers take the layout of a batch from its first row: only rows alike may share a forward.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    order = torch.tensor([row for rows in groups.values() for row in rows])
    return torch.cat([forward(rows) for rows in groups.values()])[order.argsort()]


def explicit_mask(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The pipelines drop a mask that is full; rows that are joined later need it back."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask.bool()


def latent_statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the channels, `(C, 1, 1)`."""
    shape = (vae.config.z_dim, 1, 1)
    values = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(value, device=like.device).reshape(shape) for value in values)
    return mean, std


def encode_pixels(bundle: Bundle, pixels: torch.Tensor) -> torch.Tensor:
    """`(N, 3, H, W)` in [-1, 1] -> latents `(N, C, h, w)`."""
    vae = bundle.processors["pipeline"].vae
    videos = pixels.to(bundle.device, torch.float32)[:, :, None]
    latents = vae.encode(videos, return_dict=False)[0].mode()[:, :, 0]
    mean, std = latent_statistics(vae, latents)
    return (latents - mean) / std
