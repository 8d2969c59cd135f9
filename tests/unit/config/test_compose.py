from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from unirl.config.compose import compose, composed_yaml, text_setting
from unirl.config.error import ConfigError
from unirl.config.recipes import entry, shipped_recipes

Write = Callable[[str], str]

PLAIN = """
domain: diffusion
run: {name: mine, seed: null, steps: 3}
sampling: {seed: "${run.seed}", steps: "${run.steps}"}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a recipe file with this text; its path."""

    def file(text: str) -> str:
        path = tmp_path / "my recipe.yaml"
        path.write_text(text)
        return str(path)

    return file


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(recipe, overrides)
    [problem] = caught.value.problems
    return problem


def test_a_file_composes_to_plain_resolved_data(write: Write) -> None:
    data = compose(write(PLAIN), ["run.seed=7"])
    assert data == {
        "domain": "diffusion",
        "run": {"name": "mine", "seed": 7, "steps": 3},
        "sampling": {"seed": 7, "steps": 3},
    }
    assert type(data["run"]) is dict


def test_overriding_the_source_changes_what_refers_to_it(write: Write) -> None:
    assert compose(write(PLAIN), ["run.steps=5", "run.seed=1"])["sampling"] == {"seed": 1, "steps": 5}
    assert compose(write(PLAIN), ["sampling.steps=9"])["run"]["steps"] == 3


def test_a_null_seed_is_drawn_and_followed_and_zero_is_a_seed(write: Write) -> None:
    recipe = write(PLAIN)
    drawn = [compose(recipe) for _ in range(4)]
    assert all(data["run"]["seed"] == data["sampling"]["seed"] for data in drawn)
    assert len({data["run"]["seed"] for data in drawn}) == 4
    assert all(0 <= data["run"]["seed"] < 2**31 for data in drawn)
    assert compose(recipe, ["run.seed=0"])["sampling"]["seed"] == 0


def test_a_run_that_is_continued_keeps_the_seed_it_drew(write: Write, tmp_path: Path) -> None:
    recipe, output = write(PLAIN), f"run.output='{tmp_path}'"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("run: {seed: 1234}\n")
    assert compose(recipe, [output])["sampling"]["seed"] == 1234
    assert compose(recipe, [output, "run.seed=7"])["sampling"]["seed"] == 7
    assert compose(recipe, [output, "run.name=another"])["sampling"]["seed"] != 1234


def test_a_seed_that_a_recipe_does_not_mention_is_drawn_too(write: Write) -> None:
    assert type(compose(write("domain: sft\nrun: {name: x}"))["run"]["seed"]) is int


@pytest.mark.parametrize(
    "text", ["a b", "a,b", "a=b", "it's", "{x}", "[1]", "~/ü", "1", "null", "a#b:c", 'say "a"', ""]
)
def test_any_text_can_be_set(text: str, write: Write) -> None:
    assert compose(write(PLAIN), [text_setting("run.name", text)])["run"]["name"] == text


def test_an_environment_variable_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRL_TEST_NAME", "from-outside")
    assert compose(write(PLAIN), ["run.name=${oc.env:UNIRL_TEST_NAME}"])["run"]["name"] == "from-outside"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("run.name=${run.nmae}", "run.name: Interpolation key 'run.nmae' not found"),
        (
            "run.name=${run.steps.deep}",
            "run.name: Error trying to access run.steps.deep: node `run.steps` is not a container",
        ),
        ("run.name=${run.name}", "run.name: Recursive interpolation detected"),
        ("run.steps=${sampling.steps}", "run.steps: Recursive interpolation detected"),
        ("run.name=${oc.env:UNIRL_NOT_SET}", "run.name: \"Environment variable 'UNIRL_NOT_SET' not found\""),
        ("run.name=${shell:ls}", "run.name: Unsupported interpolation type shell"),
        ("run.steps=[1", "override 'run.steps=[1': no viable alternative at input '[1'; write key=value"),
        ("run.steps", "override 'run.steps': "),
        ("", "override '': "),
        ("run.steps=1,2", "override 'run.steps=1,2': one run takes one value; write a list as [a,b]"),
        ("hydra.run.dir=x", "override 'hydra.run.dir=x': Hydra's own settings have no effect here"),
        ("hydra/launcher=x", "override 'hydra/launcher=x': Hydra's own settings have no effect here"),
        ("model=3", "override 'model=3': model is a group and takes the name of an option, got 3 (int)"),
        ("prompts@data.prompts=null", "prompts is a group and takes the name of an option, got null"),
        ("sampling=[1]", "Error merging override sampling=[1]; Cannot merge a mapping with a list"),
        ("sampling={}", "override 'sampling={}': mappings are merged, so it changes nothing; write ~sampling to empty"),
        ("+run.steps=4", "Could not append to config. An item is already at 'run.steps'"),
        ("~run.stepz", "Could not delete from config. 'run.stepz' does not exist"),
        ("+model=nope", "model has no option 'nope'; known: "),
    ],
)
def test_a_mistake_is_refused_with_its_reason(write: Write, override: str, told: str) -> None:
    assert told in refusal(write(PLAIN), override)


