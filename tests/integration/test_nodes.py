"""Settings reach what they set: no accepted key is left unread, and a seed is drawn once or is what was given."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.runs import RECIPES, metrics, overrides, state
from tests.unit.types.same import assert_same
from unirl import cli
from unirl.config.load import dump, load
from unirl.config.recipes import shipped_recipes
from unirl.config.run import load_recipe

# Keys that are there to be refused, with the reason, whatever their value.
REFUSED = {"HunyuanImage.apg_momentum"}
PACKAGE = Path(__file__).parents[2] / "unirl"


def settings_classes(node: Any) -> Iterator[type]:
    """The dataclasses of a config, its own and those of all its sections."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield type(node)
        for field in dataclasses.fields(node):
            yield from settings_classes(node.__dict__[field.name])
    elif isinstance(node, dict | tuple):
        for item in node.values() if isinstance(node, dict) else node:
            yield from settings_classes(item)


def reads(tree: ast.Module) -> set[str]:
    """Names that are read as attributes or taken as keys, `__post_init__` left out: to validate is not to use."""
    found, waiting = set(), list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.add(str(node.slice.value))
        waiting.extend(ast.iter_child_nodes(node))
    return found


READ = set().union(*(reads(ast.parse(file.read_text("utf-8"))) for file in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_every_key_of_a_recipe_is_read_somewhere(recipe: str) -> None:
    classes = set(settings_classes(load_recipe(recipe, ["run.seed=0"])))
    assert len(classes) > 8
    unread = [f"{cls.__name__}.{f.name}" for cls in classes for f in dataclasses.fields(cls) if f.name not in READ]
    assert set(unread) <= REFUSED


def test_a_key_that_nothing_reads_would_be_found() -> None:
    tree = ast.parse("class A:\n    x: int\n    y: int\n    def __post_init__(self):\n        assert self.x\nA.y")
    assert reads(tree) == {"y"}


def start(output: Path, name: str, *more: str, kind: str = "sft") -> Path:
    """A run of two steps as a person starts it; its folder."""
    small = [word for word in overrides(kind, output, steps=2) if not word.startswith(("run.seed=", "run.name="))]
    assert cli.main(["train", RECIPES[kind][0], *small, f"run.name={name}", *more]) == 0
    return output / name


def recorded(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.parametrize("kind", ["flow_grpo", "sft"])
def test_runs_without_a_seed_draw_their_own_and_write_it_down_where_it_is_used(kind: str, tmp_path: Path) -> None:
    one, two = (recorded(start(tmp_path, name, kind=kind)) for name in ("one", "two"))
    assert type(one["run"]["seed"]) is int
    assert one["run"]["seed"] != two["run"]["seed"]
    for config in (one, two):
        assert config["sampling"]["seed"] == config["run"]["seed"]
    if kind == "sft":
        assert one["algorithm"]["seed"] == one["run"]["seed"]


def test_the_same_command_goes_on_with_the_seed_that_was_drawn(tmp_path: Path) -> None:
    run = start(tmp_path / "continued", "run")
    seed = recorded(run)["run"]["seed"]
    start(tmp_path / "continued", "run", "run.steps=4")
    assert recorded(run)["run"]["seed"] == seed
    start(tmp_path / "straight", "run", "run.steps=4", f"run.seed={seed}", "eval.every=1")
    start(tmp_path / "other", "run", "run.steps=4", f"run.seed={seed + 1}")
    assert_same(state(tmp_path / "continued"), state(tmp_path / "straight"))
    losses = {name: [line["train/loss"] for line in metrics(tmp_path / name)[1:]] for name in ("straight", "other")}
    assert len(losses["straight"]) == 4
    assert not set(losses["straight"]) & set(losses["other"])


def test_zero_is_a_seed_like_any_other(tmp_path: Path) -> None:
    runs = [start(tmp_path / str(number), "run", f"run.seed={seed}") for number, seed in enumerate((0, 0, 17))]
    assert [recorded(run)["run"]["seed"] for run in runs] == [0, 0, 17]
    assert metrics(tmp_path / "0") == metrics(tmp_path / "1") != metrics(tmp_path / "2")


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_a_recipe_means_the_same_with_each_section_as_data_or_already_built(recipe: str) -> None:
    config = load_recipe(recipe, ["run.seed=0"])
    plain = dump(config)
    for section, built in vars(config).items():
        assert load(type(config), {**plain, section: built}) == config
