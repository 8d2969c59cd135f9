from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.settings import HERE, First, Run, TinyConfig, Window
from unirl import cli
from unirl.config.error import ConfigError
from unirl.config.recipes import DOMAINS
from unirl.config.run import load_recipe, load_run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe file of a domain whose config class is `TinyConfig`; its folder is the working directory."""
    monkeypatch.setitem(DOMAINS, "tiny", f"{HERE}.TinyConfig")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "domain: tiny\nrun: {name: x, steps: 3, seed: null}\n"
        f"rule: {{_target_: {HERE}.Window, size: '${{run.steps}}'}}\n"
    )
    return "mine.yaml"


def test_a_recipe_loads_into_the_class_of_its_domain(recipe: str) -> None:
    loaded = load_recipe(recipe, ["run.seed=0", "run.steps=4"], "tiny")
    assert loaded == TinyConfig(domain="tiny", run=Run(name="x", steps=4, seed=0), rule=Window(size=4))


def test_settings_that_the_recipe_does_not_mention_can_be_overridden_and_misspelt_ones_not(recipe: str) -> None:
    assert load_recipe(recipe, ["run.resume=true"]).run.resume is True
    for override in ("run.resumes=true", "+run.resumes=true", "++run.resumes=true"):
        with pytest.raises(
            ConfigError, match=r"^run\.resumes: unknown key of Run \(got True \(bool\)\); did you mean resume\?"
        ):
            load_recipe(recipe, [override])


def test_a_recipe_of_another_domain_is_refused_with_the_right_command(recipe: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, ["run.name=a b"], "diffusion")
    assert caught.value.problems == (
        "recipe mine.yaml is of domain tiny, not diffusion; run `python -m unirl.train_tiny mine.yaml 'run.name=a b'`",
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("domain=tinny", "recipe mine.yaml: domain: unknown value 'tinny' (str); did you mean tiny?"),
        ("domain=[tiny]", "recipe mine.yaml: domain: unknown value ['tiny'] (list);"),
        ("domain=null", "recipe mine.yaml: domain: unknown value null;"),
        ("~domain", "recipe mine.yaml: domain: missing; give one of ar, diffusion, sft, tiny"),
    ],
)
def test_a_recipe_must_say_its_domain(recipe: str, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert str(caught.value).startswith(told)


def test_a_command_line_with_a_mistake_ends_with_code_2_and_names_it(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unirl.config.run.prepare_process", lambda: None)  # it would change the process of all tests
    with pytest.raises(SystemExit) as ended:
        load_run("tiny", [recipe, "run.steps=many", "rule.moves=1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: run.steps: expected an int, got 'many' (str); write a whole number such as 10",
        "error: rule.moves: unknown key of Window (got 1 (int)); did you mean move? known: size, move",
        "error: rule.size: expected an int, got 'many' (str); write a whole number such as 10",
    ]
    assert load_run("tiny", [recipe, f"rule={{_target_: {HERE}.First}}", "~rule.size"]).rule == First()


def test_recipes_lists_what_is_shipped_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(line.split()[0] for line in listed)
    assert any(line.startswith("diffusion/digits ") and "Flow-GRPO" in line for line in listed)
    assert cli.main(["recipes", "diffusion/digits"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("domain: diffusion\n")
    assert "seed: ${run.seed}" in shown


def test_an_unknown_recipe_or_command_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "diffusion/digit"]) == 2
    assert capsys.readouterr().err.startswith("error: recipe diffusion/digit: not a shipped one")
    with pytest.raises(SystemExit) as ended:
        cli.main(["chekc"])
    assert ended.value.code == 2
