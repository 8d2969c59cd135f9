"""FLUX.2 klein and dev, making pictures and editing them, through diffusers' Flux2KleinPipeline and Flux2Pipeline."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid, given_pictures, to_unit
from unirl.models.pretrained import check_euler, resolve
from unirl.models.published import JOINT_ATTENTION, PublishedFamily
from unirl.models.sources import EditEmbedding, to_pil
from unirl.sde.schedule import flux2_mu, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_LARGEST_SOURCE = 1024 * 1024  # pixels; a larger source picture is scaled down to this


@dataclasses.dataclass(frozen=True)
class PatchedFamily(PublishedFamily):
    """Latents `(128, H / 16, W / 16)`: the autoencoder's in patches of 2 x 2, each of which is one token."""

    published: ClassVar[Grid] = Grid(scale=8)

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(bundle, sampling)
        return 4 * channels, height // 2, width // 2

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        vae = bundle.pipeline.vae
        mean, std = _statistics(vae)
        unpatched = torch.nn.functional.pixel_shuffle(latents.float() * std + mean, 2)
        return Media(images=to_unit(vae.decode(unpatched, return_dict=False)[0]))

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        return from_pixels(bundle.pipeline.vae, given_pictures(media))


@dataclasses.dataclass(frozen=True)
class FLUX2(PatchedFamily):
    """What klein and dev share. Velocity `eps - x0` at time sigma.

    A prompt with source pictures is an edit: their latents stand behind the picture's own tokens. Text is padded to
    `max_sequence_length`, and the transformer sees the padding.

    max_sequence_length: tokens of a prompt
    text_layers:         whose hidden states are the embedding
    """

    # The output of the single stream, `attn.to_out`, has the name of a list in the double stream: no suffix is its own.
    lora_targets: ClassVar[tuple[str, ...]] = (*JOINT_ATTENTION, "to_qkv_mlp_proj")
    block_names: ClassVar[tuple[str, ...]] = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")

    max_sequence_length: int = 512
    text_layers: tuple[int, ...] = ()

    @abstractmethod
    def told(self, step: Step, guidance: float) -> torch.Tensor | None:
        """Guidance as the transformer takes it, `(B,)`, or None."""

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting")

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        tokens = self.grid_of(bundle).tokens(sampling)
        shift = math.exp(flux2_mu(tokens, sampling.steps)) if sampling.shift is None else sampling.shift
        return shift_sigmas(uniform_sigmas(sampling.steps), shift)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, _ = bundle.pipeline.encode_prompt(
            prompts.required_texts,
            device=bundle.device,
            max_sequence_length=self.max_sequence_length,
            text_encoder_out_layers=self.text_layers,
        )
        sources = None
        if prompts.sources is not None:
            sources = [[_source_latents(bundle, picture) for picture in pictures] for pictures in prompts.sources]
        return EditEmbedding(tokens=tokens, sources=sources)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, EditEmbedding)
        pictures = [latents, *embedding.stacked_sources()]
        ids = [_positions(10 * number, picture) for number, picture in enumerate(pictures)]
        text_ids = torch.zeros(embedding.tokens.shape[1], 4, device=latents.device)
        text_ids[:, 3] = torch.arange(len(text_ids), device=latents.device)
        velocity = bundle.transformer(
            hidden_states=torch.cat([picture.flatten(2) for picture in pictures], dim=2).mT,
            timestep=step.time,
            guidance=self.told(step, guidance),
            encoder_hidden_states=embedding.tokens,
            txt_ids=text_ids[None],
            img_ids=torch.cat(ids)[None],
            return_dict=False,
        )[0]
        height, width = latents.shape[-2:]
        return velocity[:, : height * width].mT.unflatten(2, (height, width))


