"""Checkpoints of a backend, and what lies in one without the model that it was made from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.state import nested
from unirl.train.checkpoint import CheckpointStore
from unirl.train.shards import ShardReader


def last_state(run: Path) -> dict[str, Any]:
    """The backend's state in the newest checkpoint of a run: weights, optimizer, EMA, counters, streams of rank 0."""
    store = CheckpointStore(run / "checkpoints", keep_last=1, keep_best=0)
    checkpoint = store.latest()
    assert checkpoint is not None
    return state_in(store.load(checkpoint, "cpu")["backend"])


def state_in(folder: Path) -> dict[str, Any]:
    """The nested state that a backend has saved into `folder`, whole tensors."""
    reader = ShardReader(folder)
    tensors = {name: torch.empty_like(value, device="cpu") for name, value in reader.outline().items()}
    reader.read(tensors)
    return nested(tensors, reader.own(0))


def stored(backend: FSDPBackend, folder: Path, *, background: bool = False) -> Path:
    """`folder`, new, with what the backend has saved."""
    folder.mkdir()
    backend.save(folder, background=background)
    backend.finish_save()
    return folder


@contextmanager
def undone(backend: FSDPBackend) -> Iterator[None]:
    """What the block does to the backend is undone."""
    with tempfile.TemporaryDirectory() as folder:
        before = stored(backend, Path(folder) / "before")
        try:
            yield
        finally:
            backend.load(before)
