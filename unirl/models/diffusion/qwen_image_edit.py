"""Qwen-Image-Edit 2509 and 2511 (arXiv 2508.02324), through diffusers' QwenImageEditPlusPipeline."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.grouped import in_groups
from unirl.models.diffusion.qwen_image import QwenImageBase, explicit_mask, token_grid, velocity
from unirl.models.pictures import fitted, load_picture_processor, processor_folder, source_pictures
from unirl.sde.steps import Step
from unirl.types.batch import listed
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EditEmbedding(Embedding):
    """references: N lists of latents `(C, h, w)`, the source pictures of each row"""

    references: list[list[torch.Tensor]] = listed()


@dataclasses.dataclass(frozen=True)
class QwenImageEdit(QwenImageBase):
    """Source pictures enter twice: beside the text, and as latents beside those that are generated.

    The negative prompt is read with the same pictures. Rows may come with pictures of different number and size.

    condition_area: pixels of a picture that the text encoder reads
    reference_area: pixels of a picture that the transformer reads
    positions:      of the text encoder's tokens
                    pipeline    1, 2, 3, ... as diffusers 0.42 on transformers 5 has them
                    multimodal  on the grid of each picture, as on transformers 4, with which the weights came out
    """

    facts: ClassVar[Facts] = Facts(
        makes="image from images",
        checkpoints=("Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"),
        parameters="20.4B / 20.4B",
        licence="Apache-2.0",
        guidance="classifier-free with the norm of each token kept, off at 1; 4 is usual, negative prompt ' '",
        plans=("sp", "tp"),
        advice="Flow-GRPO: 10 steps, noise level 0.9 on a window of 4, LoRA r64 alpha 128 (qwen_image_edit_flow_grpo)",
    )
    pipelines: ClassVar[tuple[str, ...]] = ("QwenImageEditPlusPipeline",)

    condition_area: int = 384 * 384
    reference_area: int = 1024 * 1024
    positions: Literal["pipeline", "multimodal"] = "pipeline"

    def __post_init__(self) -> None:
        QwenImageBase.__post_init__(self)
        if min(self.condition_area, self.reference_area) < 32 * 32:
            areas = f"condition_area={self.condition_area}, reference_area={self.reference_area}"
            raise ValueError(f"a picture has at least 32 x 32 pixels, got {areas}")
        if self.positions not in ("pipeline", "multimodal"):
            raise ValueError(f"positions must be pipeline or multimodal, got {self.positions!r}")

    def parts(self) -> dict[str, Any]:
        from transformers import Qwen2VLProcessor

        return {"processor": load_picture_processor(Qwen2VLProcessor, processor_folder(self.checkpoint))}

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        rows = list(zip(prompts.required_texts, source_pictures(prompts), strict=True))
        for text, pictures in rows:
            if not pictures:
                raise ValueError(
                    f"Qwen-Image-Edit changes pictures: the prompt {text!r} comes without a source picture"
                )
        return EditEmbedding.concat([self._encode_row(bundle, text, pictures) for text, pictures in rows])

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, EditEmbedding), "this family encodes its own embeddings"

        def forward(rows: list[int]) -> torch.Tensor:
            own = embedding.select(rows)
            return velocity(bundle, latents[rows], step.time[rows], own, references=own.references)

        return in_groups(bundle, [tuple(map(token_grid, pictures)) for pictures in embedding.references], forward)

    def save(self, bundle: Bundle, folder: Path) -> None:
        """With the checkpoint's processor as it is: ours lacks the video part."""
        QwenImageBase.save(self, bundle, folder)
        shutil.copytree(processor_folder(self.checkpoint), folder / "processor", dirs_exist_ok=True)

    def _encode_row(self, bundle: Bundle, text: str, pictures: list[Image]) -> EditEmbedding:
        pipeline = bundle.pipeline
        sizes = pipeline.image_processor
        read = [sizes.resize(picture, *fitted(picture, self.condition_area)) for picture in pictures]
        slots = [f"Picture {row}: <|vision_start|><|image_pad|><|vision_end|>" for row in range(1, len(read) + 1)]
        prompt = pipeline.prompt_template_encode.format("".join(slots) + text)
        inputs = pipeline.processor(text=[prompt], images=read, return_tensors="pt").to(bundle.device)
        if self.positions == "pipeline":
            del inputs["mm_token_type_ids"]
        states = pipeline.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1]
        tokens = states[:, pipeline.prompt_template_encode_start_idx :]
        pixels = [sizes.preprocess(picture, *fitted(picture, self.reference_area)) for picture in pictures]
        references = [latent_space.encode(pipeline.vae, picture)[0] for picture in pixels]
        return EditEmbedding(tokens=tokens, mask=explicit_mask(tokens, None), references=[references])
