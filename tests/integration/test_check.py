"""`unirl check` on every shipped recipe, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from unirl import cli
from unirl.config.compose import compose
from unirl.config.error import ConfigError
from unirl.config.load import dump, load
from unirl.config.recipes import shipped_recipes
from unirl.config.run import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted(shipped_recipes())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)


def sections(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings below `node`, which are its own objects."""
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    if isinstance(node, dict):
        yield node
    for child in children:
        yield from sections(child)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_recipe_loads_and_its_dump_loads_back(recipe: str) -> None:
    config = load_recipe(recipe)
    assert load(type(config), dump(config)) == config
    assert config.domain == recipe.partition("/")[0]


def test_what_a_run_writes_down_is_a_recipe_of_the_same_run(tmp_path: Path) -> None:
    config = load_recipe("diffusion/sd3_dance_grpo")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dump(config)))
    assert load_recipe(str(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_misspelt_key_in_any_section_of_a_shipped_recipe_is_refused(recipe: str) -> None:
    root, data = type(load_recipe(recipe)), compose(recipe)
    for section in sections(data):
        section["mispelt"] = 1  # a mapping of free names, such as `scorers`, refuses the value instead
        with pytest.raises(ConfigError) as caught:
            load(root, data)
        [problem] = caught.value.problems
        assert "mispelt: " in problem
        assert "1 (int)" in problem
        del section["mispelt"]


@pytest.mark.parametrize(
    ("recipe", "override", "told"),
    [
        ("diffusion/digits", "run.seed=${sampling.seed}", "Recursive interpolation detected"),
        ("diffusion/digits", "data.records.wrong_share=0", "data.records: unknown key of DataConfig"),
        ("sft/digits", "advantage.scale=none", "advantage: unknown key of SFTConfig"),
        ("sft/digits", "data.samples_per_prompt=8", "data.samples_per_prompt: unknown key of SFTDataConfig"),
        ("diffusion/digits", "advantage.scale=group-std", "did you mean group_std"),
        ("diffusion/digits", "algorithm._target_=unirl.algorithms.flow_grpo.FlowGPRO", "did you mean FlowGRPO?"),
        ("diffusion/digits", "sampling.sde._target_=unirl.algorithms.flow_grpo.FlowGRPO", "is not a StepRule"),
        ("diffusion/digits", "data.samples_per_prompt=1", "a group of one has no baseline"),
        ("diffusion/digits", "rollout.weights=ema", "FlowGRPO samples with the live weights"),
        ("diffusion/sd3_nft", "rollout.weights=live", "DiffusionNFT samples with the ema weights"),
        ("diffusion/sd3_nft", "train.backend.ema=null", "set train.backend.ema"),
        ("diffusion/digits", "sampling.noise_level=0", "sampling picks none"),
        ("diffusion/sd3_mix_grpo", "sampling.steps=4", "does not fit the 3 stochastic steps"),
        ("diffusion/sd3_flow_grpo", "train.geometry.micro_batch_size=7", "does not divide into micro_batch_size=7"),
        ("diffusion/digits", "prompts@data.prompts=file", "data.prompts.path: missing; give a path"),
    ],
)
def test_a_recipe_that_could_not_run_is_refused_with_the_reason(recipe: str, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert told in str(caught.value)


def test_the_seed_of_a_run_reaches_all_that_draw() -> None:
    drawn = load_recipe("diffusion/sd3_dance_grpo")
    assert drawn.run.seed == drawn.sampling.seed == drawn.sampling.sde.seed
    assert load_recipe("sft/digits", ["run.seed=0"]).algorithm.seed == 0


def test_check_loads_no_model_library() -> None:
    result = run(
        "-c",
        "import sys\nfrom unirl import cli\n"
        f"assert cli.main(['check', *{RECIPES!r}]) == 0\n"
        "heavy = ('torch._C', 'sklearn.base', 'diffusers.utils', 'transformers.utils')\n"
        "print([name for name in heavy if name in sys.modules])",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [*(f"ok: {recipe}" for recipe in RECIPES), "[]"]


def test_several_recipes_are_checked_with_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "diffusion/digits", "~eval", "diffusion/sd3_nft", "run.steps=7"]) == 0
    assert capsys.readouterr().out == "ok: diffusion/digits\nok: diffusion/sd3_nft\n"
    assert cli.main(["check", "diffusion/digits", "diffusion/nothing"]) == 2
    assert "error: recipe diffusion/nothing: not a shipped one" in capsys.readouterr().err
    assert cli.main(["check", "diffusion/digits", "diffusion/sd3_nft", "sampling.seed=x"]) == 2
    assert "error: sampling.seed: expected an int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            ["unirl.cli", "check", "diffusion/digits", "run.step=3", "sampling.steps=x"],
            "error: run.step: unknown key of RunConfig",
        ),
        (["unirl.cli", "check", "diffusion/nothing"], "error: recipe diffusion/nothing: not a shipped one"),
        (["unirl.train_sft", "diffusion/digits"], "run `python -m unirl.train_diffusion diffusion/digits`"),
        (
            ["unirl.train_diffusion", "sft/digits", "run.seed=1"],
            "run `python -m unirl.train_sft sft/digits run.seed=1`",
        ),
        (["unirl.train_diffusion"], "the following arguments are required: recipe"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_code_2_and_no_traceback(command: list[str], told: str) -> None:
    result = run("-m", *command)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
