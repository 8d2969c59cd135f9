"""Checkpoints that are complete or invisible, whenever the process is killed.

    checkpoints/step_30/cursor.pt            a part of the state that the driver holds
                        backend/             a part that ranks hold: each has written its own files (train/shards.py)
                        manifest.json        size and SHA-256 of every file
    checkpoints/.partial-step_40/            a save under way, or what a killed one left

A save writes every part beside the others, flushes it to the disk, writes the manifest last, when all ranks are done,
and renames the folder: one atomic step. Only then are older checkpoints pruned.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import logging
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from unirl.train.stored_file import (
    DamagedCheckpointError,
    StoredFile,
    flush_folder,
    portable,
    read_value,
    write_value,
)

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_DISCARDED = ".discarded-"
_PART = re.compile(r"[A-Za-z0-9_]+")
_FILE = re.compile(r"([A-Za-z0-9_]+)(?:\.pt|/\.?[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*)")
_READERS = 8  # files that are checked at a time
_STEP = re.compile(r"step_(\d+)")


class OlderCheckpointError(ValueError):
    """A checkpoint that another version has written, and this one cannot read."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A saved step.

    folder:  where it lies
    step:    the optimizer or rollout step it was saved at, as the caller counts
    score:   what `keep_best` compares, larger is better; None where there is no finite one
    files:   every file by its path in the folder: `cursor.pt`, `backend/__0_0.distcp`
    checked: whether every byte was read when it was found, and is not read again to load it
    """

    folder: Path
    step: int
    score: float | None
    files: dict[str, StoredFile]
    checked: bool = dataclasses.field(default=False, compare=False)

    @property
    def parts(self) -> dict[str, list[str]]:
        """The files of each part of the state."""
        parts: dict[str, list[str]] = {}
        for file in self.files:
            parts.setdefault(file.partition("/")[0].removesuffix(".pt"), []).append(file)
        return parts


class RankPart(ABC):
    """A part of the state that ranks hold, and write themselves into a folder that all of them see."""

    @abstractmethod
    def write(self, folder: Path, *, background: bool) -> None:
        """Start to write into the existing `folder`. background: return as soon as training may go on.

        What fails is raised by `written`.
        """

    @abstractmethod
    def writing(self) -> bool:
        """Whether that has not ended."""

    @abstractmethod
    def written(self) -> dict[str, StoredFile]:
        """Wait for the end; the files of all ranks by name. Raises what failed on any of them."""


@dataclasses.dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run. One process writes to a folder.

    folder:    holds `step_N/`
    keep_last: newest ones that are kept, at least 1
    keep_best: ones of the highest score that are kept besides
    """

    folder: Path
    keep_last: int
    keep_best: int

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (the run resumes from it), got {self.keep_last}")
        if self.keep_best < 0:
            raise ValueError(f"keep_best must not be negative, got {self.keep_best}")

    def save(self, step: int, state: dict[str, Any], *, score: float | None) -> Checkpoint:
        """`start`, and wait for the end."""
        return self.start(step, state, score=score, background=False).finish()

    def start(self, step: int, state: dict[str, Any], *, score: float | None, background: bool) -> Save:
        """Start to write `state` as `step_N`; a step that is already there in good order is left as it is.

        state:      parts by name; RankParts, and nested dicts, lists and tuples of tensors, str, float, int, bool, None
        background: return as soon as the state may change; one save at a time
        Raises ValueError for another type in it, OSError where the disk refuses; neither harms what was good.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        unusable = [name for name in state if not _PART.fullmatch(name)]
        if unusable or not state:
            raise ValueError(f"parts of a checkpoint need names of letters, digits and _, got {unusable or 'no part'}")
        ranks = {name: value for name, value in state.items() if isinstance(value, RankPart)}
        plain = {name: portable(value, name) for name, value in state.items() if name not in ranks}
        final = self.folder / f"step_{step}"
        if (existing := self._intact(final)) is not None:
            logger.info("%s is already saved and left as it is", final)
            return Save(self, existing, {})
        partial = self.folder / f"{_PARTIAL}{final.name}"
        with _CleanedUp(self, final, partial):
            self._remove_leftovers()
            partial.mkdir(parents=True)
            for name in ranks:
                (partial / name).mkdir()
            files = {f"{name}.pt": write_value(partial / f"{name}.pt", value) for name, value in plain.items()}
            for name, part in ranks.items():
                part.write(partial / name, background=background)
        # NaN and infinities are no JSON, and no score to keep a checkpoint for.
        finite = score if score is not None and math.isfinite(score) else None
        return Save(self, Checkpoint(final, step, finite, files), ranks, partial)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, every byte of it checked; damaged ones are logged and skipped."""
        return next((found for path in self._newest_first() if (found := self._intact(path)) is not None), None)

    def newest_step(self) -> int | None:
        """Of the newest checkpoint, by its manifest and the sizes of its files alone."""
        return next((entry.step for entry in self._complete()), None)

    def best(self) -> Checkpoint | None:
        """The complete checkpoint of the highest score, the newest of equals; None where none has a score."""
        ranked = _by_score(self._complete())
        return next((found for entry in ranked if (found := self._intact(entry.folder)) is not None), None)

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of `step` as its manifest describes it; `load` checks the files."""
        path = self.folder / f"step_{step}"
        if not path.is_dir():
            there = [folder.name for folder in self._newest_first()]
            raise ValueError(f"there is no checkpoint of step {step} in {self.folder}; there are: {there or 'none'}")
        return read_manifest(path)

    def load(
        self,
        checkpoint: Checkpoint,
        map_location: torch.device | str,
        *,
        parts: Collection[str] | None = None,
        weights_only: bool = False,
    ) -> dict[str, Any]:
        """The saved state, tensors on `map_location`; of a RankPart its folder. Each file is checked before, once.

        parts:        the ones that are needed; None is all of them
        weights_only: leave out parts that are missing, so that a run can start from bare weights; each is logged
        Raises DamagedCheckpointError where a part is missing or changed.
        """
        parts_there = checkpoint.parts
        wanted = list(parts_there) if parts is None else list(parts)
        missing = [name for name in wanted if not _is_there(checkpoint, parts_there.get(name, []))]
        if missing and not weights_only:
            raise DamagedCheckpointError(
                f"{checkpoint.folder} lacks {missing}: continuing would start them afresh. Choose another checkpoint, "
                "or load with weights_only=True to start a new run from its weights"
            )
        for name in missing:
            logger.warning("%s lacks %s, which starts afresh", checkpoint.folder, name)
        present = [name for name in wanted if name not in missing]
        if not present:
            raise DamagedCheckpointError(f"{checkpoint.folder} holds none of {wanted}")
        if not checkpoint.checked:
            _check(checkpoint, [file for name in present for file in parts_there[name]])
        return {name: _loaded(checkpoint.folder / name, map_location) for name in present}

    def _remove_leftovers(self) -> None:
        for prefix in (_PARTIAL, _DISCARDED):
            for path in self.folder.glob(f"{prefix}*"):
                logger.info("removing what a killed process left: %s", path)
                shutil.rmtree(path)

    def prune(self, *, keep: Checkpoint) -> None:
        """Discard what is not to be kept. A damaged checkpoint takes no place, and is left for a person to look at."""
        there = self._complete()
        kept = {entry.folder for entry in (keep, *there[: self.keep_last], *_by_score(there)[: self.keep_best])}
        for entry in there:
            if entry.folder not in kept:
                _discard(entry.folder)

    def _newest_first(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        steps = {
            path: match for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
        }
        return sorted(steps, key=lambda path: int(steps[path][1]), reverse=True)

    def _intact(self, path: Path) -> Checkpoint | None:
        """The checkpoint if there is one and every byte of it is right."""
        if not path.exists():
            return None
        try:
            checkpoint = read_manifest(path)
            _check(checkpoint, checkpoint.files)
        except DamagedCheckpointError as error:
            logger.warning("a damaged checkpoint is passed over: %s", error)
            return None
        return dataclasses.replace(checkpoint, checked=True)

    def _complete(self) -> list[Checkpoint]:
        """Newest first, judged by manifest and file sizes alone: cheap enough for every save."""
        found = []
        for path in self._newest_first():
            try:
                checkpoint = read_manifest(path)
            except (DamagedCheckpointError, OlderCheckpointError):
                continue  # `latest` reports it, with the reason
            if all(_size(checkpoint.folder / name) == file.size for name, file in checkpoint.files.items()):
                found.append(checkpoint)
        return found

    def still_good(self) -> str:
        """What a failure has left, in a sentence of its message."""
        good = [entry.folder.name for entry in self._complete()]
        return f"Still good: {good[0]}, where the same command resumes" if good else "There is no earlier checkpoint"

    def refusal(self, final: Path, error: OSError) -> str:
        """The message of a save that the disk has refused."""
        fix = "choose another folder or make this one writable"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free space there (a lower keep_last or keep_best needs less) or choose a folder on another disk"
        return f"could not save {final}: {error.strerror or error}. {self.still_good()}. To go on, {fix}"


@dataclasses.dataclass(frozen=True)
class _CleanedUp:
    """A failure removes what was written; that of the disk gets a message that says what to do."""

    store: CheckpointStore
    final: Path
    partial: Path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        # What cannot be removed here is removed by the next save, which reports a failure.
        shutil.rmtree(self.partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, self.store.refusal(self.final, error)) from error


@dataclasses.dataclass(frozen=True)
class Save:
    """A save under way. Until `finish` the checkpoint is invisible.

    checkpoint: without the files of the ranks
    partial:    where it is written; None where there is nothing to write
    """

    store: CheckpointStore
    checkpoint: Checkpoint
    ranks: dict[str, RankPart]
    partial: Path | None = None

    def writing(self) -> bool:
        """Whether `finish` would wait."""
        return any(part.writing() for part in self.ranks.values())

    def finish(self) -> Checkpoint:
        """Wait for the ranks, make the checkpoint visible and prune. Called once. Raises what failed on any rank."""
        if self.partial is None:
            return self.checkpoint
        final, files = self.checkpoint.folder, dict(self.checkpoint.files)
        with _CleanedUp(self.store, final, self.partial):
            for name, written in _all_written(self.ranks).items():
                files.update({f"{name}/{file}": stored for file, stored in written.items()})
            saved = dataclasses.replace(self.checkpoint, files=files)
            _write_manifest(self.partial, saved)
            flush_folder(self.partial)
            _discard(final)  # only a damaged one can still be there
            self.partial.rename(final)
            flush_folder(self.store.folder)
        self.store.prune(keep=saved)
        return saved


def read_manifest(folder: Path) -> Checkpoint:
    """The checkpoint in `folder` as its manifest describes it.

    Raises DamagedCheckpointError where that is no use, OlderCheckpointError where it is one of an older version.
    """
    try:
        stored = json.loads((folder / _MANIFEST).read_text())
        older = "files" not in stored and "parts" in stored
        files = {} if older else {name: StoredFile(**file) for name, file in stored["files"].items()}
        checkpoint = Checkpoint(folder, stored["step"], stored["score"], files)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder} has no {_MANIFEST}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder / _MANIFEST} cannot be read: {error!r}") from error
    if older:
        raise OlderCheckpointError(
            f"{folder} was saved by an older version of UniRL, which kept a whole backend in one file: continue or "
            "export this run with that version, or choose another run.name"
        )
    if type(checkpoint.step) is not int or folder.name != f"step_{checkpoint.step}":
        raise DamagedCheckpointError(f"{folder} holds a manifest of step {checkpoint.step!r}")
    if not isinstance(checkpoint.score, int | float | None) or not files or not all(map(_FILE.fullmatch, files)):
        raise DamagedCheckpointError(
            f"{folder / _MANIFEST} has a score of {checkpoint.score!r} and files {sorted(files)}"
        )
    return checkpoint


def _all_written(ranks: dict[str, RankPart]) -> dict[str, dict[str, StoredFile]]:
    """Of every part, also where an earlier one has failed: nobody writes any more when this returns or raises."""
    written, first = {}, None
    for name, part in ranks.items():
        try:
            written[name] = part.written()
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        raise first
    return written


def _write_manifest(folder: Path, checkpoint: Checkpoint) -> None:
    files = {name: dataclasses.asdict(file) for name, file in checkpoint.files.items()}
    with (folder / _MANIFEST).open("w") as file:
        json.dump({"step": checkpoint.step, "score": checkpoint.score, "files": files}, file, indent=2, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _discard(folder: Path) -> None:
    """Renamed first: killed half-way, it is a leftover and not a damaged checkpoint."""
    if folder.exists():
        aside = folder.rename(folder.with_name(f"{_DISCARDED}{folder.name}"))
        shutil.rmtree(aside)


def _size(path: Path) -> int | None:
    """Bytes on the disk; None where there is no such file."""
    return path.stat().st_size if path.is_file() else None


def _is_there(checkpoint: Checkpoint, files: Collection[str]) -> bool:
    return bool(files) and all(_size(checkpoint.folder / name) is not None for name in files)


def _check(checkpoint: Checkpoint, files: Iterable[str]) -> None:
    """DamagedCheckpointError for the first file that is not what was saved; several are read at a time."""
    with concurrent.futures.ThreadPoolExecutor(_READERS) as threads:
        for _ in threads.map(lambda name: checkpoint.files[name].check(checkpoint.folder / name), files):
            pass


def _loaded(part: Path, map_location: torch.device | str) -> Any:
    return part.absolute() if part.is_dir() else read_value(part.with_name(f"{part.name}.pt"), map_location)


def _by_score(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Best first, the newest of equals first; those without a score are left out."""
    scored = [(entry.score, entry.step, entry) for entry in checkpoints if entry.score is not None]
    return [entry for _, _, entry in sorted(scored, key=lambda item: item[:2], reverse=True)]
