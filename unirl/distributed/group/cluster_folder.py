"""The folder of a Ray cluster that a driver starts: sockets, logs, spilled objects."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "unirl-ray-"
_LOCK = "driver"


@contextlib.contextmanager
def cluster_folder(under: Path = Path("/tmp")) -> Iterator[Path]:
    """A new folder, which goes with the block; first the ones go that drivers of this user left when they were killed.

    under: `/tmp`, as of Ray's own folder: the names of its sockets must stay shorter than 108 bytes
    """
    _sweep(under)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=under))
    with (folder / "starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as the driver lives: what has no lock is seen by no sweep
        (folder / "starting").rename(folder / _LOCK)
        try:
            yield folder
        finally:
            # Processes that are being killed may still write: what then stays behind is a log, not an error of the run.
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(under: Path) -> None:
    for folder in under.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another one sweeps; its driver lives
            if folder.lstat().st_uid == os.getuid():
                with (folder / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
