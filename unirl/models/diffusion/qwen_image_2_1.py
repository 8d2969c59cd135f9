"""Qwen-Image-2.1, through diffusers' QwenImage21Pipeline: pictures from texts, or from texts and pictures."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.grouped import in_groups
from unirl.models.diffusion.qwen_image import explicit_mask
from unirl.models.diffusion.qwen_image_edit import EditEmbedding
from unirl.models.latents import Grid, given_pictures
from unirl.models.pictures import fitted, load_picture_processor, processor_folder, source_pictures
from unirl.models.pretrained import check_euler, euler_sigmas
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.schedule import uniform_sigmas
from unirl.sde.steps import Step
from unirl.types.batch import padded
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SlottedEmbedding(EditEmbedding):
    """slots: `(N, L)` bool, the tokens whose place 2 x 2 latents of a source picture take"""

    slots: torch.Tensor = padded(mask="mask")


@dataclasses.dataclass(frozen=True)
class QwenImage21(PublishedFamily):
    """Velocity `eps - x0` of unpacked latents at time sigma. Text comes before the pictures and never sees them.

    A picture's place in the sequence starts where the text ends, padding included: rows of different length are
    predicted apart, or a row would depend on the prompts beside it.

    picture_area:   pixels of a source picture, for the text encoder and the transformer
    schedule_table: checkpoint  its own sigmas, if it comes with some: they fix the number of steps
                    uniform     `linspace(1, 1/T, T)`, whatever the checkpoint says
    """

    facts: ClassVar[Facts] = Facts(
        makes="image, image from images",
        checkpoints=("Qwen/Qwen-Image-2.1",),
        parameters="7.1B",
        licence="see the hub page",
        guidance="classifier-free, off at 1, which is usual",
        plans=("tp",),
        advice="40 steps in the pipeline, without guidance (qwen_image_2_1_flow_grpo)",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (*ATTENTION, "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out")
    block_names: ClassVar[tuple[str, ...]] = ("QwenImage21TransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("QwenImage21Pipeline",)
    published: ClassVar[Grid] = Grid(scale=16)

    picture_area: int = 1024 * 1024
    schedule_table: Literal["checkpoint", "uniform"] = "checkpoint"

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        if self.picture_area < 32 * 32:
            raise ValueError(f"a picture has at least 32 x 32 pixels, got picture_area={self.picture_area}")
        if self.schedule_table not in ("checkpoint", "uniform"):
            raise ValueError(f"schedule_table must be checkpoint or uniform, got {self.schedule_table!r}")

    def parts(self) -> dict[str, Any]:
        from transformers import Qwen3VLProcessor

        return {"processor": load_picture_processor(Qwen3VLProcessor, processor_folder(self.checkpoint))}

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting", "shift_terminal")

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """The shift grows with the latents of a picture, which are not packed."""
        pipeline = bundle.pipeline
        base, own = uniform_sigmas(sampling.steps), pipeline.config.sample_sigmas
        if self.schedule_table == "checkpoint" and own is not None:
            if len(own) != sampling.steps:
                raise ValueError(
                    f"the checkpoint's own schedule has {len(own)} steps, asked for {sampling.steps}: set "
                    f"sampling.steps={len(own)}, or model.schedule_table=uniform"
                )
            base = torch.tensor(own, dtype=torch.float64)
        latents = math.prod(self.grid_of(bundle).shape(sampling))
        return euler_sigmas(pipeline.scheduler.config, base, latents, sampling.shift)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        pairs = zip(prompts.required_texts, source_pictures(prompts), strict=True)
        return SlottedEmbedding.concat([self._encode_row(bundle, text, pictures) for text, pictures in pairs])

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, SlottedEmbedding), "this family encodes its own embeddings"
        assert embedding.mask is not None, "this family encodes its own embeddings"
        lengths = embedding.mask.sum(dim=1).tolist()
        shapes = [tuple(picture.shape for picture in pictures) for pictures in embedding.references]

        def forward(rows: list[int]) -> torch.Tensor:
            return _velocity(bundle, latents[rows], step.time[rows], embedding.select(rows), lengths[rows[0]])

        return in_groups(bundle, list(zip(lengths, shapes, strict=True)), forward)

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        """The autoencoder draws with transparency; a person sees it on white."""
        return Media(images=on_white(latent_space.decode(bundle.pipeline.vae, latents)))

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        pixels = given_pictures(media)
        return latent_space.encode(bundle.pipeline.vae, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    def save(self, bundle: Bundle, folder: Path) -> None:
        """With the checkpoint's processor as it is: ours lacks the video part."""
        bundle.pipeline.save_pretrained(folder)
        shutil.copytree(processor_folder(self.checkpoint), folder / "processor", dirs_exist_ok=True)

    def _encode_row(self, bundle: Bundle, text: str, pictures: list[Image]) -> SlottedEmbedding:
        pipeline = bundle.pipeline
        sizes = pipeline.image_processor
        layers = [(picture.convert("RGBA"), fitted(picture, self.picture_area)) for picture in pictures]
        read = [sizes.resize(picture, *size) for picture, size in layers]
        tokens, _, slots = pipeline.encode_prompt([text], image=read or None, device=bundle.device)
        pixels = [sizes.preprocess(picture, *size) for picture, size in layers]
        references = [latent_space.encode(pipeline.vae, picture)[0] for picture in pixels]
        mask = explicit_mask(tokens, None)
        return SlottedEmbedding(tokens=tokens, mask=mask, references=[references], slots=slots.bool())


def on_white(images: torch.Tensor) -> torch.Tensor:
    """`(N, 4, H, W)` with alpha, in [0, 1] -> `(N, 3, H, W)` over a white ground."""
    colour, alpha = images[:, :3], images[:, 3:]
    return colour * alpha + (1 - alpha)


def _velocity(
    bundle: Bundle, latents: torch.Tensor, time: torch.Tensor, embedding: SlottedEmbedding, length: int
) -> torch.Tensor:
    """One forward of rows whose texts have `length` tokens and whose pictures have the same sizes."""
    pictures = [torch.stack(column) for column in zip(*embedding.references, strict=True)]
    blocks = [*pictures, latents]
    own = embedding.slots.new_ones(len(latents), latents[0, 0].numel() // 4)
    tokens = bundle.transformer(
        hidden_states=torch.cat([block.flatten(2).transpose(1, 2) for block in blocks], dim=1),
        encoder_hidden_states=embedding.tokens[:, :length],
        timestep=time,
        img_shapes=[[(1, *block.shape[2:]) for block in blocks]] * len(latents),
        img_mask=torch.cat([embedding.slots[:, :length], own], dim=1),
        return_dict=False,
    )[0]
    return tokens[:, -latents[0, 0].numel() :].transpose(1, 2).reshape(latents.shape)