@dataclasses.dataclass(frozen=True)
class FLUX2Klein(FLUX2):
    """klein: Qwen3 reads the prompt. The base checkpoints are guided as in classifier_free, the distilled ones not."""

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=(
            "black-forest-labs/FLUX.2-klein-base-4B",
            "black-forest-labs/FLUX.2-klein-4B",
            "black-forest-labs/FLUX.2-klein-base-9B",
            "black-forest-labs/FLUX.2-klein-9B",
        ),
        parameters="3.9B / 3.9B / 9.1B / 9.1B",
        licence="4B: Apache-2.0; 9B: FLUX Non-Commercial, gated",
        guidance="classifier-free, off at 1; 4 is usual. Distilled (without `base`): none",
        plans=("sp",),
        advice="klein-base-4B has the best licence and size for RL; source pictures make it an edit",
    )
    pipelines: ClassVar[tuple[str, ...]] = ("Flux2KleinPipeline",)

    text_layers: tuple[int, ...] = (9, 18, 27)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        if bundle.pipeline.config.is_distilled and sampling.guidance != 1:
            raise ValueError(
                f"{self.checkpoint} is distilled and takes no guidance: sampling.guidance=1, got {sampling.guidance}"
            )
        return super().sigmas(bundle, sampling)

    def told(self, step: Step, guidance: float) -> torch.Tensor | None:
        return None


@dataclasses.dataclass(frozen=True)
class FLUX2Dev(FLUX2):
    """dev: Mistral Small reads the prompt behind a system message; guidance is an input, in a single forward."""

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("black-forest-labs/FLUX.2-dev",),
        parameters="32.2B, beside a text encoder of 24B",
        licence="FLUX Non-Commercial",
        gated=True,
        guidance="an input; 4 is usual",
        plans=("sp",),
        advice="source pictures make it an edit",
    )
    pipelines: ClassVar[tuple[str, ...]] = ("Flux2Pipeline",)

    text_layers: tuple[int, ...] = (10, 20, 30)

    def parts(self) -> dict[str, Any]:
        """The tokenizer alone: its processor needs torchvision, for pictures that the text encoder never gets.

        The chat template begins with <s>, and then both make the same tokens of a text.
        """
        from transformers import AutoTokenizer

        return {"tokenizer": AutoTokenizer.from_pretrained(resolve(self.checkpoint), subfolder="tokenizer")}

    def told(self, step: Step, guidance: float) -> torch.Tensor | None:
        return torch.full_like(step.time, guidance)

    def guided(self, guidance: float) -> bool:
        return False


def from_pixels(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [-1, 1] to x_0: the mode of the posterior, so that the same picture is the same latent."""
    mean, std = _statistics(vae)
    latents = vae.encode(pixels.to(vae.device, torch.float32), return_dict=False)[0].mode()
    return (torch.nn.functional.pixel_unshuffle(latents, 2) - mean) / std


def _statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel of the patched latents, from the autoencoder's batch norm."""
    variance = vae.bn.running_var.view(1, -1, 1, 1)
    return vae.bn.running_mean.view(1, -1, 1, 1), torch.sqrt(variance + vae.config.batch_norm_eps)


def _source_latents(bundle: Bundle, picture: torch.Tensor) -> torch.Tensor:
    """A source `(3, H, W)` in [0, 1] to latents, cut to whole tokens about its centre as the pipeline does."""
    from PIL.Image import Resampling

    pipeline = bundle.pipeline
    image = to_pil(picture)
    pipeline.image_processor.check_image_input(image)
    if image.width * image.height > _LARGEST_SOURCE:
        scale = math.sqrt(_LARGEST_SOURCE / (image.width * image.height))
        image = image.resize((int(image.width * scale), int(image.height * scale)), Resampling.LANCZOS)
    cell = 2 * pipeline.vae_scale_factor
    height, width = image.height // cell * cell, image.width // cell * cell
    pixels = pipeline.image_processor.preprocess(image, height=height, width=width, resize_mode="crop")
    return from_pixels(pipeline.vae, pixels)[0]


def _positions(time: int, picture: torch.Tensor) -> torch.Tensor:
    """`(h w, 4)`: time, row, column and layer of each token of `(N, C, h, w)`."""
    height, width = picture.shape[-2:]
    axes = (torch.tensor([time]), torch.arange(height), torch.arange(width), torch.tensor([0]))
    return torch.cartesian_prod(*axes).to(picture.device, torch.float32)
