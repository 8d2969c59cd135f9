from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unirl.distributed.group.rank_info import RankInfo
from unirl.train.checkpoint import Checkpoint, CheckpointStore, OlderCheckpointError, RankPart
from unirl.train.rng import rng_state, set_rng_state
from unirl.train.shards import ShardReader, ShardWriter
from unirl.train.stored_file import DamagedCheckpointError, StoredFile


def store(folder: Path, keep_last: int = 100, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last, keep_best)


def state(step: int) -> dict[str, Any]:
    return {"weights": {"w": torch.full((8,), step)}, "cursor": {"epoch": 0, "row": step}}


def newest(checkpoints: CheckpointStore) -> Checkpoint:
    found = checkpoints.latest()
    assert found is not None
    return found


def best(checkpoints: CheckpointStore) -> Checkpoint:
    found = checkpoints.best()
    assert found is not None
    return found


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def identical(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and every bit."""
    if isinstance(a, torch.Tensor):
        same_kind = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return same_kind and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


# Round trips


def test_every_kind_of_value_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(5, 3, generator=generator)
    whole = {
        "weights": {
            "float32": floats,
            "bfloat16": floats.bfloat16(),
            "float16": floats.half(),
            "float64": floats.double(),
            "int64": torch.arange(7) - 3,
            "uint8": torch.arange(250, 256, dtype=torch.uint8),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 4),
            "not_finite": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
            "transposed": floats.T,
        },
        "plain": {"none": None, "pair": (1, 2.5), "list": [True, "text", {"deep": ()}], 3: "int key", "nan": math.nan},
        "version": 12,
    }
    checkpoints = store(tmp_path)
    saved = checkpoints.save(3, whole, score=0.5)
    found = newest(checkpoints)
    assert found == saved
    assert (found.step, found.score, sorted(found.parts)) == (3, 0.5, ["plain", "version", "weights"])
    assert identical(checkpoints.load(found, "cpu"), whole)


def train(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer, steps: range, branches: str) -> None:
    for step in steps:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.stack([model[branch](inputs).square().mean() for branch in branches]).sum().backward()
        optimizer.step()


def branches_and_optimizer() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_an_optimizer_with_a_branch_that_never_had_a_gradient_resumes_to_the_uninterrupted_numbers(tmp_path):
    model, optimizer = branches_and_optimizer()
    train(model, optimizer, range(3), "a")
    checkpoints = store(tmp_path)
    saved = checkpoints.save(3, {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, score=None)
    moments = optimizer.state_dict()["state"]
    assert sorted(moments) == [0, 1]

    resumed, fresh_optimizer = branches_and_optimizer()
    loaded = checkpoints.load(saved, "cpu")
    assert identical(loaded["optimizer"], optimizer.state_dict())
    resumed.load_state_dict(loaded["weights"])
    fresh_optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(3, 6), "ab")
    train(resumed, fresh_optimizer, range(3, 6), "ab")
    assert identical(dict(resumed.state_dict()), dict(model.state_dict()))

    resumed["a"].requires_grad_(False)
    saved = checkpoints.save(6, {"optimizer": fresh_optimizer.state_dict()}, score=None)
    assert identical(checkpoints.load(saved, "cpu")["optimizer"]["state"], fresh_optimizer.state_dict()["state"])


def test_tied_tensors_stay_tied_and_a_view_does_not_drag_its_whole_storage_along(tmp_path):
    big = torch.randn(1_000_000)
    tied = torch.randn(4)
    saved = store(tmp_path).save(1, {"view": big[:4], "tied": {"in": tied, "out": tied}}, score=None)
    assert saved.files["view.pt"].size < 10_000
    loaded = store(tmp_path).load(saved, "cpu")
    assert identical(loaded["view"], big[:4])
    assert loaded["tied"]["in"].data_ptr() == loaded["tied"]["out"].data_ptr()


def test_a_parameter_is_saved_as_its_data(tmp_path):
    saved = store(tmp_path).save(1, {"weights": torch.nn.Parameter(torch.ones(2))}, score=None)
    assert identical(store(tmp_path).load(saved, "cpu")["weights"], torch.ones(2))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"groups": [{"lr": np.float64(0.1)}]}, r"optimizer\['groups'\]\[0\]\['lr'\] is a numpy\.float64.*\.item\(\)"),
        ({"keys": np.zeros(2)}, r"optimizer\['keys'\] is a numpy\.ndarray"),
        ({"object": Path("x")}, r"optimizer\['object'\] is a pathlib\.PosixPath"),
        ({"meta": torch.zeros(2, device="meta")}, r"optimizer\['meta'\] is a torch\.Tensor.*tensors with data"),
        ({(1, 2): 3}, r"optimizer has keys \[\(1, 2\)\]"),
    ],
)
def test_a_value_that_could_not_be_loaded_is_refused_by_its_path_before_anything_is_written(tmp_path, part, message):
    with pytest.raises(ValueError, match=message):
        store(tmp_path).save(1, {"optimizer": part}, score=None)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("parts", [{"a/b": 1}, {"": 1}, {}])
def test_parts_need_names_that_are_file_names(tmp_path, parts):
    with pytest.raises(ValueError, match="names of letters, digits and _"):
        store(tmp_path).save(1, parts, score=None)


def test_settings_out_of_range_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep_last must be at least 1 .* got 0"):
        CheckpointStore(tmp_path, keep_last=0, keep_best=1)
    with pytest.raises(ValueError, match="keep_best must not be negative, got -1"):
        CheckpointStore(tmp_path, keep_last=1, keep_best=-1)
    with pytest.raises(ValueError, match="step must not be negative, got -3"):
        store(tmp_path).save(-3, state(0), score=None)


# What is kept


def test_every_third_of_ten_steps_and_the_last_are_saved_once(tmp_path):
    for step in range(1, 11):
        if step % 3 == 0 or step == 10:
            store(tmp_path).save(step, state(step), score=None)
    before = (tmp_path / "checkpoints/step_10/weights.pt").stat().st_mtime_ns
    store(tmp_path).save(10, state(99), score=None)
    assert saved_steps(tmp_path) == [3, 6, 9, 10]
    assert (tmp_path / "checkpoints/step_10/weights.pt").stat().st_mtime_ns == before
    assert newest(store(tmp_path)).step == 10


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = store(tmp_path, keep_last=2, keep_best=2)
    scores = {2: 0.9, 4: 0.1, 6: 0.8, 8: None, 10: 0.3, 12: 0.2}
    for step, score in scores.items():
        checkpoints.save(step, state(step), score=score)
    assert saved_steps(tmp_path) == [2, 6, 10, 12]
    assert best(checkpoints).step == 2
    assert newest(checkpoints).step == 12


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_never_counts_as_best(tmp_path, score):
    checkpoints = store(tmp_path, keep_last=1, keep_best=1)
    for step, value in enumerate([score, 0.5, score, score]):
        checkpoints.save(step, state(step), score=value)
    assert saved_steps(tmp_path) == [1, 3]
    assert best(checkpoints).step == 1
    assert newest(checkpoints).score is None


def test_of_equal_scores_the_newest_is_best(tmp_path):
    checkpoints = store(tmp_path, keep_last=1, keep_best=1)
    for step in range(3):
        checkpoints.save(step, state(step), score=1.0 if step < 2 else 0.0)
    assert saved_steps(tmp_path) == [1, 2]


def test_steps_are_ordered_as_numbers_and_other_folders_are_left_alone(tmp_path):
    checkpoints = store(tmp_path, keep_last=1)
    (tmp_path / "checkpoints/step_3.mine").mkdir(parents=True)
    for step in (9, 10):
        checkpoints.save(step, state(step), score=None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_3.mine"]


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path):
    for name in (".partial-step_4", ".discarded-step_1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "weights.pt").write_bytes(b"half")
    assert store(tmp_path).latest() is None
    store(tmp_path).save(5, state(5), score=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_5"]


def test_no_folder_and_an_empty_folder_have_no_checkpoint(tmp_path):
    assert store(tmp_path).latest() is None
    (tmp_path / "checkpoints").mkdir()
    assert store(tmp_path).latest() is None
    assert store(tmp_path).best() is None


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    store(tmp_path).save(5, state(5), score=None)
    assert store(tmp_path).at(5) == newest(store(tmp_path))
    with pytest.raises(ValueError, match=r"no checkpoint of step 6 .* there are: \['step_5'\]"):
        store(tmp_path).at(6)


# Damage


def truncate(folder: Path) -> None:
    path = folder / "weights.pt"
    path.write_bytes(path.read_bytes()[:-1])


def flip_one_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "weights.pt").write_bytes(bytes(data))


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES = {
    "truncated part": (truncate, r"weights\.pt has \d+ bytes, \d+ were saved"),
    "flipped bit": (flip_one_bit, r"weights\.pt has other bytes than were saved"),
    "deleted cursor": (lambda folder: (folder / "cursor.pt").unlink(), r"cursor\.pt is missing"),
    "deleted manifest": (lambda folder: (folder / "manifest.json").unlink(), r"step_6 has no manifest\.json"),
    "half a manifest": (lambda folder: (folder / "manifest.json").write_text('{"step": 6, "sc'), r"cannot be read"),
    "manifest of a list": (lambda folder: (folder / "manifest.json").write_text("[]"), r"cannot be read"),
    "manifest of another step": (lambda folder: edit_manifest(folder, step=5), r"holds a manifest of step 5"),
    "step as text": (lambda folder: edit_manifest(folder, step="6"), r"holds a manifest of step '6'"),
    "score as text": (lambda folder: edit_manifest(folder, score="high"), r"a score of 'high'"),
    "no files": (lambda folder: edit_manifest(folder, files={}), r"files \[\]"),
    "file outside": (
        lambda folder: edit_manifest(folder, files={"../x.pt": {"size": 1, "sha256": ""}}),
        r"files \['\.\./x\.pt'\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_name_and_the_reason(tmp_path, caplog, damage):
    spoil, reason = DAMAGES[damage]
    for step in (3, 6):
        store(tmp_path).save(step, state(step), score=None)
    spoil(tmp_path / "checkpoints/step_6")
    with caplog.at_level(logging.WARNING):
        found = newest(store(tmp_path))
    assert found.step == 3
    assert len(caplog.records) == 1
    assert "step_6" in caplog.text
    assert re.search(reason, caplog.text)
    assert identical(store(tmp_path).load(found, "cpu"), state(3))


@pytest.mark.parametrize("damage", DAMAGES)
def test_saving_a_damaged_step_again_replaces_it(tmp_path, damage):
    store(tmp_path).save(6, state(1), score=None)
    DAMAGES[damage][0](tmp_path / "checkpoints/step_6")
    store(tmp_path).save(6, state(6), score=None)
    assert saved_steps(tmp_path) == [6]
    assert identical(store(tmp_path).load(newest(store(tmp_path)), "cpu"), state(6))


def test_a_damaged_checkpoint_takes_no_place_among_the_kept_ones(tmp_path):
    checkpoints = store(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), score=None)
    truncate(tmp_path / "checkpoints/step_2")
    checkpoints.save(3, state(3), score=None)
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_a_missing_part_is_an_error_unless_only_the_weights_were_asked_for(tmp_path, caplog):
    saved = store(tmp_path).save(3, {**state(3), "optimizer": {"lr": 0.1}}, score=None)
    (saved.folder / "optimizer.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"lacks \['optimizer'\].*weights_only=True"):
        store(tmp_path).load(saved, "cpu")
    with caplog.at_level(logging.WARNING):
        assert identical(store(tmp_path).load(saved, "cpu", weights_only=True), state(3))
    assert "lacks optimizer, which starts afresh" in caplog.text
    with pytest.raises(DamagedCheckpointError, match=r"lacks \['ema'\]"):
        store(tmp_path).load(saved, "cpu", parts=["weights", "ema"])
    assert list(store(tmp_path).load(saved, "cpu", parts=["weights"])) == ["weights"]


def test_changed_bytes_are_an_error_even_where_only_the_weights_were_asked_for(tmp_path):
    saved = store(tmp_path).save(3, state(3), score=None)
    flip_one_bit(saved.folder)
    with pytest.raises(DamagedCheckpointError, match="other bytes than were saved"):
        store(tmp_path).load(saved, "cpu", weights_only=True)


def test_a_checkpoint_without_any_part_left_is_an_error(tmp_path):
    saved = store(tmp_path).save(3, {"weights": 1}, score=None)
    (saved.folder / "weights.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match="holds none of"):
        store(tmp_path).load(saved, "cpu", weights_only=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"could not save .*step_1.*choose another folder"):
        store(tmp_path).save(1, state(1), score=None)


# Bytes read


def bytes_read() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_checkpoint_is_read_once_to_be_found_and_checked_and_not_again_to_be_loaded(tmp_path):
    checkpoints, size = store(tmp_path), 4 * 2**20
    checkpoints.save(1, {"backend": Written(1.0, size // 4), "cursor": 1}, score=None)
    start = bytes_read()
    assert checkpoints.newest_step() == 1
    known = bytes_read()
    found = newest(checkpoints)
    checked = bytes_read()
    checkpoints.load(found, "cpu")
    assert [round((to - of) / size, 1) for of, to in ((start, known), (known, checked), (checked, bytes_read()))] == [
        0.0,
        1.0,
        0.0,
    ]
    checkpoints.load(checkpoints.at(1), "cpu")
    assert bytes_read() - checked > size


def test_the_newest_step_is_that_of_a_whole_checkpoint(tmp_path):
    checkpoints = store(tmp_path)
    assert checkpoints.newest_step() is None
    for step in (1, 2):
        saved = checkpoints.save(step, state(step), score=None)
    (saved.folder / "cursor.pt").unlink()
    assert checkpoints.newest_step() == 1


# Parts that ranks write


class Written(RankPart):
    """One rank's shards. released: what a write in the background waits for; failure: what ends it."""

    def __init__(self, value: float, count: int = 8, failure: OSError | None = None) -> None:
        self.value, self.count, self.failure, self.released = value, count, failure, threading.Event()
        self.writer = ShardWriter(RankInfo(0, 1))
        self.waits = False

    def write(self, folder: Path, *, background: bool) -> None:
        self.waits = background
        self.writer.start(folder, {"w": torch.full((self.count,), self.value)}, {"n": 1}, background=background)

    def writing(self) -> bool:
        return self.waits and not self.released.is_set()

    def written(self) -> dict[str, StoredFile]:
        files = self.writer.finish()
        if self.failure is not None:
            raise self.failure
        return files


def weights_in(folder: Path) -> torch.Tensor:
    found = torch.zeros(8)
    ShardReader(folder).read({"w": found})
    return found


def test_a_part_that_ranks_write_is_a_folder_that_is_checked_with_the_rest(tmp_path, caplog):
    checkpoints = store(tmp_path)
    for step in (1, 2):
        saved = checkpoints.save(step, {"cursor": step, "backend": Written(step)}, score=None)
    assert sorted(saved.files) == ["backend/.metadata", "backend/__0_0.distcp", "backend/rank_0.pt", "cursor.pt"]
    loaded = checkpoints.load(newest(checkpoints), "cpu")
    assert loaded == {"backend": saved.folder / "backend", "cursor": 2}
    assert weights_in(loaded["backend"]).tolist() == [2.0] * 8
    with (saved.folder / "backend/.metadata").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DamagedCheckpointError, match=r"backend/\.metadata has \d+ bytes"):
        checkpoints.load(saved, "cpu", parts=["backend"])
    assert newest(checkpoints).step == 1
    assert "step_2/backend/.metadata has" in caplog.text
    (saved.folder / "backend/rank_0.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"lacks \['backend'\]"):
        checkpoints.load(saved, "cpu")


def test_a_save_in_the_background_is_invisible_until_it_is_finished(tmp_path):
    checkpoints = store(tmp_path)
    checkpoints.save(1, {"backend": Written(1)}, score=None)
    part = Written(2)
    save = checkpoints.start(2, {"backend": part, "cursor": 2}, score=None, background=True)
    assert save.writing()
    assert newest(checkpoints).step == 1
    part.released.set()
    assert not save.writing()
    assert newest(checkpoints).step == 1
    assert save.finish() == newest(checkpoints) == checkpoints.at(2)
    assert saved_steps(tmp_path) == [1, 2]


def test_a_failure_in_the_background_is_raised_at_the_end_and_leaves_the_last_good_one(tmp_path):
    checkpoints = store(tmp_path)
    checkpoints.save(1, {"backend": Written(1)}, score=None)
    full = OSError(errno.ENOSPC, "No space left on device")
    others = Written(2)
    save = checkpoints.start(2, {"first": Written(2, failure=full), "second": others}, score=None, background=True)
    with pytest.raises(OSError, match=r"could not save .*step_2: No space left .* Still good: step_1.* free space"):
        save.finish()
    assert not others.writer.writing()
    assert saved_steps(tmp_path) == [1]


def test_a_checkpoint_of_an_older_version_is_not_passed_over_but_told(tmp_path):
    store(tmp_path).save(3, state(3), score=None)
    folder = tmp_path / "checkpoints/step_6"
    folder.mkdir()
    (folder / "backend.pt").write_bytes(b"12")
    parts = {"backend": {"size": 2, "sha256": hashlib.sha256(b"12").hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({"step": 6, "score": None, "parts": parts}))
    for look in (store(tmp_path).latest, lambda: store(tmp_path).at(6)):
        with pytest.raises(OlderCheckpointError, match=r"step_6 was saved by an older version .* another run\.name"):
            look()


# Random streams


def draws() -> list[Any]:
    return [torch.randn(3).tolist(), np.random.standard_normal(3).tolist(), random.random(), random.gauss(0, 1)]


def test_random_streams_go_on_where_they_were_saved(tmp_path):
    before = rng_state()
    try:
        # An odd number of Gaussians: numpy and Python hold the second of the last pair back.
        draws()
        checkpoints = store(tmp_path)
        saved = checkpoints.save(1, {"rng": rng_state()}, score=None)
        expected = [draws() for _ in range(3)]
        draws()
        set_rng_state(checkpoints.load(saved, "cpu")["rng"])
        assert [draws() for _ in range(3)] == expected
    finally:
        set_rng_state(before)


def test_a_cuda_stream_that_cannot_be_continued_is_said(caplog):
    saved = {**rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    if not torch.cuda.is_available():
        set_rng_state(saved)
        assert "CUDA random stream starts afresh" in caplog.text
