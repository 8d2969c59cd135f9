"""Files of a checkpoint: written with their SHA-256 on the way, checked before they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files are not what its manifest says."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str

    def check(self, path: Path) -> None:
        """DamagedCheckpointError where the file at `path` is another one, or none."""
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing")
        if (size := path.stat().st_size) != self.size:
            raise DamagedCheckpointError(f"{path} has {size} bytes, {self.size} were saved")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise DamagedCheckpointError(f"{path} has other bytes than were saved (SHA-256 differs)")


class HashedFile:
    """A file that is written from end to end, with its SHA-256 on the way and its failure kept."""

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

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Left to who opened the file."""

    def stored(self) -> StoredFile:
        return StoredFile(self._size, self._digest.hexdigest())


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """A new file at `path`, on the disk when the block ends.

    torch.save hides the OSError of a full disk behind a RuntimeError about positions in the archive: here it is raised.
    """
    with path.open("wb") as file:
        hashed = HashedFile(file)
        try:
            yield hashed
        except RuntimeError:
            if hashed.failure is not None:
                raise hashed.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())


def write_value(path: Path, value: Any) -> StoredFile:
    """`value`, which is `portable`, as a file that `read_value` takes back."""
    with hashed_file(path) as file:
        torch.save(value, cast(BinaryIO, file))
    return file.stored()


def read_value(path: Path, map_location: torch.device | str) -> Any:
    """What `write_value` has written; no code of the file is run."""
    return torch.load(path, map_location=map_location, weights_only=True)


def flush_folder(folder: Path) -> None:
    """The names in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def portable(value: Any, path: str) -> Any:
    """`value` as plain containers of plain values, which `read_value` takes back. path: its name in messages."""
    if isinstance(value, dict):
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            raise ValueError(f"{path} has keys {wrong}: a checkpoint takes str and int keys")
        return {key: portable(item, f"{path}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(portable(item, f"{path}[{index}]") for index, item in enumerate(value))
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