def test_a_missing_environment_variable_of_a_recipe_is_refused(write: Write) -> None:
    assert "'UNIRL_NOT_SET' not found" in refusal(write("run: {name: '${oc.env:UNIRL_NOT_SET}'}"))
    assert "'UNIRL_NOT_SET' not found" in refusal(write("run: {seed: '${oc.env:UNIRL_NOT_SET}'}"))


def test_overrides_add_and_remove_as_in_hydra_and_keep_types(write: Write) -> None:
    recipe = write(PLAIN)
    assert compose(recipe, ["run.seed=1", "+extra.new=1", "++run.steps=4", "~sampling.steps"]) | {"run": 0} == {
        "domain": "diffusion",
        "run": 0,
        "sampling": {"seed": 1},
        "extra": {"new": 1},
    }
    # a key needs no plus: which keys there are is for strict loading to say
    assert compose(recipe, ["sampler=x"])["sampler"] == "x"
    assert compose(recipe, ["x={}"])["x"] == {}
    assert compose(recipe, ["x={}", "x.a=1"])["x"] == {"a": 1}
    values = ["x.a=1e-4", "x.b=true", "x.c=null", "x.d=[1,2]", "x.e={f:1}", "x.g='3'", "x.h=no"]
    assert compose(recipe, ["+x=[1,2,3]", "x.1=9"])["x"] == [1, 9, 3]
    assert compose(recipe, values)["x"] == {
        "a": 1e-4,
        "b": True,
        "c": None,
        "d": [1, 2],
        "e": {"f": 1},
        "g": "3",
        "h": "no",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run: {name: a, name: b}", "found duplicate key name"),
        ("run:\n\tname: x", "found character '\\t' that cannot start any token"),
        ("- 1", "must be a DictConfig, got ListConfig"),
        ("defaults: [nothing_here, _self_]\nrun: {name: x}", "nothing_here"),
        ("defaults: [/diffusion/digits]\nrun: {name: x}", "Defaults list is missing `_self_`"),
        ("defaults: ['my recipe', _self_]\nrun: {name: x}", "its defaults lists include one another"),
    ],
)
def test_a_malformed_file_is_refused_with_its_reason(write: Write, text: str, told: str) -> None:
    assert told in refusal(write(text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"run: {name: \xff}")
    assert "can't decode byte 0xff" in refusal(str(tmp_path / "bytes.yaml"))


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    assert "did you mean diffusion/digits" in refusal("diffusion/digit")
    assert "there is no such file" in refusal("nowhere/mine.yaml")
    assert "rename it to mine.yaml" in refusal("mine.yml")


def test_a_file_may_refine_a_shipped_recipe_and_choose_among_the_groups(write: Write) -> None:
    shipped: Any = yaml.safe_load(composed_yaml("diffusion/sd3_flow_grpo"))
    recipe = write(
        "defaults:\n  - /diffusion/sd3_flow_grpo\n  - override /reward: digits\n  - _self_\nrun: {name: mine}\n"
    )
    mine: Any = yaml.safe_load(composed_yaml(recipe))
    assert mine["run"] == {**shipped["run"], "name": "mine"}
    assert list(mine["reward"]["scorers"]) == ["digit"]
    assert {**mine, "run": 0, "reward": 0} == {**shipped, "run": 0, "reward": 0}
    tiny: Any = yaml.safe_load(composed_yaml(recipe, ["model=tiny_sd3"]))
    assert tiny["model"] == yaml.safe_load(composed_yaml("diffusion/digits"))["model"]


def test_shown_yaml_keeps_interpolations_and_the_open_seed(write: Write) -> None:
    shown = yaml.safe_load(composed_yaml(write(PLAIN)))
    assert shown == yaml.safe_load(PLAIN)


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_every_shipped_recipe_composes_is_described_and_says_its_domain(recipe: str) -> None:
    data = compose(recipe)
    assert entry(data["domain"]) == recipe.partition("/")[0]
    assert data["run"]["name"]
    assert len(shipped_recipes()[recipe]) > 20


def test_all_shipped_recipes_have_names_of_their_own() -> None:
    names = [compose(recipe)["run"]["name"] for recipe in shipped_recipes()]
    assert len(set(names)) == len(names)
