"""HunyuanImage 2.1, through diffusers' HunyuanImagePipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts, Point, classifier_free
from unirl.models.diffusion.hunyuan import GlyphEmbedding, GlyphHunyuan, HunyuanFacts, averages
from unirl.models.latents import Grid
from unirl.sde.steps import Step
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class HunyuanImage(GlyphHunyuan):
    """Text to image at 2048 pixels; guidance as in classifier_free, followed by projected guidance where that is asked.

    The pipeline's own rule goes by the number of a step, its projected guidance by all steps before, and both by
    whether any prompt of the batch quotes something. Here the rule is a function of the noise level alone.

    distilled:     the checkpoint takes guidance as an input
    apg_below:     noise level under which guidance is projected (`projected`), None for never. The pipeline does so
                   after step 5, which at 50 steps and shift 5 is a noise level below 0.978
    apg_scale, apg_threshold: of projected guidance
    apg_momentum:  refused: a velocity that depends on all earlier steps cannot be computed again from one of them
    """

    facts: ClassVar[Facts] = HunyuanFacts(
        makes="image",
        checkpoints=(
            "hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
            "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers",
        ),
        parameters="17.4B",
        guidance="classifier-free, off at 1; 3.5 is usual. Distilled: an input of the model, 3.25",
        advice="the distilled one is a mean-flow model: it samples, without noise",
    )
    block_names: ClassVar[tuple[str, ...]] = ("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock")
    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanImagePipeline",)
    published: ClassVar[Grid] = Grid(scale=32, patch=1)

    max_glyphs: int = 128
    distilled: bool = False
    apg_below: float | None = None
    apg_scale: float = 10.0
    apg_threshold: float = 10.0
    apg_momentum: float | None = None

    def __post_init__(self) -> None:
        GlyphHunyuan.__post_init__(self)
        if self.apg_momentum is not None:
            raise ValueError(
                f"apg_momentum={self.apg_momentum} sums the guidance of all earlier steps, which training cannot "
                "compute again from the step it replays: leave it out (apg_below works without it)"
            )
        if self.apg_below is not None and (self.distilled or not 0 < self.apg_below <= 1):
            raise ValueError(f"apg_below is a noise level in (0, 1], for a model with two branches: {self.apg_below}")
        if not (self.apg_scale > 0 and self.apg_threshold > 0):
            raise ValueError(f"apg_scale, apg_threshold must be positive, got {self.apg_scale}, {self.apg_threshold}")

    def prepare(self, pipeline: Any) -> None:
        found = pipeline.transformer.config.guidance_embeds
        if found != self.distilled:
            raise ValueError(f"the model at {self.checkpoint} has guidance_embeds={found}: set distilled={found}")
        GlyphHunyuan.prepare(self, pipeline)

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> GlyphEmbedding:
        return GlyphEmbedding(**self.encode_texts(bundle, prompts.required_texts))

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: GlyphEmbedding, guidance: float
    ) -> torch.Tensor:
        return bundle.transformer(
            hidden_states=latents,
            timestep=step.time,
            timestep_r=self.time(bundle, step.sigma_next, tuple(latents.shape[1:])) if averages(bundle) else None,
            encoder_hidden_states=embedding.tokens,
            encoder_attention_mask=embedding.mask,
            encoder_hidden_states_2=embedding.glyphs,
            encoder_attention_mask_2=embedding.glyph_mask,
            guidance=torch.full_like(step.time, 1000 * guidance) if self.distilled else None,
            return_dict=False,
        )[0]

    def guided(self, guidance: float) -> bool:
        return guidance != 1 and not self.distilled

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        plain = classifier_free(conditional, unconditional, at.guidance)
        if self.apg_below is None:
            return plain
        other = projected(conditional, unconditional, self.apg_scale, self.apg_threshold)
        below = (at.step.sigma < self.apg_below).reshape(-1, *([1] * (plain.ndim - 1)))
        return torch.where(below, other, plain)

    def recompute_blocks(self, bundle: Bundle) -> None:
        from torch.utils.checkpoint import checkpoint

        # The model hands its blocks keywords, which the function that diffusers takes by default does not accept.
        def recompute(block: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
            return checkpoint(block, *inputs, use_reentrant=False, **named)

        bundle.transformer.enable_gradient_checkpointing(recompute)  # type: ignore[operator]


def projected(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float, threshold: float) -> torch.Tensor:
    """Projected guidance without momentum (APG, arXiv 2410.02416): `v_u + scale d`.

    d is `v_c - v_u`, shortened to at most `threshold` (2-norm of a row), without its part along v_c. `(B, *latent)`.
    """
    difference, along = (conditional - unconditional).flatten(1), conditional.flatten(1)
    difference = difference * threshold / difference.norm(dim=1, keepdim=True).clamp(min=threshold)
    along = torch.nn.functional.normalize(along, dim=1)
    orthogonal = difference - (difference * along).sum(dim=1, keepdim=True) * along
    return unconditional + scale * orthogonal.reshape(unconditional.shape)
