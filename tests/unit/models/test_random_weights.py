"""`checkpoint: random:NAME`: which there are, and the folder that each becomes."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from unirl.models.pretrained import check_checkpoint, resolve
from unirl.models.random_weights.folders import find, folder_of, known


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", known())
def test_a_checkpoint_is_the_same_bit_for_bit_wherever_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = contents(folder_of(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    torch.rand(1)
    second = contents(folder_of(name))
    # That of a modular pipeline says where it was saved; the parts beside it come first.
    [index] = first.keys() & {"model_index.json", "modular_model_index.json", "config.json"}
    told = [json.loads(folder.pop(index)) for folder in (first, second)]
    for held in told:
        assert (held["architectures"][0] if index == "config.json" else held["_class_name"]) == find(name).pipeline
    assert first == second


def test_it_is_written_once_and_draws_nothing_of_what_a_run_draws(cache: Path) -> None:
    state = torch.get_rng_state()
    folder = Path(resolve("random:sana"))
    assert torch.equal(torch.get_rng_state(), state)
    assert folder.is_relative_to(cache / "unirl")
    (folder / "mine").touch()
    assert resolve("random:sana") == str(folder)
    assert (folder / "mine").exists()


def test_what_is_no_random_checkpoint_stays_as_it_is() -> None:
    assert [resolve(name) for name in ("owner/model", "some/folder")] == ["owner/model", "some/folder"]


def test_a_check_writes_nothing_and_knows_the_family(cache: Path) -> None:
    check_checkpoint("random:sana", "SanaPipeline")
    with pytest.raises(ValueError, match="random:sana holds a SanaPipeline, this family is FluxPipeline"):
        check_checkpoint("random:sana", "FluxPipeline")
    with pytest.raises(
        ValueError, match=r"no random checkpoint 'snaa'; did you mean sana\? known: cogview4, .*z_image"
    ):
        check_checkpoint("random:snaa", "SanaPipeline")
    assert not cache.exists()


def _resolved(together: Barrier, told: str) -> None:
    """In a process of its own."""
    together.wait(60)
    Path(told).write_text(resolve("random:sana"))


@pytest.mark.slow
def test_processes_that_write_it_at_once_end_with_one_whole_folder(tmp_path: Path, cache: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusers.pipelines.sana.pipeline_sana", "unirl.models.pretrained"])
    told = [tmp_path / f"told-{number}" for number in range(3)]
    barrier = context.Barrier(len(told))
    processes = [context.Process(target=_resolved, args=(barrier, str(file))) for file in told]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    [folder] = {Path(file.read_text()) for file in told}
    assert [path.name for path in folder.parent.iterdir()] == ["sana"]
    assert contents(folder) == contents(find("sana").write(tmp_path / "alone"))
