"""The run's folder: what it records, what it refuses."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.unit.observability.runs import RL
from unirl.config.error import ConfigError
from unirl.observability.run_folder import RunFolder, changed_keys


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    recipe = copy.deepcopy(RL)
    change(recipe)
    return recipe


def test_a_new_folder_holds_the_recipe_and_what_it_takes_to_repeat_it(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "runs", "demo", config=RL, seed=7, command=["unirl", "train", "demo"])
    assert folder.path == tmp_path / "runs" / "demo"
    assert yaml.safe_load(folder.config.read_text()) == RL
    record = json.loads(folder.info.read_text())
    assert record["command"] == ["unirl", "train", "demo"]
    assert record["seed"] == folder.recorded_seed() == 7
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"unirl", "diffusers", "transformers", "peft"} <= record["versions"].keys()
    assert record["started"].endswith("+00:00")
    assert record["resumed"] == []


def test_the_git_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open(tmp_path / "a", "demo", config=RL, seed=0).read_info()["git"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    (tmp_path / "recipe.yaml").write_text("one")
    for command in (["init", "-q"], ["add", "recipe.yaml"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert RunFolder.open(tmp_path / "b", "demo", config=RL, seed=0).read_info()["git"] == {
        "commit": commit,
        "modified": False,
    }
    (tmp_path / "recipe.yaml").write_text("two")
    assert RunFolder.open(tmp_path / "c", "demo", config=RL, seed=0).read_info()["git"]["modified"] is True


def begun(root: Path) -> RunFolder:
    """A run of RL that has written its first line of metrics."""
    folder = RunFolder.open(root, "demo", config=RL, seed=7, command=["first"])
    folder.metrics.write_text('{"step": 0}\n')
    return folder


def test_the_same_recipe_goes_on_and_every_start_is_recorded(tmp_path: Path) -> None:
    first = begun(tmp_path).read_info()
    second = RunFolder.open(tmp_path, "demo", config=RL, seed=7, command=["second"]).read_info()
    assert {**second, "resumed": []} == first
    assert [start["command"] for start in second["resumed"]] == [["second"]]


def test_length_place_logging_and_pace_of_evaluation_may_change(tmp_path: Path) -> None:
    begun(tmp_path)
    longer = changed(
        lambda r: (
            r["run"].update(steps=800, output="elsewhere"),
            r["eval"].update(every=1),
            r.update(logging={"trackers": ["tensorboard"]}),
        )
    )
    folder = RunFolder.open(tmp_path, "demo", config=longer, seed=7)
    assert yaml.safe_load(folder.config.read_text()) == longer


def test_another_recipe_is_refused_with_the_keys_that_differ_and_the_fix(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    other = changed(
        lambda r: (r["algorithm"].update(kl_coef=0.1, clip=1e-3), r["run"].update(steps=9), r["run"].pop("seed"))
    )
    with pytest.raises(ValueError, match="another recipe") as refusal:
        RunFolder.open(tmp_path, "demo", config=other, seed=7)
    message = str(refusal.value)
    assert (
        "algorithm.clip: absent there, 0.001 here; algorithm.kl_coef: 0.2 there, 0.1 here; "
        "run.seed: 7 there, absent here"
    ) in message
    assert "run.steps" not in message
    assert "choose another run.name, or delete the folder" in message
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_run_goes_on_only_with_the_prompts_it_began_with(tmp_path: Path) -> None:
    before = {"data.prompts": "1a", "eval.prompts": "2b"}
    open_with = functools.partial(RunFolder.open, tmp_path, "demo", config=RL, seed=7)
    open_with(digests={"data.prompts": "not yet begun"})
    open_with(digests=before).metrics.write_text('{"step": 0}\n')
    assert open_with(digests=before).read_info()["digests"] == before
    told = "that began with other prompts in eval.prompts; put those back, choose another run.name, or delete the"
    with pytest.raises(ValueError, match=told):
        open_with(digests={**before, "eval.prompts": "3c"})


def test_a_run_that_noted_no_prompts_takes_those_of_its_next_start(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    record = folder.read_info()
    del record["digests"]
    folder.info.write_text(json.dumps(record))
    RunFolder.open(tmp_path, "demo", config=RL, seed=7, digests={"data.prompts": "1a"})
    with pytest.raises(ValueError, match=r"other prompts in data\.prompts"):
        RunFolder.open(tmp_path, "demo", config=RL, seed=7, digests={"data.prompts": "2b"})


def test_a_recipe_that_was_refused_before_its_first_step_may_be_mended(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, "demo", config=RL, seed=7)
    mended = changed(lambda r: r["algorithm"].update(kl_coef=0.1))
    folder = RunFolder.open(tmp_path, "demo", config=mended, seed=8, command=["mended"])
    assert yaml.safe_load(folder.config.read_text()) == mended
    assert (folder.read_info()["seed"], folder.read_info()["resumed"]) == (8, [])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"no run \(no config.yaml; it holds thesis.tex\)"):
        RunFolder.open(tmp_path, "demo", config=RL, seed=7)


def test_a_start_killed_before_its_recipe_was_written_starts_again(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, "demo", config=RL, seed=7)
    folder.config.unlink()
    (folder.path / ".config.yaml.123.tmp").write_text("half")
    folder.lock.touch()
    assert RunFolder(tmp_path, "demo").recorded_seed() == 7
    assert RunFolder.open(tmp_path, "demo", config=RL, seed=7).read_info()["resumed"] == []


def test_a_folder_is_held_by_one_at_a_time_and_let_go_by_a_process_that_is_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs", "demo")
    program = (
        "import sys, time; from pathlib import Path; from unirl.observability.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), 'demo').held(): print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(folder.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"^{folder.path}: another program trains in this folder; .* run\.name$"):
            folder.held().__enter__()
        other.kill()
    for _ in range(2):
        with folder.held():
            RunFolder.open(folder.root, "demo", config=RL, seed=7)


def test_a_run_without_its_run_json_cannot_go_on(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.info.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json cannot be read .* without its seed the run cannot go on"):
        RunFolder.open(tmp_path, "demo", config=RL, seed=7)


def test_recipes_are_compared_as_they_stand_on_disk() -> None:
    assert changed_keys({"betas": [0.9, 0.99], "eps": 1e-8}, {"betas": (0.9, 0.99), "eps": 1e-8}) == {}
    assert changed_keys({"eval": None}, {"eval": {"every": 5, "size": 2}}) == {
        "eval": ("null", "absent"),
        "eval.size": ("absent", "2"),
    }


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="must be a plain folder name"):
        RunFolder(tmp_path, name)


def test_a_new_folder_has_no_seed_yet(tmp_path: Path) -> None:
    assert RunFolder(tmp_path, "demo").recorded_seed() is None
