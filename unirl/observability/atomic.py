"""Files and folders that are whole or absent: written aside, renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError leaves the block with `path`: that of a write to a full disk says only that there is no space left."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`. Killed at any moment, `path` holds either what it held before or all of `data`.

    A failed write (a full disk) leaves `path` as it was and removes what was written aside; the OSError goes up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextmanager
def first_wins(folder: Path) -> Iterator[Path]:
    """A path to write a folder of a cache to, which becomes `folder` when the block ends well.

    Of several processes that do so at once the first to end has written the folder that all of them take.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        whole = Path(beside, folder.name)
        yield whole
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _sync_folder(folder: Path) -> None:
    # The rename itself survives a power cut only when the folder is on disk too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
