"""The `unirl` command on small real runs: train, sample, export, report, and what it says of a mistake."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

from tests.integration.runs import RECIPES, overrides, small_model
from unirl import __version__, cli
from unirl.config.recipes import shipped_recipes
from unirl.models.base import Bundle
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.diffusion_stage import DiffusionStage
from unirl.trainer.restarts import Restarts
from unirl.trainer.restore import sample_run
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SEVEN, ZERO = "a handwritten seven", "a handwritten zero"


def command(kind: str, output: Path, *more: str, steps: int = 4) -> list[str]:
    return ["train", RECIPES[kind][0], *overrides(kind, output, steps=steps), *more]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of every kind, `OUTPUT/run`."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in RECIPES}
    assert [cli.main(command(kind, folder)) for kind, folder in folders.items()] == [0] * len(RECIPES)
    return folders


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(capsys: pytest.CaptureFixture[str], words: list[str], *, code: int = 2) -> str:
    """What standard error says of a command that ends with `code`."""
    capsys.readouterr()
    assert cli.main(words) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def drawn(bundle: Bundle, run: Path) -> torch.Tensor:
    """Two pictures of a seven by the run's own sampling and seed 5."""
    sampling = yaml.safe_load((run / "config.yaml").read_text())["sampling"]
    stage = DiffusionStage(small_model(), bundle, guidance_gradient=True, compute_dtype=torch.float32)
    ode = DiffusionSamplingParams(sampling["steps"], 8, 8, seed=5).deterministic()
    prompts = Part(ids=["r0.p0"], metadata=[{}], media=Media(texts=[SEVEN]))
    with torch.no_grad():
        media = DiffusionPipeline(stage)(Sample((prompts,)).fork(2, ode), version=0).frontier.media
    assert media is not None
    assert media.images is not None
    return media.images


def sampled(run: Path, *, step: int | None = None, weights: Literal["live", "ema"] | None = None) -> torch.Tensor:
    """The same by the run itself."""
    images = sample_run(run, [SEVEN], 2, seed=5, step=step, weights=weights).images
    assert images is not None
    assert images.std() > 0.01
    return images


