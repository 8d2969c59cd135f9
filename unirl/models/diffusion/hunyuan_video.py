"""HunyuanVideo (arXiv 2412.03603), through diffusers' HunyuanVideoPipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.hunyuan import Hunyuan, HunyuanFacts
from unirl.models.latents import Grid
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.kinds import Kind
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class HunyuanVideo(Hunyuan):
    """Text to video. Guidance is an input of the model, which was distilled for it: one forward a step.

    Text as states of a language model, with a mask, and one vector of CLIP, which reads 77 tokens.
    """

    facts: ClassVar[Facts] = HunyuanFacts(
        makes="video",
        checkpoints=("hunyuanvideo-community/HunyuanVideo",),
        parameters="12.8B",
        guidance="an input of the model; 6 is usual",
        advice="DanceGRPO: 16 steps, shift 5, kernel dance at 0.25, 53 frames of 480 x 480 (hunyuan_video_flow_grpo)",
    )
    kinds: ClassVar[frozenset[Kind]] = frozenset({"video"})
    block_names: ClassVar[tuple[str, ...]] = ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock")
    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanVideoPipeline",)
    published: ClassVar[Grid] = Grid(scale=8, stride=4)

    max_sequence_length: int = 256

    def prepare(self, pipeline: Any) -> None:
        Hunyuan.prepare(self, pipeline)
        config = pipeline.transformer.config
        if not config.guidance_embeds or config.image_condition_type is not None:
            raise ValueError(
                f"checkpoint {self.checkpoint} is no text-to-video model that takes guidance as an input: it has "
                f"guidance_embeds={config.guidance_embeds}, image_condition_type={config.image_condition_type}"
            )

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, pooled, mask = bundle.pipeline.encode_prompt(
            prompts.required_texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, pooled=pooled, mask=mask.bool())

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return bundle.transformer(
            hidden_states=latents,
            timestep=step.time,
            encoder_hidden_states=embedding.tokens,
            encoder_attention_mask=embedding.mask,
            pooled_projections=embedding.pooled,
            guidance=torch.full_like(step.time, 1000 * guidance),
            return_dict=False,
        )[0]

    def guided(self, guidance: float) -> bool:
        return False
