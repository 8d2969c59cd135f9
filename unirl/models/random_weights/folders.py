"""Which random checkpoints there are, and the folder of each."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from pathlib import Path

import torch

import unirl.models.random_weights
from unirl.config.environment import cache_folder
from unirl.config.error import nearest
from unirl.observability.atomic import first_wins

_LIBRARIES = ("torch", "diffusers", "transformers")


@dataclasses.dataclass(frozen=True)
class RandomCheckpoint:
    """pipeline: name of the class that is saved; write: writes it to a folder and returns the folder"""

    pipeline: str
    write: Callable[[Path], Path]


def known() -> dict[str, RandomCheckpoint]:
    """All of them by name: the `CHECKPOINTS` of each module of this package."""
    package = unirl.models.random_weights
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    tables = [vars(module)["CHECKPOINTS"] for module in modules if "CHECKPOINTS" in vars(module)]
    return {name: checkpoint for table in tables for name, checkpoint in table.items()}


def find(name: str) -> RandomCheckpoint:
    """ValueError, with the nearest names, for one that there is not."""
    checkpoints = known()
    if name not in checkpoints:
        raise ValueError(f"there is no random checkpoint {name!r}; {nearest(name, checkpoints)}")
    return checkpoints[name]


def folder_of(name: str) -> Path:
    """The folder of that checkpoint in the user's cache, written at its first use with fixed seeds."""
    checkpoint = find(name)
    folder = cache_folder() / "random" / _version() / name
    if folder.is_dir():
        return folder
    # A run's own draws are the same whether or not its model was there.
    with first_wins(folder) as whole, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        checkpoint.write(whole)
    return folder


def _version() -> str:
    """Of what makes the weights: this package and the libraries. Another one is another folder."""
    own = [Path(path) for path in unirl.models.random_weights.__path__]
    sources = [file.read_bytes() for path in own for file in sorted(path.glob("*.py"))]
    releases = [importlib.metadata.version(library).encode() for library in _LIBRARIES]
    return hashlib.sha256(b"\0".join([*sources, *releases])).hexdigest()[:12]
