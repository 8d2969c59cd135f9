"""Checkpoints that are complete or invisible, whenever the process is killed.

    checkpoints/step_30/weights.pt  optimizer.pt  ...  manifest.json     one file per part of the state
    checkpoints/.partial-step_40/                                        a save under way, or what a killed one left

A save writes every part beside the others, flushes it to the disk, writes the manifest (sizes and SHA-256) last, and
renames the folder: one atomic step. Only then are older checkpoints pruned.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_DISCARDED = ".discarded-"
_PART = re.compile(r"[A-Za-z0-9_]+")
_STEP = re.compile(r"step_(\d+)")


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files are not what its manifest says."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A saved step.

    folder: where it lies
    step:   the optimizer or rollout step it was saved at, as the caller counts
    score:  what `keep_best` compares, larger is better; None where there is no finite one
    parts:  the file of each part of the state
    """

    folder: Path
    step: int
    score: float | None
    parts: dict[str, StoredFile]


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
        """Write `state` as `step_N` and prune; a step that is already there in good order is left as it is.

        state: parts by name; nested dicts, lists and tuples of tensors, str, float, int, bool and None
        Raises ValueError for another type in it, OSError where the disk refuses; neither harms what was good.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        portable = {name: _portable(value, name) for name, value in state.items()}
        unusable = [name for name in state if not _PART.fullmatch(name)]
        if unusable or not state:
            raise ValueError(f"parts of a checkpoint need names of letters, digits and _, got {unusable or 'no part'}")
        final = self.folder / f"step_{step}"
        if (existing := self._intact(final)) is not None:
            logger.info("%s is already saved and left as it is", final)
            return existing
        try:
            saved = self._write(final, step, portable, score)
        except OSError as error:
            raise OSError(error.errno, self._refusal(final, error)) from error
        self._prune(keep=saved)
        return saved

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, every byte of it checked; damaged ones are logged and skipped."""
        return next((found for path in self._newest_first() if (found := self._intact(path)) is not None), None)

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
        """The saved state, tensors on `map_location`; each file is checked before it is read.

        parts:        the ones that are needed; None is all of them
        weights_only: leave out parts that are missing, so that a run can start from bare weights; each is logged
        Raises DamagedCheckpointError where a part is missing or changed.
        """
        wanted = list(checkpoint.parts) if parts is None else list(parts)
        missing = [name for name in wanted if _size(checkpoint, name) is None]
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
        for name in present:
            _check_part(checkpoint, name)
        files = {name: _part_file(checkpoint.folder, name) for name in present}
        return {name: torch.load(path, map_location=map_location, weights_only=True) for name, path in files.items()}

    def _write(self, final: Path, step: int, state: dict[str, Any], score: float | None) -> Checkpoint:
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            self._remove_leftovers()
            partial.mkdir(parents=True)
            files = {name: _write_part(_part_file(partial, name), value) for name, value in state.items()}
            # NaN and infinities are no JSON, and no score to keep a checkpoint for.
            checkpoint = Checkpoint(final, step, score if score is not None and math.isfinite(score) else None, files)
            _write_manifest(partial, checkpoint)
            _flush_folder(partial)
            _discard(final)  # only a damaged one can still be there
            partial.rename(final)
            _flush_folder(self.folder)
        finally:
            # Gone after the rename. What cannot be removed here is removed by the next save, which reports a failure.
            shutil.rmtree(partial, ignore_errors=True)
        return checkpoint

    def _remove_leftovers(self) -> None:
        for prefix in (_PARTIAL, _DISCARDED):
            for path in self.folder.glob(f"{prefix}*"):
                logger.info("removing what a killed process left: %s", path)
                shutil.rmtree(path)

    def _prune(self, *, keep: Checkpoint) -> None:
        """A damaged checkpoint takes no place among those kept, and is left for a person to look at."""
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
            for name in checkpoint.parts:
                _check_part(checkpoint, name)
        except DamagedCheckpointError as error:
            logger.warning("a damaged checkpoint is passed over: %s", error)
            return None
        return checkpoint

    def _complete(self) -> list[Checkpoint]:
        """Newest first, judged by manifest and file sizes alone: cheap enough for every save."""
        found = []
        for path in self._newest_first():
            try:
                checkpoint = read_manifest(path)
            except DamagedCheckpointError:
                continue  # `latest` reports it, with the reason
            if all(_size(checkpoint, name) == file.size for name, file in checkpoint.parts.items()):
                found.append(checkpoint)
        return found

    def still_good(self) -> str:
        """What a failure has left, in a sentence of its message."""
        good = [entry.folder.name for entry in self._complete()]
        return f"Still good: {good[0]}, where the same command resumes" if good else "There is no earlier checkpoint"

    def _refusal(self, final: Path, error: OSError) -> str:
        fix = "choose another folder or make this one writable"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free space there (a lower keep_last or keep_best needs less) or choose a folder on another disk"
        return f"could not save {final}: {error.strerror or error}. {self.still_good()}. To go on, {fix}"


