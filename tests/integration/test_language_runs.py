"""A run of a language model from recipe to report, killed and resumed, sampled and exported."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.byte_language import write_checkpoint
from tests.checkpoints import last_state
from tests.integration.language_runs import TINY, write_recipe
from tests.tiny_language import CPU
from unirl import cli
from unirl.config.error import ConfigError
from unirl.config.run import load_recipe
from unirl.models.language.causal_lm import CausalLM
from unirl.trainer.ar import ARTrainer
from unirl.trainer.restore import export_run, sample_run
from unirl.types.media import Media

LORA = "train.backend.lora={rank: 2, alpha: 4}"


def fit(folder: Path, *overrides: str, model: str = TINY) -> Path:
    """The folder of the finished run."""
    config = load_recipe(str(write_recipe(folder, model)), list(overrides))
    return ARTrainer(config).fit()


def lines(run: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("seconds/")} for line in read]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return last_state(run)["parameters"]


def byte_model(folder: Path) -> str:
    """A model node: a checkpoint folder of transformers."""
    checkpoint = write_checkpoint(folder / "checkpoint", template=None)
    return f"{{_target_: unirl.models.language.causal_lm.CausalLM, checkpoint: {checkpoint}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("run"))


# What a run leaves


def test_every_step_tells_of_its_responses_and_an_evaluation_of_its_successes(run: Path) -> None:
    steps = lines(run)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    for step in steps[1:]:
        assert 1 <= step["rollout/tokens"] <= 8
        assert 0 <= step["rollout/truncated"] <= 1
        assert step["train/rollout_gap_max"] < 1e-5
        assert math.isfinite(step["train/entropy"])
        assert step["train/skipped"] == 0.0
    for step in (steps[0], steps[2], steps[4]):
        assert 0 <= step["eval/pass@1"] <= step["eval/pass@4"] <= 1


def test_the_texts_of_an_evaluation_are_kept_with_prompts_and_rewards(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "samples" / "eval_000004.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["x:"] * 4 + ["y z:"] * 4
    for row in rows:
        share = sum(c.isdigit() for c in row["text"]) / max(len(row["text"]), 1)
        assert row["reward"] == pytest.approx(share)
    assert (run / "report.html").is_file()


def test_a_run_that_stopped_half_way_ends_with_the_same_weights_and_metrics(run: Path, tmp_path: Path) -> None:
    stopped = fit(tmp_path)
    (last,) = (stopped / "checkpoints").glob("*4")
    shutil.rmtree(last)
    again = fit(tmp_path)
    assert lines(again) == lines(run)
    expected = weights(run)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


@pytest.mark.parametrize("where", ["data", "eval"])
def test_a_prompt_that_does_not_fit_stops_a_run_before_its_first_step(where: str, tmp_path: Path) -> None:
    """Whichever step would have drawn it."""
    prompts = f"{where}.prompts.prompts=[a, b, {'c' * 249}]"
    with pytest.raises(ConfigError, match=r"has 249 tokens: with sampling.max_new_tokens=8 more .* context of 256"):
        fit(tmp_path, prompts)
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=r"the prompt 'É' must be of the characters"):
        fit(tmp_path, f"{where}.prompts.prompts=[a, b, 'É']", "run.name=other")


# Its weights


def test_prompts_of_an_evaluation_that_are_trained_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = str(write_recipe(tmp_path))
    with caplog.at_level(logging.WARNING):
        ARTrainer(load_recipe(recipe))
        ARTrainer(load_recipe(recipe, ['eval.prompts.prompts=["hello:","a b:","c:"]']))
        assert caplog.text == ""
        ARTrainer(load_recipe(recipe, ['eval.prompts.prompts=["x:","c:","y:"]']))
    assert "eval.prompts: 1 of 3 are trained on as well, such as 'c:': figures of these are not held out" in caplog.text


def test_a_stop_token_that_is_none_of_the_model_stops_a_run_before_its_first_step(tmp_path: Path) -> None:
    told = r"sampling\.stop_token_ids=\[99999\] are no tokens of the model, whose ids are 0 to 48"
    with pytest.raises(ConfigError, match=told):
        fit(tmp_path, "sampling.stop_token_ids=[48,99999]")
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_sampling_a_run_is_keyed_by_the_seed_and_gives_so_many_texts_a_prompt(run: Path) -> None:
    first = sample_run(run, ["x:", "y"], 3, seed=0).required_texts
    assert len(first) == 6
    assert sample_run(run, ["x:", "y"], 3, seed=0).required_texts == first
    assert sample_run(run, ["x:", "y"], 3, seed=1).required_texts != first
    assert sample_run(run, ["x:", "y"], 3, seed=0, step=2).required_texts != first


def test_the_command_prints_the_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(run), "x:", "y", "--number", "3", "--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == sample_run(run, ["x:", "y"], 3, seed=5).required_texts


def test_a_picture_file_for_texts_is_refused(run: Path, tmp_path: Path) -> None:
    assert cli.main(["sample", str(run), "x:", "--out", str(tmp_path / "a.png")]) == 2


def test_a_prompt_that_the_model_cannot_take_is_a_mistake_and_no_traceback(run: Path) -> None:
    with pytest.raises(ConfigError, match="the prompt 'É' must be of the characters"):
        sample_run(run, ["É"], 1, seed=0)


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    model.requires_grad_(False)  # torch multiplies by a weight that wants a gradient in another order
    return model(**tokenizer("hello 123", return_tensors="pt")).logits


def test_an_export_of_all_weights_loads_in_transformers_and_is_the_trained_model(tmp_path: Path) -> None:
    done = fit(tmp_path, model=byte_model(tmp_path))
    export_run(done, tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    trained = weights(done)
    assert all(torch.equal(value, trained[name]) for name, value in loaded.named_parameters())
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert float((logits(loaded, tokenizer) - logits(before, tokenizer)).abs().max()) > 1e-2
    again = CausalLM(checkpoint=str(tmp_path / "out"))
    bundle = again.load(CPU, torch.float32)
    assert again.tokenize(bundle, Media(texts=["ab"])).lengths.tolist() == [2]


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_exported_adapter_loads_in_peft_by_its_base_and_alone(tmp_path: Path) -> None:
    done = fit(tmp_path, LORA, model=byte_model(tmp_path))
    export_run(done, tmp_path / "out")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    untrained = logits(base, tokenizer)
    on_top: Any = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    saved = {name: value for name, value in on_top.named_parameters() if "lora_" in name}
    trained = weights(done)
    assert len(saved) == len(trained) == 2 * 7 * 2
    for name, value in trained.items():
        assert torch.equal(saved[f"base_model.model.{name}"], value)
    found = logits(on_top, tokenizer)
    assert float((found - untrained).abs().max()) > 1e-4
    alone: Any = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert torch.equal(logits(alone, tokenizer), found)


def test_the_policy_learns_to_write_digits(tmp_path: Path) -> None:
    done = fit(tmp_path, "run.steps=25", "eval.every=25", "run.save_every=25", "data.samples_per_prompt=8")
    first, *_, last = lines(done)
    assert last["eval/reward"] > first["eval/reward"] + 0.3
