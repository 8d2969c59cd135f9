"""FLUX.3 klein: guided, edits of one and of two pictures, and the flow map."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, Flux3AutoBlocks, Flux3DistilledAutoBlocks

from tests.families.case import Case
from tests.families.cases.flux2 import PICTURES
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.flux3 import FLUX3
from unirl.models.random_weights.flux3 import write
from unirl.models.random_weights.parts import FLUX_TEXT_LAYERS
from unirl.models.sources import to_pil
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

SAMPLING = DiffusionSamplingParams(steps=4, height=64, width=48, guidance=4.0)
# In windows of 80 and of 160 tokens.
TEXTS = ["a red cat", "two blue dogs on a very long hill, in front of three green trees"]


@dataclasses.dataclass(frozen=True)
class OneWindow(FLUX3):
    """Short prompts are padded like the longest one."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None
        whole = dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))
        return super().predict(bundle, latents, step, whole, guidance)


@dataclasses.dataclass(frozen=True)
class SwappedBranches(FLUX3):
    """The unconditional branch takes the place of the conditional one."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class TargetIsNow(FLUX3):
    """The model is not told where the step ends."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        stopped = dataclasses.replace(step, sigma_next=step.sigma)
        return super().predict(bundle, latents, stopped, embedding, guidance)


@dataclasses.dataclass(frozen=True)
class WithoutSources(FLUX3):
    """The pictures are not looked at."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return super().encode(bundle, dataclasses.replace(prompts, sources=None), sampling)


@dataclasses.dataclass(frozen=True)
class TokenizerOnly:
    """What the blocks use of Qwen3-VL's processor, which needs torchvision."""

    tokenizer: Any

    def apply_chat_template(self, *arguments: Any, **settings: Any) -> str:
        return self.tokenizer.apply_chat_template(*arguments, **settings)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[Any], Media]:
    """The blocks, which take one prompt a call and show the last latents alone."""
    loaded = bundle.processors["pipeline"]
    blocks = Flux3DistilledAutoBlocks() if loaded.transformer.config.flow_map else Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = blocks.init_pipeline()
    parts = {name: loaded.components[name] for name in ("transformer", "text_encoder", "vae")}
    pipeline.update_components(**parts, tokenizer=TokenizerOnly(loaded.tokenizer))
    if case.sampling.guidance != 1:
        pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=case.sampling.guidance))
    pipeline.set_progress_bar_config(disable=True)
    settings = {"height": case.sampling.height, "width": case.sampling.width, "output_type": "pt"}
    outputs = []
    for row, text in enumerate(case.prompts.required_texts):
        pictures = case.prompts.sources[row] if case.prompts.sources is not None else []
        if pictures:
            settings["image"] = [to_pil(picture) for picture in pictures]
        outputs.append(
            pipeline(
                prompt=text,
                latents=latents[row : row + 1],
                num_inference_steps=case.sampling.steps,
                text_encoder_out_layers=FLUX_TEXT_LAYERS,
                **settings,
            )
        )
    last = torch.cat([output.get("latents") for output in outputs])
    images = torch.cat([output.get("images") for output in outputs])
    return [*[None] * (case.sampling.steps - 1), last], Media(images=images)


def family(folder: Path, cls: type[FLUX3] = FLUX3) -> FLUX3:
    return cls(checkpoint=str(folder), text_layers=FLUX_TEXT_LAYERS)


CASES = [
    Case(
        name="flux3",
        write=write,
        family=family,
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=TEXTS),
        silent=("mode_blocks.image_cond",),  # they read source pictures
        wrong={
            "one window": functools.partial(family, cls=OneWindow),
            "branches swapped": functools.partial(family, cls=SwappedBranches),
        },
    ),
    Case(
        name="flux3 edit",
        write=write,
        family=family,
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=TEXTS, sources=[PICTURES[:1]] * 2),
        wrong={"no pictures": functools.partial(family, cls=WithoutSources)},
    ),
]
TWO_PICTURES = dataclasses.replace(CASES[-1], prompts=Media(texts=TEXTS, sources=[PICTURES, PICTURES]))
FLOW_MAP = Case(
    name="flux3 distilled",
    write=functools.partial(write, flow_map=True),
    family=family,
    sampling=dataclasses.replace(SAMPLING, guidance=1.0, noise_level=0.0),
    reference=reference,
    prompts=Media(texts=TEXTS),
    wrong={"target": functools.partial(family, cls=TargetIsNow)},
)
