"""What most families ask of a published diffusers pipeline: its folder, its scheduler, its sizes, its autoencoder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unirl.models.random_weights import folders
from unirl.types.batch import pad_to_longest
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_RANDOM = "random:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EULER = "FlowMatchEulerDiscreteScheduler"
_OTHER_TABLES = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
)


def check_checkpoint(checkpoint: str, *pipelines: str, index: str = "model_index.json") -> None:
    """ValueError unless `checkpoint` is a hub id, or holds one of the saved `pipelines` (class names).

    What holds one is a folder, or `random:NAME`, which is not written for it.
    index: the file that says which class; `modular_model_index.json` for a modular pipeline
    """
    found = _held(checkpoint, index)
    if found is not None and found not in pipelines:
        raise ValueError(f"checkpoint {checkpoint} holds a {found}, this family is {' or '.join(pipelines)}")


def _held(checkpoint: str, index: str) -> str | None:
    """The class of the saved pipeline; None for a hub id, which is taken at its word."""
    if checkpoint.startswith(_RANDOM):
        return folders.find(checkpoint.removeprefix(_RANDOM)).pipeline
    folder = Path(checkpoint)
    if folder.is_dir():
        if not (folder / index).is_file():
            raise ValueError(f"checkpoint {checkpoint} holds no {index}: it is not a diffusers pipeline")
        return json.loads((folder / index).read_text())["_class_name"]
    if not _HUB_ID.fullmatch(checkpoint):
        raise ValueError(f"checkpoint {checkpoint!r} is neither a folder nor a hub id (owner/name) nor random:NAME")
    return None


def resolve(checkpoint: str) -> str:
    """What libraries load: a hub id or a folder as it is, for `random:NAME` its folder, written at the first use."""
    if checkpoint.startswith(_RANDOM):
        return str(folders.folder_of(checkpoint.removeprefix(_RANDOM)))
    return checkpoint


def load_pipeline(
    pipeline_class: Any, checkpoint: str, device: torch.device, *, dtype: torch.dtype, frozen_dtype: torch.dtype | None
) -> Any:
    """A diffusers pipeline on `device`: its transformer in `dtype`, the rest in `frozen_dtype` (None for the same).

    The autoencoder stays float32 (it is small, and rewards look at what it draws) and decodes one picture at a time:
    the memory of a batch is that of one, and no picture depends on its batch.
    """
    dtypes = {"default": frozen_dtype or dtype, "transformer": dtype, "vae": torch.float32}
    pipeline = pipeline_class.from_pretrained(resolve(checkpoint), dtype=dtypes).to(device)
    pipeline.vae.enable_slicing()
    return pipeline


def check_euler(config: Mapping[str, Any], *read: str, time_shift: str = "exponential") -> None:
    """ValueError unless a scheduler is Euler's and sets nothing that changes its table but what a family has `read`.

    time_shift: the form of a dynamic shift that the family computes, where `use_dynamic_shifting` is read
    """
    found = config["_class_name"]
    others = [name for name in _OTHER_TABLES if config[name] and name not in read] if found == _EULER else []
    if found != _EULER or others:
        raise ValueError(
            f"the schedule of this family is that of {_EULER} with its shift alone, "
            f"the checkpoint has {found} with {others}"
        )
    if config["use_dynamic_shifting"] and config["time_shift_type"] != time_shift:
        raise ValueError(f"this family's shift is {time_shift}, the checkpoint has {config['time_shift_type']!r}")


def static_shift(config: Mapping[str, Any]) -> float:
    """The shift of an Euler scheduler's config. ValueError where the scheduler makes another table than that shift."""
    check_euler(config)
    return config["shift"]


def check_size(sampling: DiffusionSamplingParams, cell: int, largest: int | None = None) -> None:
    """ValueError, with the nearest size, unless both sides are 1 to `largest` times `cell` pixels."""
    wanted = (sampling.height, sampling.width)
    cells = [max(round(side / cell), 1) for side in wanted]
    nearest = [min(count, largest or count) * cell for count in cells]
    if list(wanted) != nearest:
        limit = f" up to {largest * cell}" if largest else ""
        raise ValueError(
            f"this model makes multiples of {cell} pixels{limit}, asked for {sampling.height} x {sampling.width}; "
            f"the nearest is {nearest[0]} x {nearest[1]}"
        )


def ragged_embedding(rows: list[torch.Tensor]) -> Embedding:
    """Hidden states `(L_i, D)` of each prompt, padded to the longest, with the mask that says which are real."""
    tokens = torch.cat(pad_to_longest([row[None] for row in rows]))
    mask = torch.cat(pad_to_longest([torch.ones(1, len(row), dtype=torch.bool, device=row.device) for row in rows]))
    return Embedding(tokens=tokens, mask=mask)


def decode_images(pipeline: Any, latents: torch.Tensor) -> Media:
    """x_0 `(N, C, H, W)` to pictures, by the AutoencoderKL of a pipeline."""
    config = pipeline.vae.config
    scaled = latents.float() / config.scaling_factor + (config.shift_factor or 0.0)
    decoded = pipeline.vae.decode(scaled, return_dict=False)[0]
    return Media(images=pipeline.image_processor.postprocess(decoded, output_type="pt").cpu())


def encode_images(pipeline: Any, media: Media) -> torch.Tensor:
    """Pictures to x_0: the mode of the posterior, not a draw, so that the same picture is the same latent."""
    assert media.images is not None, "supervised training of this family needs images"
    vae = pipeline.vae
    pixels = media.images.to(vae.device, torch.float32) * 2 - 1
    latents = vae.encode(pixels, return_dict=False)[0].mode()
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
