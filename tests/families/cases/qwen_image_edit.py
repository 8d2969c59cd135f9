"""Qwen-Image-Edit 2509, and 2511, whose source pictures are modulated at time 0. Each row has two pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image

from tests.families.case import TEXTS, Case, run_pipeline
from tests.families.cases.qwen_image import guided_arguments
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.qwen_image import token_grid
from unirl.models.diffusion.qwen_image_edit import EditEmbedding, QwenImageEdit
from unirl.models.latents import pack, unpack
from unirl.models.random_weights.qwen_image_edit import write
from unirl.types.condition import Embedding
from unirl.types.media import Media, to_uint8
from unirl.types.sampling import DiffusionSamplingParams

AREA = 48 * 48
TALL, WIDE = (60, 30), (30, 60)


@dataclasses.dataclass(frozen=True)
class PlainGuidance(QwenImageEdit):
    """The norm of a token is not kept."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance)


@dataclasses.dataclass(frozen=True)
class PicturesSwapped(QwenImageEdit):
    """The transformer reads the pictures in another order than the text encoder."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        embedding = super().encode(bundle, prompts, sampling)
        assert isinstance(embedding, EditEmbedding)
        return dataclasses.replace(embedding, references=[pictures[::-1] for pictures in embedding.references])


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """Row by row: the pipeline takes one prompt a call."""
    pipeline, rows = bundle.processors["pipeline"], []
    assert case.prompts.sources is not None
    for x, text, sources in zip(latents, case.prompts.required_texts, case.prompts.sources, strict=True):
        arguments = {**guided_arguments(case, 1), "image": as_pil(sources)}
        with patch.multiple(pipeline_qwenimage_edit_plus, CONDITION_IMAGE_SIZE=AREA, VAE_IMAGE_SIZE=AREA):
            rows.append(run_pipeline(pipeline, [text], pack(x[None]), case, **arguments))
    steps = [
        unpack(torch.cat(row), *token_grid(latents)[1:]) for row in zip(*(steps for steps, _ in rows), strict=True)
    ]
    return [*steps], Media(images=torch.cat([output.images for _, output in rows]))


def as_pil(pictures: list[torch.Tensor]) -> list[Image.Image]:
    return [Image.fromarray(to_uint8(picture[None])[0].numpy()) for picture in pictures]


def sources(*shapes: tuple[tuple[int, int], ...]) -> list[list[torch.Tensor]]:
    """Pictures of whole grey levels, so that a pipeline of 8-bit pictures sees the same."""
    draws = torch.Generator().manual_seed(0)
    return [[torch.randint(256, (3, *shape), generator=draws) / 255 for shape in row] for row in shapes]


def case(name: str, *, zero_cond_t: bool, pictures: list[list[torch.Tensor]]) -> Case:
    def family(folder: Path, cls: type[QwenImageEdit] = QwenImageEdit, **settings: str) -> QwenImageEdit:
        return dataclasses.replace(cls(str(folder), condition_area=AREA, reference_area=AREA), **settings)

    return Case(
        name=name,
        write=lambda folder: write(folder, zero_cond_t=zero_cond_t),
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=48, guidance=4.0, negative_prompt=" "),
        reference=reference,
        prompts=Media(texts=list(TEXTS), sources=pictures),
        silent=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
        wrong={
            "guidance without the norm": lambda folder: family(folder, PlainGuidance),
            "pictures swapped": lambda folder: family(folder, PicturesSwapped),
            "positions on the grid": lambda folder: family(folder, positions="multimodal"),
        },
    )


CASES = [
    case("qwen_image_edit_2509", zero_cond_t=False, pictures=sources((TALL, WIDE), (TALL, WIDE))),
    case("qwen_image_edit_2511", zero_cond_t=True, pictures=sources((TALL, WIDE), (WIDE, TALL))),
]