def test_a_model_trained_whole_is_exported_as_what_a_recipe_loads(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = outputs["flow_grpo"] / "run", tmp_path / "model"
    capsys.readouterr()
    assert cli.main(["export", str(run), str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"
    loaded = small_model(model).load(CPU, torch.float32)
    assert torch.equal(drawn(loaded, run), sampled(run))
    # A run that starts from it sees what the run that made it saw last.
    assert cli.main(command("flow_grpo", tmp_path, f"model.checkpoint={model}", steps=1)) == 0
    last, first = run / "samples" / "eval_000004.png", tmp_path / "run" / "samples" / "eval_000000.png"
    assert last.read_bytes() == first.read_bytes()


def test_the_ema_is_exported_when_asked_for(outputs: dict[str, Path], tmp_path: Path) -> None:
    run = outputs["flow_grpo"] / "run"
    for weights in ("live", "ema"):
        assert cli.main(["export", str(run), str(tmp_path / weights), "--weights", weights]) == 0
    live, ema = (contents(tmp_path / weights) for weights in ("live", "ema"))
    assert live["config.json"] == ema["config.json"]
    assert live["model.safetensors"] != ema["model.safetensors"]
    loaded = small_model(tmp_path / "ema").load(CPU, torch.float32)
    assert torch.equal(drawn(loaded, run), sampled(run, weights="ema"))


def test_an_earlier_checkpoint_is_exported_when_asked_for(outputs: dict[str, Path], tmp_path: Path) -> None:
    run = outputs["flow_grpo"] / "run"
    assert cli.main(["export", str(run), str(tmp_path / "two"), "--step", "2"]) == 0
    loaded = small_model(tmp_path / "two").load(CPU, torch.float32)
    assert torch.equal(drawn(loaded, run), sampled(run, step=2))
    assert not torch.equal(*(sampled(run, step=step) for step in (2, 4)))


def test_an_adapter_is_exported_as_what_peft_loads(outputs: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel

    run = outputs["flow_grpo_lora"] / "run"
    assert cli.main(["export", str(run), str(tmp_path / "adapter")]) == 0
    assert sorted(contents(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    base = small_model().load(CPU, torch.float32)
    bare = drawn(base, run)
    adapted = PeftModel.from_pretrained(base.transformer, str(tmp_path / "adapter"))
    assert torch.equal(drawn(Bundle(transformer=adapted), run), sampled(run))
    assert not torch.equal(bare, sampled(run))


def test_the_same_command_again_does_nothing_and_keeps_every_number(
    outputs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = outputs["flow_dppo"]
    before = contents(output / "run")
    capsys.readouterr()
    assert cli.main(command("flow_dppo", output)) == 0
    assert capsys.readouterr().out == f"report: {output / 'run' / 'report.html'}\n"
    after = contents(output / "run")
    assert {name for name in before if before[name] != after[name]} <= {"run.json", "report.html"}
    assert before.keys() == after.keys()
    assert len(json.loads(after["run.json"])["resumed"]) == 1


def test_more_steps_continue_a_finished_run_and_fewer_are_refused(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(outputs["sft"], tmp_path / "sft")
    log = tmp_path / "sft" / "run" / "metrics.jsonl"
    trained = log.read_text()
    assert cli.main(command("sft", tmp_path / "sft", steps=6)) == 0
    assert log.read_text().startswith(trained)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4, 5, 6]
    error = refusal(capsys, command("sft", tmp_path / "sft", steps=5))
    assert "run.steps=5: the run has trained 6 steps already; ask for at least as many" in error


def test_run_json_says_what_was_run_with_what(outputs: dict[str, Path]) -> None:
    info = json.loads((outputs["sft"] / "run" / "run.json").read_text())
    assert info["seed"] == 3
    assert info["command"] == list(sys.orig_argv)
    assert info["versions"]["unirl"] == __version__
    for package in ("torch", "diffusers", "transformers", "peft"):
        assert info["versions"][package] == importlib.metadata.version(package)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path.cwd(), capture_output=True, text=True).stdout.strip()
    assert info["git"]["commit"] == commit
    assert info["resumed"] == []
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", info["started"])


def test_the_report_stands_alone(outputs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    report = outputs["flow_grpo"] / "run" / "report.html"
    page = report.read_text()
    for outside in (
        r"<script[^>]+src",
        r"<link\b",
        r"@import",
        r"url\((?!['\"]?(data:|#))",
        r"(?:src|href)=(?!['\"]?(?:data:|#))",
    ):
        assert re.findall(outside, page) == []
    assert "before" in page
    assert page.count("data:image/png;base64,") >= 3
    report.unlink()
    capsys.readouterr()
    assert cli.main(["report", str(report.parent)]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.read_text() == page


def test_every_metric_is_documented_and_every_documented_one_is_there(outputs: dict[str, Path], tmp_path: Path) -> None:
    options = {
        "dapo": ("responses={max_draws: 1, overlong: {buffer: 2}}", "algorithm.correction={level: token}"),
        "ppo": ("algorithm._target_=unirl.algorithms.ppo.PPO", "train.backend.critic=true", "eval.pass_at=[1]"),
    }
    language = {name: tmp_path / name for name in options}
    for name, more in options.items():
        assert cli.main(command("ar", language[name], *more)) == 0
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^(\w+/\S+)  ", page, re.MULTILINE))
    lines = [
        line
        for output in (outputs | language).values()
        for line in (output / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    there = {name for line in lines for name in json.loads(line)} - {"step"} | Restarts(limit=1, done=1).metrics.keys()
    there |= {"train/empty_updates", "eval/invalid"}  # on no line of a run in which nothing is amiss
    patterns = {name: re.sub(r"<\w+>", r"[\\w.]+", name) for name in documented}
    exact = documented & there
    assert [name for name in there - exact if not any(re.fullmatch(p, name) for p in patterns.values())] == []
    assert [name for name, p in patterns.items() if not any(re.fullmatch(p, found) for found in there)] == []


def test_sample_draws_a_grid_and_says_where(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = outputs["diffusion_nft"] / "run"
    words = ["sample", str(run), SEVEN, ZERO, "--number", "3", "--seed", "5"]
    for name in ("one.png", "two.png"):
        capsys.readouterr()
        assert cli.main([*words, "--out", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*words[:-1], "6", "--out", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()
    assert cli.main(words) == 0
    assert (run / "samples" / "sample.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def test_mistakes_in_a_command_on_a_run_are_told_in_a_line(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, taken, new = str(outputs["flow_grpo_lora"] / "run"), tmp_path / "taken", str(tmp_path / "new")
    taken.mkdir()
    (taken / "mine.txt").write_text("x")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    shutil.rmtree(unfinished / "checkpoints")
    told = {
        ("sample", run, "a handwritten eleven"): "'a handwritten eleven' uses ['eleven'], this model knows the words",
        ("sample", run, "a a a a"): "has 4 words, this model takes 3",
        ("sample", run, SEVEN, "--step", "3"): "there is no checkpoint of step 3 in",
        ("sample", str(taken), SEVEN): f"{taken} is no run: it holds no config.yaml",
        ("sample", str(unfinished), SEVEN): "unfinished has no complete checkpoint; train it first",
        ("export", run, str(taken)): f"{taken} exists already: export to a new or an empty folder",
        ("export", run, new, "--step", "9"): "there are: ['step_4', 'step_2']",
        ("export", run, new, "--weights", "ema"): "this run kept no EMA: its recipe has train.backend.ema=null",
        ("export", str(tmp_path / "none"), new): "none is no run: it holds no config.yaml",
        ("report", str(taken)): f"{taken} holds no run",
        ("recipes", "diffusion/digit"): "did you mean diffusion/digits",
    }
    for words, reason in told.items():
        error = refusal(capsys, list(words))
        assert error.startswith("error: ")
        assert reason in error
        assert error.count("\n") == 1
    assert contents(taken) == {"mine.txt": b"x"}
    assert not Path(new).exists()


def test_what_only_the_weights_can_tell_is_told_in_a_line_too(
    outputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, command("flow_grpo", tmp_path / "a", "train.backend.lora={targets: [to_x]}"))
    assert "error: LoRA targets ['to_x'] match no Linear layer; layers here end in" in error
    if not torch.cuda.is_available():
        error = refusal(capsys, command("flow_grpo", tmp_path / "b", "placement.device=cuda"))
        assert "placement.device is cuda, but torch sees no CUDA device; use device=cpu or device=null" in error
    broken = command("sft", tmp_path / "c", "train.backend.optimizer.lr=1e30", "train.backend.max_skipped_steps=0")
    assert "error: the gradient was not finite 1 times in a row" in refusal(capsys, broken, code=1)
    (tmp_path / "file").write_text("")
    assert f"error: {tmp_path / 'file'}" in refusal(capsys, command("flow_grpo", tmp_path / "file"), code=1)
    other = command("flow_dppo", outputs["flow_dppo"], "algorithm.kl_threshold=1")
    assert "algorithm.kl_threshold: 0.001 there, 1.0 here" in refusal(capsys, other)


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_reader_who_leaves_early_ends_a_listing_without_a_word(buffering: list[str]) -> None:
    command = [sys.executable, *buffering, "-m", "unirl.cli", "recipes"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        listing.stdout.close()
        assert listing.stderr is not None
        assert listing.stderr.read() == b""
    assert listing.returncode == 141


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(shipped_recipes())
    assert all(len(line.split()) > 4 for line in listed)
    assert cli.main(["recipes", "diffusion/digits"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["run"]["name"] == "digits"
    assert shown["sampling"]["seed"] == "${run.seed}"


def ended(words: list[str]) -> str | int | None:
    """The exit code of a command line that argparse ends."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return stop.value.code


def test_the_help_names_every_command_and_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, entry in cli.COMMANDS.items():
        assert re.search(rf"^    {name}\b", shown, re.MULTILINE)
        assert entry.run.__doc__ is not None
        assert ended([name, "--help"]) == 0
        assert entry.run.__doc__.split()[0] in capsys.readouterr().out
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tran", "diffusion/digits"], "invalid choice: 'tran'"),
        (["train"], "the following arguments are required: recipe"),
        (["sample", "run", "x", "--number", "0"], "argument --number: must be at least 1, got 0"),
        (["sample", "run", "x", "--seed", "seven"], "argument --seed: invalid int value: 'seven'"),
        (["export", "run", "folder", "--weights", "best"], "invalid choice: 'best'"),
        (["quickstart", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_a_malformed_command_line_ends_with_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(words) == 2
    assert told in capsys.readouterr().err
