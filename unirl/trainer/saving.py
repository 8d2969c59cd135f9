"""Checkpoints of a loop: at most one is being written, and training may go on meanwhile."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unirl.distributed.group.handle import Handle
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint import CheckpointStore, RankPart, Save
from unirl.train.stored_file import StoredFile

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BackendPart(RankPart):
    """The state of a backend, which its ranks write."""

    backend: Handle[FSDPBackend[Any, Any]]

    def write(self, folder: Path, *, background: bool) -> None:
        self.backend.save(folder.absolute(), background=background)

    def writing(self) -> bool:
        return self.backend.saving()

    def written(self) -> dict[str, StoredFile]:
        return self.backend.finish_save()


class Saves:
    """Saves into one store. Leaving the block waits for the one under way, whatever ends it but a KeyboardInterrupt."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._under_way: Save | None = None

    def start(self, step: int, state: dict[str, Any], *, score: float | None, background: bool) -> None:
        """Save `state`, after the save under way has ended. background: return as soon as the state may change."""
        self.finish()
        self._under_way = self._store.start(step, state, score=score, background=background)
        self.settle()

    def settle(self) -> None:
        """Make a save visible whose files are all written; raises what has failed since."""
        if self._under_way is not None and not self._under_way.writing():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            try:
                self.finish()
            except Exception as second:  # noqa: BLE001 - must not hide what stopped the run
                logger.warning("the checkpoint that was being written is lost: %s", second)
