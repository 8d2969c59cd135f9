"""The file formats of torch.distributed.checkpoint, hashed when they are written and safe when they are read.

Imported where it is used: its classes need torch to be there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from unirl.train.stored_file import DamagedCheckpointError, StoredFile, hashed_file

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}


class HashingWriter(FileSystemWriter):
    """Writes as torch does, into a folder that exists. stored: the files that this rank has written, by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # hashed_file does that
        self.stored: dict[str, StoredFile] = {}
        self.fs = _HashingFiles(self.stored)

    def storage_meta(self) -> StorageMeta | None:
        """None: the folder will have another name, and nobody reads it."""
        return None


class _HashingFiles(FileSystem):
    def __init__(self, stored: dict[str, StoredFile]) -> None:
        self._stored = stored

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with hashed_file(Path(path)) as file:
            yield cast(io.IOBase, file)
        self._stored[Path(path).name] = file.stored()

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        self._stored[Path(new_path).name] = self._stored.pop(Path(path).name)


def read_metadata(path: Path) -> Metadata:
    """The index in `path`, of tensors in files beside it alone. Raises DamagedCheckpointError for anything else."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        pieces, tensors = metadata.storage_data.values(), metadata.state_dict_metadata
        # What is no tensor is unpickled by torch without any restriction when it is read.
        foreign = [name for name, entry in tensors.items() if type(entry) is not TensorStorageMetadata]
        files = {file.name for file in path.parent.iterdir()}
        foreign += [piece.relative_path for piece in pieces if piece.relative_path not in files]
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DamagedCheckpointError(f"{path} is no index of tensors: {error}") from error
    if foreign:
        raise DamagedCheckpointError(f"{path} speaks of {foreign[:3]}: no tensors, or files that are not there")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    """The index is a pickle. A pickle can call whatever it names: this one no more than the classes of an index."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_dtype = module_name == "torch" and isinstance(torch.__dict__.get(global_name), torch.dtype)
        if is_dtype or global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and would call it")
