"""Krea 2, undistilled and distilled."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from tests.families.case import Case, run_pipeline
from tests.families.tiny import qwen_tokenizer, redraw
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.krea2 import Krea2
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 64


def write(folder: Path, *, distilled: bool = False) -> Path:
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.2, -0.3, 0.4],
        latents_std=[1.0, 2.0, 1.5, 0.5],
    )
    tokenizer = qwen_tokenizer()
    text_encoder = Qwen3VLModel(_qwen3_vl(len(tokenizer)))
    redraw((transformer, vae, text_encoder))
    pipeline = Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        transformer=transformer,
        text_encoder_select_layers=(1, 2, 3),
        is_distilled=distilled,
    )
    pipeline.save_pretrained(folder)
    return folder


def _qwen3_vl(vocabulary: int) -> Qwen3VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision)


@dataclasses.dataclass(frozen=True)
class KreasOwnScale(Krea2):
    """The scale is taken for Krea's own number, which is one less."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance + 1)


@dataclasses.dataclass(frozen=True)
class TimeOfThousands(Krea2):
    """The model time is scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return 1000 * sigma


@dataclasses.dataclass(frozen=True)
class StaticShift(Krea2):
    """The schedule of another family."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        return super().schedule(bundle, dataclasses.replace(sampling, shift=3.5))


@dataclasses.dataclass(frozen=True)
class NoMask(Krea2):
    """Padding passes for text."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, dataclasses.replace(embedding, mask=None), guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline = bundle.processors["pipeline"]
    count, channels, height, width = latents.shape
    steps, output = run_pipeline(
        pipeline,
        case.prompts.required_texts,
        pipeline._pack_latents(latents, count, channels, height, width),
        case,
        guidance_scale=case.sampling.guidance - 1,
        max_sequence_length=LENGTH,
    )
    size = (case.sampling.height, case.sampling.width)
    return [pipeline._unpack_latents(step, *size)[:, :, 0] for step in steps], Media(images=output.images)


def family(folder: Path) -> Krea2:
    return Krea2(str(folder), max_sequence_length=LENGTH)


SAMPLING = DiffusionSamplingParams(steps=4, height=64, width=32, guidance=5.5)

CASES = [
    Case(
        name="krea2",
        write=write,
        family=family,
        sampling=SAMPLING,
        reference=reference,
        wrong={
            "krea's own scale": lambda folder: KreasOwnScale(str(folder), max_sequence_length=LENGTH),
            "time of thousands": lambda folder: TimeOfThousands(str(folder), max_sequence_length=LENGTH),
            "static shift": lambda folder: StaticShift(str(folder), max_sequence_length=LENGTH),
            "no mask": lambda folder: NoMask(str(folder), max_sequence_length=LENGTH),
        },
    ),
    Case(
        name="krea2 distilled",
        write=lambda folder: write(folder, distilled=True),
        family=family,
        sampling=dataclasses.replace(SAMPLING, guidance=1.0),
        reference=reference,
        wrong={"static shift": lambda folder: StaticShift(str(folder), max_sequence_length=LENGTH)},
    ),
]
