"""Named tensors as files that the ranks of a slab write and read together: the format of torch.distributed.checkpoint.

    .metadata       which file holds which piece of which tensor (rank 0)
    __R_0.distcp    the pieces that rank R writes; of a tensor that several ranks hold, one of them
    rank_R.pt       plain values of rank R's own

A tensor is whole or a DTensor. Shards can be read on any number of ranks, sharded in any way.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unirl.distributed.group.exchange import Exchange
from unirl.distributed.group.rank_info import RankInfo
from unirl.train.stored_file import StoredFile, flush_folder, portable, read_value, write_value

_RANK_FILE = re.compile(r"rank_(\d+)\.pt")


class ShardWriter:
    """Writes of one rank: one at a time, in the caller's thread or in one beside the training. Made by every rank."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._ranks = Exchange(rank_info)
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[dict[str, StoredFile]] | None = None

    @property
    def ranks(self) -> Exchange:
        """What the ranks tell each other; not to be used while a write is under way."""
        assert self._pending is None, "the ranks are writing"
        return self._ranks

    def start(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], own: dict[str, Any], *, background: bool
    ) -> None:
        """Write `tensors` and this rank's `own` values into the existing `folder`.

        background: return when they are copied to the memory of the host, and write in a thread
        """
        assert self._pending is None, "the files of the last write were not asked for"
        own = portable(own, "own")
        if not background:
            self._pending = concurrent.futures.Future()
            try:
                self._pending.set_result(write_shards(folder, tensors, own, self._ranks))
            except Exception as error:  # noqa: BLE001 - raised by `finish`, as that of a thread is
                self._pending.set_exception(error)
            return
        staged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="unirl-shards")
        self._pending = self._thread.submit(write_shards, folder, staged, own, self._ranks)

    def writing(self) -> bool:
        """Whether a write is under way. It ends on all ranks at once."""
        return self._pending is not None and not self._pending.done()

    def finish(self) -> dict[str, StoredFile]:
        """Wait for the end; the files of all ranks, by name. A failure on any rank is raised here, on all."""
        assert self._pending is not None, "nothing was written"
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for a write under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


def write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], own: dict[str, Any], ranks: Exchange
) -> dict[str, StoredFile]:
    """Write `tensors` and this rank's `own` values into the existing `folder`; the files of all ranks, by name.

    Every rank calls it. What fails on one is raised on all.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    from unirl.train.shard_modules import HashingWriter

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer, metadata = HashingWriter(folder), []

    def wished() -> Any:
        planner.set_up_planner({name: tensor.detach() for name, tensor in tensors.items()}, None, ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def shared_out(plans: list[Any]) -> list[Any]:
        plans, whole = planner.create_global_plan(plans)
        metadata.append(whole)
        return writer.prepare_global_plan(plans)

    plan = ranks.through_zero(wished, shared_out)

    def written() -> Any:
        rank_file = f"rank_{ranks.rank}.pt"
        writer.stored[rank_file] = write_value(folder / rank_file, own)
        return writer.write_data(planner.finish_plan(plan), planner).value()

    def indexed(results: list[Any]) -> list[None]:
        writer.finish(metadata[0], results)
        return [None] * ranks.size

    ranks.through_zero(written, indexed)

    def known() -> dict[str, StoredFile]:
        flush_folder(folder)
        return writer.stored

    return {name: file for files in ranks.all(known) for name, file in files.items()}


class ShardReader:
    """What `write_shards` has left in `folder`. Raises DamagedCheckpointError where it cannot be read.

    world_size: ranks that wrote it
    """

    def __init__(self, folder: Path) -> None:
        from unirl.train.shard_modules import read_metadata

        self._folder, self._metadata = folder, read_metadata(folder / ".metadata")
        self.world_size = sum(1 for file in folder.iterdir() if _RANK_FILE.fullmatch(file.name))

    def outline(self) -> dict[str, torch.Tensor]:
        """The whole tensors by name, without data (on the meta device)."""
        tensors: dict[str, Any] = self._metadata.state_dict_metadata
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in tensors.items()
        }

    def own(self, rank: int) -> dict[str, Any]:
        """The values that rank `rank`, which must be less than world_size, has written for itself."""
        return read_value(self._folder / f"rank_{rank}.pt", "cpu")

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill these tensors (of a DTensor this rank's part), which have the saved shapes, in place."""
        from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: tensor.detach() for name, tensor in into.items()}, self._metadata, False)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
