"""What every family of the diffusers library asks of a checkpoint before it loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EULER = "FlowMatchEulerDiscreteScheduler"
# What makes the scheduler's table, beside the numbers of its shift.
_PLAIN: Mapping[str, Any] = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
    "shift_terminal": None,
}


def check_checkpoint(checkpoint: str, pipeline: str) -> None:
    """A folder with a saved pipeline of the class `pipeline`, or a hub id (owner/name), of which nothing is known."""
    folder = Path(checkpoint)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise ValueError(f"checkpoint {folder} holds no model_index.json: it is not a diffusers pipeline")
        found = json.loads(index.read_text())["_class_name"]
        if found != pipeline:
            raise ValueError(f"checkpoint {folder} holds a {found}, this family is {pipeline}")
    elif not _HUB_ID.fullmatch(checkpoint):
        raise ValueError(f"checkpoint {checkpoint!r} is neither a folder nor a hub id (owner/name)")


def check_scheduler(config: Mapping[str, Any], **expected: Any) -> None:
    """The checkpoint's scheduler is Euler's with the `expected` settings, and nothing else that changes its table."""
    wanted = {**_PLAIN, **expected}
    other = {name: config[name] for name, value in wanted.items() if (config[name] or None) != (value or None)}
    if config["_class_name"] != _EULER or other:
        raise ValueError(
            f"the schedule of this family is that of {_EULER} with {expected}, "
            f"the checkpoint has {config['_class_name']} with {other}"
        )
