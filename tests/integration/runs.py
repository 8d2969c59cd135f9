"""Small real runs: recipes with a model of a few thousand weights, a few steps, in a process that may be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import last_state
from unirl.config.run import load_recipe
from unirl.models.tiny import TinySD3

SMALL = ("model.layers=1", "model.heads=1", "model.head_dim=16", "model.embedding_dim=16")
SMALL_LANGUAGE = ("model.layers=1", "model.heads=2", "model.width=16")
RECIPES: dict[str, tuple[str, ...]] = {
    "flow_grpo": ("diffusion/digits", "train.backend.ema={decay: 0.9}"),
    "flow_grpo_lora": ("diffusion/digits", "train.backend.lora={rank: 2, alpha: 4}", "algorithm.anchor=replay"),
    "flow_dppo": ("diffusion/digits_flow_dppo",),
    "diffusion_nft": ("diffusion/digits_nft",),
    "sft": ("sft/digits",),
    "text_sft": ("sft/sort", "train.backend.ema={decay: 0.9}"),
    "text_sft_lora": ("sft/sort", "train.backend.lora={rank: 2, alpha: 4}", "eval.records=null"),
    "ar": ("ar/sort", "algorithm.kl_coef=0.01", "train.geometry={num_updates_per_batch: 2, token_budget: 100}"),
}


def small_model(checkpoint: Path | None = None) -> TinySD3:
    """The model of these runs."""
    return TinySD3(checkpoint=checkpoint, layers=1, heads=1, head_dim=16, embedding_dim=16)


def overrides(kind: str, output: Path, *, steps: int = 6) -> list[str]:
    """What turns the recipe of `kind` into a run of a second or two under `output`."""
    language = RECIPES[kind][0].endswith("/sort")
    common = [
        *RECIPES[kind][1:],
        *(SMALL_LANGUAGE if language else SMALL),
        f"run.output={output}",
        "run.name=run",
        "run.seed=3",
        f"run.steps={steps}",
        "run.save_every=2",
        "logging.trackers=[]",
        "eval.samples_per_prompt=2",
        f"eval.every={max(steps // 2, 1)}",
    ]
    if language:
        common += ["eval.prompts.number=4", "sampling.max_new_tokens=4"]
    if RECIPES[kind][0].startswith("sft/"):
        return [*common, "data.batch_size=8", "train.backend.optimizer.warmup_steps=2"]
    rollout = [] if language else ["sampling.steps=4"]
    return [*common, "data.prompts_per_step=4", "data.samples_per_prompt=4", *rollout]


def train(kind: str, output: str, steps: int = 6) -> None:
    """The run of `kind` in this process, to its end."""
    from unirl.trainer.domains import trainer_of

    trainer_of(load_recipe(RECIPES[kind][0], overrides(kind, Path(output), steps=steps))).fit()


def processes() -> ForkServerContext:
    """Processes that start with everything imported already, so that a kill hits training and not imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "unirl.trainer.domains",
            "unirl.models.tiny_modules",
            "transformers",
            "unirl.reward.scorers.digits",
            "sklearn.svm",
            "peft",
        ]
    )
    return context


def start(context: ForkServerContext, kind: str, output: Path, *, steps: int = 6) -> ForkServerProcess:
    """The run of `kind`, under way in a process of its own."""
    process = context.Process(target=train, args=(kind, str(output)), kwargs={"steps": steps})
    process.start()
    return process


def run_command(words: list[str], said: str) -> None:
    """`unirl` with these words in this process, which ends with its exit code; what it says goes to the file `said`."""
    from unirl import cli

    with Path(said).open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = cli.main(words)
    sys.exit(code)


def start_command(context: ForkServerContext, words: list[str], said: Path) -> ForkServerProcess:
    """`unirl` with these words, under way in a process of its own."""
    process = context.Process(target=run_command, args=(words, str(said)))
    process.start()
    return process


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds/")} for line in lines]


def state(output: Path) -> dict[str, Any]:
    """The last checkpoint: weights, optimizer, EMA, counters."""
    return last_state(output / "run")


def assert_equal(a: Any, b: Any, path: str = "state") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path