def read_manifest(folder: Path) -> Checkpoint:
    """The checkpoint in `folder` as its manifest describes it. Raises DamagedCheckpointError where that is no use."""
    try:
        stored = json.loads((folder / _MANIFEST).read_text())
        parts = {name: StoredFile(**file) for name, file in stored["parts"].items()}
        checkpoint = Checkpoint(folder, stored["step"], stored["score"], parts)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder} has no {_MANIFEST}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder / _MANIFEST} cannot be read: {error!r}") from error
    if type(checkpoint.step) is not int or folder.name != f"step_{checkpoint.step}":
        raise DamagedCheckpointError(f"{folder} holds a manifest of step {checkpoint.step!r}")
    if not isinstance(checkpoint.score, int | float | None) or not parts or not all(map(_PART.fullmatch, parts)):
        raise DamagedCheckpointError(
            f"{folder / _MANIFEST} has a score of {checkpoint.score!r} and parts {sorted(parts)}"
        )
    return checkpoint


class _HashedFile:
    """A file that torch.save writes to from end to end, with its SHA-256 on the way and its failure kept.

    torch.save hides the OSError of a full disk behind a RuntimeError about positions in the archive.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._digest.update(data)
        self._size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def stored(self) -> StoredFile:
        return StoredFile(self._size, self._digest.hexdigest())


def _write_part(path: Path, value: Any) -> StoredFile:
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(value, cast(BinaryIO, hashed))
        except RuntimeError:
            if hashed.failure is not None:
                raise hashed.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashed.stored()


def _write_manifest(folder: Path, checkpoint: Checkpoint) -> None:
    parts = {name: dataclasses.asdict(file) for name, file in checkpoint.parts.items()}
    with (folder / _MANIFEST).open("w") as file:
        json.dump({"step": checkpoint.step, "score": checkpoint.score, "parts": parts}, file, indent=2, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(folder: Path) -> None:
    """Renamed first: killed half-way, it is a leftover and not a damaged checkpoint."""
    if folder.exists():
        aside = folder.rename(folder.with_name(f"{_DISCARDED}{folder.name}"))
        shutil.rmtree(aside)


def _part_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.pt"


def _size(checkpoint: Checkpoint, name: str) -> int | None:
    """Bytes on the disk; None where the part is not there."""
    path = _part_file(checkpoint.folder, name)
    return path.stat().st_size if name in checkpoint.parts and path.is_file() else None


def _check_part(checkpoint: Checkpoint, name: str) -> None:
    path, size, stored = _part_file(checkpoint.folder, name), _size(checkpoint, name), checkpoint.parts[name]
    if size is None:
        raise DamagedCheckpointError(f"{path} is missing")
    if size != stored.size:
        raise DamagedCheckpointError(f"{path} has {size} bytes, {stored.size} were saved")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
            raise DamagedCheckpointError(f"{path} has other bytes than were saved (SHA-256 differs)")


def _by_score(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Best first, the newest of equals first; those without a score are left out."""
    scored = [(entry.score, entry.step, entry) for entry in checkpoints if entry.score is not None]
    return [entry for _, _, entry in sorted(scored, key=lambda item: item[:2], reverse=True)]


def _portable(value: Any, path: str) -> Any:
    """`value` as plain containers of plain values, which `torch.load(weights_only=True)` takes back."""
    if isinstance(value, dict):
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            raise ValueError(f"{path} has keys {wrong}: a checkpoint takes str and int keys")
        return {key: _portable(item, f"{path}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(item, f"{path}[{index}]") for index, item in enumerate(value))
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        # torch.save writes the whole storage behind a view.
        whole = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
        return value.detach() if whole else value.detach().clone()
    if value is None or type(value) in (str, float, int, bool):
        return value
    raise ValueError(
        f"{path} is a {type(value).__module__}.{type(value).__name__}: a checkpoint takes tensors with data, str, "
        "float, int, bool, None, and dicts, lists and tuples of them; convert it (numpy: .item() or torch.from_numpy)"
    )
