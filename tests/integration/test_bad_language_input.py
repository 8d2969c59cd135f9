"""What a recipe of a language model can get wrong is refused by `unirl check` before torch loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.language_runs import write_recipe
from tests.integration.test_bad_input import ROOT, SESSION

BAD: dict[str, tuple[str, ...]] = {
    "sampling.temperature=0": ("sampling.temperature=0 takes the likeliest token always", "eval.temperature=0"),
    "sampling.temperature=-1": ("temperature must be 0 (the likeliest token) or at least 0.001, got -1",),
    "sampling.temperature=1e-38": ("temperature must be 0 (the likeliest token) or at least 0.001, got 1e-38",),
    "eval.temperature=1e-4": ("temperature must be 0 (the likeliest token) or at least 0.001, got 0.0001",),
    "sampling.top_p=0": ("top_p must be in (0, 1] (1 is off), got 0",),
    "sampling.top_k=-1": ("top_k must not be negative (0 is off), got -1",),
    "sampling.max_new_tokens=0": ("max_new_tokens must be at least 1, got 0",),
    'sampling.stop=["a",""]': ("stop holds an empty string, which every text contains: ['a', '']",),
    "sampling.stop_token_ids=[3,-1]": ("stop_token_ids are ids of tokens, 0 or more, got [3, -1]",),
    "sampling.guidance=4": ("sampling.guidance: unknown key of ARSamplingParams",),
    "sampling.max_new_token=4": ("did you mean max_new_tokens",),
    "data.samples_per_prompt=1": ("data.samples_per_prompt=1: a group of one has no baseline",),
    "data.prompts_per_step=4": ("prompts_per_step=4 does not fit the 3 prompts there are: take 1 to 3",),
    "rollout.weights=ema": ("GRPO samples with the live weights: set rollout.weights=live, got ema",),
    "train.geometry.num_updates_per_batch=3": ("8 samples a step do not divide into num_updates_per_batch=3",),
    "train.geometry.micro_batch_size=2": ("micro_batch_size=2 and token_budget=40 both say how large",),
    "train.geometry.token_budget=0": ("token_budget must be at least 1, got 0",),
    "train.geometry.replay_batch=2": ("train.geometry.replay_batch: unknown key of TokenGeometry",),
    "train.backend.guidance_gradient=false": ("train.backend.guidance_gradient: unknown key of ARBackendConfig",),
    "algorithm.clip_low=1.5": ("clip_low must be in (0, 1) and clip_high positive, got 1.5",),
    "algorithm.horizon=9": ("horizon goes with aggregation=seq-mean-token-sum-norm and with no other",),
    "algorithm.kl_coef=-1": ("kl_coef must not be negative, got -1",),
    "algorithm._target_=unirl.algorithms.flow_grpo.FlowGRPO": ("is not a TokenAlgorithm",),
    "model._target_=unirl.models.tiny.TinySD3": ("is not a LanguageFamily",),
    "model.width=30": ("width must be a multiple of twice the heads, got 30 and 2",),
    "model.characters=aa": ("characters must be distinct, at least one, got 'aa'",),
    "model.checkpoint=nowhere": ("checkpoint nowhere holds no config.json",),
    "eval.pass_at=[8]": ("pass_at=[8] cannot be told from samples_per_prompt=4 samples: take 1 to 4",),
    "eval.temperature=0": ("samples_per_prompt=4 at temperature 0 are copies of one text: take 1",),
    "reward.scorers={match: {scorer: {_target_: unirl.reward.scorers.exact_match.ExactMatch}}}": (
        "error: ListedPrompts: prompt 1, 'a b:': scorer match: the row: metadata has no 'answer', only []",
        "3 bad rows in all: mend them, or keep the scorer from such prompts with its `when`",
    ),
    "reward.scorers={mean: {scorer: {_target_: tests.digit_share.DigitShare}}}": ("mean",),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit code, standard error) of each of BAD and of the recipe as it is; heavy packages that were loaded."""
    recipe = str(write_recipe(tmp_path_factory.mktemp("bad_language")))
    words = [["check", recipe, override] for override in BAD] + [["check", recipe]]
    done = subprocess.run(
        [sys.executable, "-c", SESSION], input=json.dumps(words), capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return [(code, error) for code, error in result["outcomes"]], result["heavy"]


@pytest.mark.parametrize("override", BAD)
def test_it_is_refused_with_what_was_received_and_what_helps(
    override: str, session: tuple[list[tuple[int, str]], list[str]]
) -> None:
    code, error = session[0][list(BAD).index(override)]
    assert code == 2
    assert error.startswith("error: ")
    assert "Traceback" not in error
    for told in BAD[override]:
        assert told in error


def test_the_recipe_as_it_is_passes_and_torch_was_never_loaded(
    session: tuple[list[tuple[int, str]], list[str]],
) -> None:
    outcomes, heavy = session
    assert outcomes[-1] == (0, "")
    assert heavy == []


def test_another_entrypoint_names_the_right_one(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "unirl.train_diffusion", recipe], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 2
    assert f"run `python -m unirl.train_ar {recipe}`" in done.stderr
