"""Pictures that a vision-language encoder reads, without torchvision."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unirl.models.pretrained import resolve
from unirl.types.media import Media, to_uint8

if TYPE_CHECKING:
    from PIL.Image import Image


def source_pictures(prompts: Media) -> list[list[Image]]:
    """The pictures of each prompt, of which there may be none."""
    sources = prompts.sources or [[] for _ in prompts.required_texts]
    return [[as_pil(to_uint8(picture[None])[0].numpy()) for picture in pictures] for pictures in sources]


def fitted(picture: Image, area: int, multiple: int = 32) -> tuple[int, int]:
    """Height and width of about `area` pixels in the aspect of `picture`, rounded to a multiple."""
    aspect = picture.width / picture.height
    width = math.sqrt(area * aspect)
    height = width / aspect
    return round(height / multiple) * multiple, round(width / multiple) * multiple


def as_pil(picture: np.ndarray) -> Image:
    """A picture `(H, W, 3)` uint8 as image processors take it: of an array 3 pixels high they would guess its axes."""
    from PIL.Image import fromarray

    return fromarray(picture)


def png(picture: np.ndarray) -> bytes:
    """A file of a picture `(H, W, 3)` uint8; every level is kept."""
    buffer = io.BytesIO()
    as_pil(picture).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def processor_folder(checkpoint: str) -> Path:
    """The `processor` of a saved pipeline."""
    source = resolve(checkpoint)
    if Path(source).is_dir():
        return Path(source) / "processor"
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["processor/*"])) / "processor"


def picture_processor(published: type[Any], image_processor: Any, tokenizer: Any) -> Any:
    """A processor like `published`, a class of transformers, that takes no videos.

    Its video part alone needs torchvision. The PIL image processor is as good, and the same on every machine.
    """

    class PictureProcessor(published):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    # A pipeline that is saved writes down the names of its parts.
    PictureProcessor.__name__, PictureProcessor.__module__ = published.__name__, published.__module__
    return PictureProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def load_picture_processor(published: type[Any], folder: Path) -> Any:
    """The saved processor at `folder`."""
    from transformers import AutoImageProcessor, AutoTokenizer

    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return picture_processor(published, image_processor, AutoTokenizer.from_pretrained(folder))
