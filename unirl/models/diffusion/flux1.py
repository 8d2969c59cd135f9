"""FLUX.1 dev and schnell, and Kontext that edits, through diffusers' FluxPipeline and FluxKontextPipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid, pack, unpack
from unirl.models.pretrained import check_count, check_euler
from unirl.models.published import JOINT_ATTENTION, PublishedFamily
from unirl.models.sources import EditEmbedding, to_pil
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class FLUX1(PublishedFamily):
    """Velocity `eps - x0` at time sigma; latents `(C, H, W)`, packed in 2 x 2 patches for the model; text without mask.

    Below float32 the transformer rounds sigma and guidance to its own dtype before it scales them by 1000, as the
    authors' code does; diffusers' pipeline rounds 1000 sigma first (at sigma 0.7129 the model sees 716 or 712).

    max_sequence_length: T5 tokens of a prompt, padded to that; CLIP reads 77. schnell was trained with 256
    embedded_guidance:   what dev is told of guidance. None tells it `sampling.guidance`, in a single forward. With a
                         number, `sampling.guidance` is classifier-free on top of it (`true_cfg_scale` in diffusers)
    source_size:         of the picture that Kontext edits. preferred scales it to the nearest of the sizes of about
                         1024 x 1024 that it was trained with, own keeps it
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=(
            "black-forest-labs/FLUX.1-dev",
            "black-forest-labs/FLUX.1-schnell",
            "black-forest-labs/FLUX.1-Kontext-dev",
        ),
        parameters="11.9B each",
        licence="dev, Kontext: FLUX.1 [dev] Non-Commercial; schnell: Apache-2.0",
        gated=True,
        guidance="an input of dev (3.5 is usual) and Kontext (2.5), none in schnell (1)",
        plans=("sp",),
        advice="Flow-GRPO: 6 steps, guidance 3.5, noise level 0.9, LoRA r64 alpha 128, lr 3e-4 (flux1_flow_grpo)",
    )
    # The single stream has no `to_out`: it ends in `proj_out`, a name that the model's last layer has as well.
    lora_targets: ClassVar[tuple[str, ...]] = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_mlp")
    block_names: ClassVar[tuple[str, ...]] = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    pipelines: ClassVar[tuple[str, ...]] = ("FluxPipeline", "FluxKontextPipeline")
    published: ClassVar[Grid] = Grid(scale=8)

    max_sequence_length: int = 512
    embedded_guidance: float | None = None
    source_size: Literal["preferred", "own"] = "preferred"

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length, most=512)
        if self.source_size not in ("preferred", "own"):
            raise ValueError(f"source_size must be preferred or own, got {self.source_size!r}")

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting")
        if self.embedded_guidance is not None and not pipeline.transformer.config.guidance_embeds:
            raise ValueError(
                f"{self.checkpoint} takes no guidance as an input: leave embedded_guidance null, "
                f"got {self.embedded_guidance}"
            )

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """dev shifts the more, the more image tokens there are; schnell does not shift."""
        if self.embedded_guidance is None and sampling.guidance != 1 and not _told_guidance(bundle):
            raise ValueError(f"{self.checkpoint} takes no guidance: sampling.guidance=1, got {sampling.guidance}")
        return super().sigmas(bundle, sampling)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, pooled, _ = bundle.pipeline.encode_prompt(
            prompts.required_texts, None, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        if prompts.sources is None:
            return EditEmbedding(tokens=tokens, pooled=pooled)
        sources = [[self._source_latents(bundle, picture) for picture in pictures] for pictures in prompts.sources]
        return EditEmbedding(tokens=tokens, pooled=pooled, sources=sources)

    def _source_latents(self, bundle: Bundle, picture: torch.Tensor) -> torch.Tensor:
        """A source `(3, H, W)` in [0, 1] to latents."""
        from diffusers import FluxKontextPipeline

        pipeline = bundle.pipeline
        if not isinstance(pipeline, FluxKontextPipeline):
            raise ValueError(f"{self.checkpoint} does not edit pictures: source pictures need FLUX.1-Kontext")
        cell = 2 * pipeline.vae_scale_factor
        height, width = picture.shape[-2:] if self.source_size == "own" else preferred_size(*picture.shape[-2:])
        pixels = pipeline.image_processor.preprocess(to_pil(picture), height // cell * cell, width // cell * cell)
        return latent_space.encode(pipeline.vae, pixels)[0]

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, EditEmbedding)
        pictures = [latents, *embedding.stacked_sources()]
        if len(pictures) > 2:
            raise ValueError(f"FLUX.1-Kontext edits one picture, got {len(pictures) - 1} for a prompt")
        height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
        told = guidance if self.embedded_guidance is None else self.embedded_guidance
        velocity = bundle.transformer(
            hidden_states=torch.cat([pack(picture) for picture in pictures], dim=1),
            timestep=step.time,
            guidance=torch.full_like(step.time, told) if _told_guidance(bundle) else None,
            encoder_hidden_states=embedding.tokens,
            pooled_projections=embedding.pooled,
            txt_ids=torch.zeros(embedding.tokens.shape[1], 3, device=latents.device),
            img_ids=torch.cat([_positions(number, picture) for number, picture in enumerate(pictures)]),
            return_dict=False,
        )[0]
        return unpack(velocity[:, : height * width], height, width)

    def guided(self, guidance: float) -> bool:
        return self.embedded_guidance is not None and guidance != 1


def preferred_size(height: int, width: int) -> tuple[int, int]:
    """Height and width that Kontext was trained with, of the aspect ratio nearest to that of a picture."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    _, wide, high = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
    return high, wide


def _positions(number: int, picture: torch.Tensor) -> torch.Tensor:
    """`(h w, 3)`: the number of the picture (0 is the one that is made), row and column of each token."""
    rows, columns = (torch.arange(side // 2) for side in picture.shape[-2:])
    return torch.cartesian_prod(torch.tensor([number]), rows, columns).to(picture.device, torch.float32)


def _told_guidance(bundle: Bundle) -> bool:
    return bundle.pipeline.transformer.config.guidance_embeds
