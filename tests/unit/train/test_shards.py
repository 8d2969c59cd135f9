"""Shards: what any ranks have written comes back whole on any others, and nothing in the files is run."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from tests.unit.train.sharded import PLACEMENTS, Policy, read, values, write
from unirl.distributed.group.rank_info import RankInfo
from unirl.train.shards import ShardReader, ShardWriter
from unirl.train.stored_file import DamagedCheckpointError

ONE = RankInfo(0, 1)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype


# Any ranks to any ranks


@pytest.mark.parametrize("background", [False, True])
def test_one_rank_writes_and_reads_without_a_process_group(background: bool, tmp_path: Path) -> None:
    files = write(ONE, tmp_path, "plain", background)
    assert sorted(files) == [".metadata", "__0_0.distcp", "rank_0.pt"]
    for name, file in files.items():
        file.check(tmp_path / name)
    assert_same(read(ONE, tmp_path, "plain"), values())
    assert ShardReader(tmp_path).own(0) == {"mine": 0}


@pytest.mark.parametrize("how", ["plain", *PLACEMENTS])
def test_two_or_four_ranks_write_and_one_two_and_four_read(how: str, ranks: RankPool, tmp_path: Path) -> None:
    size = len(PLACEMENTS[how][0]) * 2 if how in PLACEMENTS else 2
    told = ranks(size, write, tmp_path, how, True)
    assert all(files == told[0] for files in told)
    assert {path.name for path in tmp_path.iterdir()} == set(told[0])
    for name, file in told[0].items():
        file.check(tmp_path / name)
    assert [ShardReader(tmp_path).own(rank)["mine"] for rank in range(size)] == list(range(size))
    assert ShardReader(tmp_path).world_size == size
    assert_same(read(ONE, tmp_path, "plain"), values())
    for readers, other in ((2, "rows"), (2, "columns"), (4, "both"), (4, "plain")):
        for found in ranks(readers, read, tmp_path, other):
            assert_same(found, values())


def test_what_several_ranks_hold_is_written_once_and_by_all_of_them(ranks: RankPool, tmp_path: Path) -> None:
    files, *_ = ranks(2, write, tmp_path, "copies", False)
    pieces = [len((tmp_path / f"__{rank}_0.distcp").read_bytes()) for rank in range(2)]
    assert min(pieces) > 0
    one = tmp_path / "one"
    one.mkdir()
    assert sum(pieces) == write(ONE, one, "plain", False)["__0_0.distcp"].size
    assert set(files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "rank_0.pt", "rank_1.pt"}


# A policy with AdamW and an EMA, part of which has never had a gradient


def trained_and_saved(info: RankInfo, how: str, folder: Path) -> dict[str, torch.Tensor]:
    policy = Policy(info, how)
    policy.train(range(3), "a")
    policy.save(info, folder)
    return policy.whole_state()


def loaded(info: RankInfo, how: str, folder: Path) -> dict[str, torch.Tensor]:
    policy = Policy(info, how)
    policy.train(range(9, 10), "ab")
    policy.optimizer.state.clear()
    policy.load(folder)
    return policy.whole_state()


def went_on(info: RankInfo, how: str, folder: Path | None) -> dict[str, torch.Tensor]:
    policy = Policy(info, how)
    if folder is None:
        policy.train(range(3), "a")
    else:
        policy.load(folder)
    policy.train(range(3, 6), "ab")
    return policy.whole_state()


@pytest.mark.parametrize(("size", "how"), [(1, "none"), (2, "full"), (4, "full"), (4, "hybrid"), (4, "tensor")])
def test_weights_moments_and_ema_load_on_another_number_of_ranks(
    size: int, how: str, ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks(size, trained_and_saved, how, tmp_path)[0] if size > 1 else trained_and_saved(ONE, how, tmp_path)
    assert {name.split(".")[1] for name in saved if name.startswith("optimizer.")} == {"a"}
    assert {name.split(".")[1] for name in saved if name.startswith("ema.")} == {"a", "b"}
    assert_same(loaded(ONE, "none", tmp_path), saved)
    for readers, other in ((2, "full"), (2, "none"), (4, "full"), (4, "tensor")):
        for found in ranks(readers, loaded, other, tmp_path):
            assert_same(found, saved)


@pytest.mark.parametrize(("size", "how"), [(2, "full"), (4, "tensor")])
def test_loaded_on_as_many_ranks_a_policy_goes_on_bit_for_bit_with_a_branch_that_was_unused(
    size: int, how: str, ranks: RankPool, tmp_path: Path
) -> None:
    ranks(size, trained_and_saved, how, tmp_path)
    straight, resumed = (ranks(size, went_on, how, folder) for folder in (None, tmp_path))
    for found, expected in zip(resumed, straight, strict=True):
        assert_same(found, expected)
    assert float(straight[0]["optimizer.b.0.weight.step"]) == 3.0


# In the background


def test_what_changes_after_the_start_is_not_written(tmp_path: Path) -> None:
    writer, tensor = ShardWriter(ONE), torch.zeros(100_000)
    writer.start(tmp_path, {"w": tensor}, {"n": 1}, background=True)
    tensor.fill_(7)
    writer.finish()
    writer.close()
    found = torch.ones(100_000)
    ShardReader(tmp_path).read({"w": found})
    assert not found.any()


def test_closing_waits_for_the_write(tmp_path: Path) -> None:
    writer = ShardWriter(ONE)
    writer.start(tmp_path, {"w": torch.zeros(1_000_000)}, {}, background=True)
    writer.close()
    assert not writer.writing()
    assert not [thread for thread in threading.enumerate() if "unirl-shards" in thread.name]
    ShardReader(tmp_path).read({"w": torch.ones(1_000_000)})


def failing(info: RankInfo, folder: Path, background: bool) -> list[Any]:
    """Rank 1 cannot write its piece; then what both see of it, and that the next write succeeds."""
    writer, blocked = ShardWriter(info), folder / "__1_0.distcp"
    if info.rank == 1:
        blocked.mkdir()
    writer.ranks.all(lambda: None)
    seen: list[Any] = []
    try:
        writer.start(folder, {"w": torch.ones(3)}, {}, background=background)
        writer.finish()
    except OSError as error:
        seen.append((type(error).__name__, error.filename, error.__notes__))
    writer.ranks.all(lambda: blocked.rmdir() if info.rank == 1 else None)
    writer.start(folder, {"w": torch.ones(3)}, {}, background=background)
    return [*seen, len(writer.finish())]


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_fails_all_with_its_reason(background: bool, ranks: RankPool, tmp_path: Path) -> None:
    blocked = str(tmp_path / "__1_0.distcp")
    assert ranks(2, failing, tmp_path, background) == [
        [("IsADirectoryError", blocked, ["on rank 1 of 2"]), 5],
        [("IsADirectoryError", blocked, ["on rank 1 of 2"]), 5],
    ]


# Files of others


class Call:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


def test_an_index_that_calls_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    write(ONE, tmp_path, "plain", False)
    victim = tmp_path / "victim"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(victim)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is no index of tensors: it names pathlib\."):
        ShardReader(tmp_path)
    assert not victim.exists()
    pickle.loads(pickle.dumps(Call(victim)))
    assert victim.exists()


def test_a_rank_file_and_a_piece_that_call_something_are_refused_and_call_nothing(tmp_path: Path) -> None:
    victim, harm = tmp_path / "victim", tmp_path / "harm"
    torch.save(Call(victim), harm)
    write(ONE, tmp_path, "plain", False)
    reader = ShardReader(tmp_path)
    (tmp_path / "rank_0.pt").write_bytes(harm.read_bytes())
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        reader.own(0)
    index_with(
        tmp_path,
        lambda metadata: [
            vars(piece).update(offset=0, length=harm.stat().st_size) for piece in metadata.storage_data.values()
        ],
    )
    (tmp_path / "__0_0.distcp").write_bytes(harm.read_bytes())
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        ShardReader(tmp_path).read(values())
    assert not victim.exists()


def index_with(folder: Path, change: Any) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_index_of_other_things_than_tensors_beside_it_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    def outside(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../secret"

    def pickled(metadata: Any) -> None:
        metadata.state_dict_metadata["even"] = BytesStorageMetadata()

    for change, reason in ((outside, r"speaks of \['\.\./secret'\]"), (pickled, r"names .*BytesStorageMetadata")):
        folder = tmp_path / change.__name__
        folder.mkdir()
        write(ONE, folder, "plain", False)
        index_with(folder, change)
        with pytest.raises(DamagedCheckpointError, match=reason):
            ShardReader(folder)


@pytest.mark.parametrize("content", [b"", b"half", pickle.dumps([1, 2])], ids=["nothing", "half", "a list"])
def test_half_an_index_and_none_are_damage(content: bytes, tmp_path: Path) -> None:
    write(ONE, tmp_path, "plain", False)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="no index of tensors"):
        ShardReader(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is missing"):
        ShardReader(tmp_path)


def test_torchs_own_tools_read_the_files(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    write(ONE, tmp_path, "plain", False)
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), values())
