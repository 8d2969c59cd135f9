"""What families ask of a published diffusers pipeline before they use it: its folder, its parts, its scheduler."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unirl.models.random_weights import folders
from unirl.sde.schedule import linear_mu, shift_sigmas, stretch_to_terminal
from unirl.types.batch import pad_to_longest
from unirl.types.condition import Embedding

_RANDOM = "random:"
_MODEL_INDEX = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EULER = "FlowMatchEulerDiscreteScheduler"
# The name of the shift in the config of each scheduler of a flow.
_SHIFTS = {_EULER: "shift", "DPMSolverMultistepScheduler": "flow_shift", "UniPCMultistepScheduler": "flow_shift"}
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
    index: the file that says which class; `modular_model_index.json` for a modular pipeline, `config.json` for a model
           of transformers
    """
    found = _held(checkpoint, index)
    if found is not None:
        check_class(checkpoint, found, pipelines)


def check_hub_id(checkpoint: str) -> None:
    """ValueError where what is no folder does not read like a hub id either."""
    if not _HUB_ID.fullmatch(checkpoint):
        raise ValueError(f"checkpoint {checkpoint!r} is neither a folder nor a hub id (owner/name) nor random:NAME")


def check_class(checkpoint: str, found: str, pipelines: tuple[str, ...]) -> None:
    """ValueError unless what a checkpoint holds is one of the classes."""
    if found not in pipelines:
        raise ValueError(f"checkpoint {checkpoint} holds a {found}, this family is {' or '.join(pipelines)}")


def is_random(checkpoint: str) -> bool:
    """Whether it is `random:NAME`."""
    return checkpoint.startswith(_RANDOM)


def resolve(checkpoint: str) -> str:
    """What libraries load: a hub id or a folder as it is, for `random:NAME` its folder, written at the first use."""
    if is_random(checkpoint):
        return str(folders.folder_of(checkpoint.removeprefix(_RANDOM)))
    return checkpoint


def pipeline_name(checkpoint: str, *pipelines: str) -> str:
    """The class of a checkpoint's pipeline, by its index and before any weights. ValueError unless of `pipelines`."""
    from diffusers import DiffusionPipeline

    index: Any = DiffusionPipeline.load_config(resolve(checkpoint))
    check_class(checkpoint, index["_class_name"], pipelines)
    return index["_class_name"]


def saved_config(folder: Path, part: str) -> dict[str, Any]:
    """The config of a part of a saved pipeline."""
    file = folder / part / "config.json"
    if not file.is_file():
        raise ValueError(f"checkpoint {folder} holds no {part}/config.json: it is no whole diffusers pipeline")
    return json.loads(file.read_text())


def check_count(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """ValueError unless a setting is in range."""
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


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


def check_dynamic(config: Mapping[str, Any], *read: str, time_shift: str = "exponential") -> None:
    """`check_euler` for a family that shifts by the size of what it makes, which its scheduler must do as well."""
    check_euler(config, "use_dynamic_shifting", *read, time_shift=time_shift)
    if not config["use_dynamic_shifting"]:
        raise ValueError("this family shifts by the size of what it makes, the checkpoint's scheduler by a constant")


def euler_sigmas(config: Mapping[str, Any], grid: torch.Tensor, tokens: int, shift: float | None) -> torch.Tensor:
    """`grid` shifted by `shift`, or where that is None as the config of an Euler scheduler says, then stretched.

    A dynamic shift grows with the number of tokens; `shift_terminal` is where the last sigma is stretched to.
    """
    if shift is None and config["use_dynamic_shifting"]:
        base = (config["base_image_seq_len"], config["base_shift"])
        shift = math.exp(linear_mu(tokens, base=base, top=(config["max_image_seq_len"], config["max_shift"])))
    sigmas = shift_sigmas(grid, config["shift"] if shift is None else shift)
    return stretch_to_terminal(sigmas, config["shift_terminal"]) if config["shift_terminal"] else sigmas


def flow_shift(config: Mapping[str, Any]) -> float:
    """The shift of a checkpoint's scheduler, for a family that walks by Euler's table whatever the scheduler is."""
    found = config["_class_name"]
    if found not in _SHIFTS:
        raise ValueError(f"this family's schedule is that of {' or '.join(_SHIFTS)}, the checkpoint has {found}")
    return config[_SHIFTS[found]]


def ragged_embedding(rows: list[torch.Tensor]) -> Embedding:
    """States `(L_i, D)`, or ids `(L_i,)`, of each prompt, padded to the longest; the mask says which are real."""
    tokens = torch.cat(pad_to_longest([row[None] for row in rows]))
    mask = torch.cat(pad_to_longest([torch.ones(1, len(row), dtype=torch.bool, device=row.device) for row in rows]))
    return Embedding(tokens=tokens, mask=mask)


def _held(checkpoint: str, index: str) -> str | None:
    """The class of the saved pipeline or model; None for a hub id, which is taken at its word."""
    if is_random(checkpoint):
        return folders.find(checkpoint.removeprefix(_RANDOM)).pipeline
    folder = Path(checkpoint)
    if folder.is_dir():
        if not (folder / index).is_file():
            kind = "transformers model" if index == _MODEL_INDEX else "diffusers pipeline"
            raise ValueError(f"checkpoint {checkpoint} holds no {index}: it is not a {kind}")
        saved = json.loads((folder / index).read_text())
        return (
            saved["_class_name"] if index != _MODEL_INDEX else (saved.get("architectures") or [saved["model_type"]])[0]
        )
    check_hub_id(checkpoint)
    return None
