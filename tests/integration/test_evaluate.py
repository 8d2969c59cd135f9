"""`unirl evaluate` on a small real run, on a recipe, and what it says of a mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import RECIPES, SMALL, overrides
from unirl import cli
from unirl.data.prompts import as_roots
from unirl.reward.scorers.digits import DigitJudge
from unirl.reward.service import scorer_inputs
from unirl.trainer.restore import restored
from unirl.trainer.suite import load_suite
from unirl.types.sample import Sample


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of two steps, and an EMA."""
    output = tmp_path_factory.mktemp("flow_grpo")
    assert cli.main(["train", RECIPES["flow_grpo"][0], *overrides("flow_grpo", output, steps=4)]) == 0
    return output / "run"


def evaluated(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def scores(content: dict[str, Any], figure: str = "knn") -> list[float]:
    return [sample["scores"][figure] for prompt in content["prompts"] for sample in prompt["samples"]]


def command(run: Path | str, out: Path, *more: str) -> list[str]:
    return ["evaluate", str(run), "--suite", "digits", "--number", "3", "--out", str(out), *more]


def test_a_run_is_evaluated_into_its_folder_and_a_table_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--suite", "digits", "--number", "3"]) == 0
    folder = run / "evaluations" / "digits_000004_live"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["figure", "skill", "mean", "std", "error", "n", "invalid"]
    assert [line.split()[0] for line in lines[1:-1]] == ["knn", "without", "all", "forest", "without", "all"]
    assert lines[-1] == str(folder / "evaluation.json")
    assert sorted(pictures(folder)) == ["pictures_with_a_loop.png", "pictures_without_a_loop.png"]
    said = evaluated(folder)
    assert [(row["figure"], row["skill"], row["n"]) for row in said["table"][:3]] == [
        ("knn", "with a loop", 12),
        ("knn", "without a loop", 18),
        ("knn", "all", 30),
    ]
    assert said["model"]["step"] == 4
    assert said["sampling"]["noise_level"] == 0
    assert said["scorers"]["knn"]["version"].startswith("DigitJudge/")


def test_its_scores_are_those_of_the_judge_on_what_the_run_draws(run: Path, tmp_path: Path) -> None:
    assert cli.main(command(run, tmp_path)) == 0
    said, rows = evaluated(tmp_path), list(load_suite("digits").rows)
    with restored(run, None) as found:
        assert found.config.eval is not None
        sampling = found.config.eval.sampled(found.config.sampling)
        request = Sample((as_roots(rows, 0),)).fork(
            3, type(sampling)(**{**vars(sampling), "seed": said["sampling"]["seed"]})
        )
        filled = found.sampler("live", 16).generate(request)
    judged = DigitJudge(kind="knn", half="b", output="correct").score(scorer_inputs(filled))
    assert scores(said) == judged


def test_the_same_command_again_writes_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert cli.main(command(run, tmp_path / name)) == 0
    one, two = (tmp_path / name for name in ("one", "two"))
    assert (one / "evaluation.json").read_bytes() == (two / "evaluation.json").read_bytes()
    assert pictures(one) == pictures(two)


def test_step_weights_seed_and_settings_are_those_asked_for(run: Path, tmp_path: Path) -> None:
    asked = {
        "live": [],
        "ema": ["--weights", "ema"],
        "two": ["--step", "2"],
        "seed": ["--seed", "7"],
    }
    for name, more in asked.items():
        assert cli.main(command(run, tmp_path / name, *more)) == 0
    words = command(run, tmp_path / "steps")
    assert cli.main([*words[:2], "sampling.steps=2", *words[2:]]) == 0
    drawn = [tuple(pictures(tmp_path / name).values()) for name in (*asked, "steps")]
    assert len(set(drawn)) == 5
    assert evaluated(tmp_path / "two")["model"]["step"] == 2
    assert evaluated(tmp_path / "ema")["model"]["weights"] == "ema"
    assert evaluated(tmp_path / "steps")["sampling"]["steps"] == 2


def test_a_recipe_is_evaluated_as_training_would_start(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["evaluate", "diffusion/digits", *SMALL, "--suite", "digits", "--number", "1"]) == 0
    said = evaluated(tmp_path / "evaluations" / "digits" / "digits")
    assert (said["model"]["step"], said["model"]["of"]) == (None, "diffusion/digits")
    assert len(scores(said)) == 10
    # The weights that a run exported, named in a recipe of their family, draw what the run draws.
    assert cli.main(["export", str(run), str(tmp_path / "model")]) == 0
    assert cli.main(command(run, tmp_path / "run")) == 0
    settings = [*SMALL, "sampling.steps=4", "data.prompts_per_step=4", "data.samples_per_prompt=4"]
    exported = command("diffusion/digits", tmp_path / "exported")
    assert cli.main([*exported[:2], *settings, f"model.checkpoint={tmp_path / 'model'}", *exported[2:]]) == 0
    assert pictures(tmp_path / "exported") == pictures(tmp_path / "run")


def test_a_random_model_of_a_real_family_is_judged_by_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "diffusion/tiny_sana", "sampling.steps=2", "--suite", "shapes", "--number", "1"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    table = evaluated(tmp_path)["table"]
    assert [row["skill"] for row in table] == ["circle", "square", "triangle", "all"] * 2
    assert [row["n"] + row["invalid"] for row in table] == [8, 8, 8, 24] * 2


def test_mistakes_are_told_in_a_line_and_write_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a cat"}\n')
    bare = tmp_path / "bare"
    bare.mkdir()
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    shutil.rmtree(unfinished / "checkpoints")
    out = ("--out", str(tmp_path / "out"))
    told = {
        (
            str(bare),
            "--suite",
            "digits",
        ): f"{bare} is no run: it holds no config.yaml; to evaluate exported weights name",
        (
            "org/model",
            "--suite",
            "digits",
        ): "org/model is neither a run's folder nor a recipe; to evaluate weights of a hub",
        (str(unfinished), "--suite", "digits"): "unfinished has no complete checkpoint; train it first",
        (str(run), "--suite", "digit"): "suite digit: neither a shipped one nor a file",
        (str(run), "--suite", str(bad)): f"{bad}:1: the row has neither a 'skill' nor 'skills'",
        (str(run), "--suite", "digits", "--step", "3"): "there is no checkpoint of step 3 in",
        (str(run), "--suite", "shapes"): "this model knows the words",
        (
            "diffusion/digits",
            *SMALL,
            "--suite",
            "digits",
            "--step",
            "3",
        ): "--step 3 is of a run, and diffusion/digits is a",
        ("diffusion/digits", *SMALL, "--suite", "digits", "--weights", "ema"): "this run kept no EMA",
        (
            "ar/sort",
            "model.width=16",
            "model.heads=2",
            "--suite",
            "shapes",
        ): "none of 96 samples has a score; first cause:",
    }
    for words, reason in told.items():
        capsys.readouterr()
        assert cli.main(["evaluate", *words, *out]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert "Traceback" not in error
        assert list((tmp_path / "out").glob("*")) == []
