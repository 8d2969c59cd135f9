from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.unit.config.settings import HERE, Config, First, Lora, Optimizer, Rule, Run, Scorer, SlowWindow, Window, full
from unirl.config.error import ConfigError
from unirl.config.load import dump, load
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import WindowSteps

WANTED = Config(
    run=Run(name="x", steps=10, seed=0, resume=True, output=Path("out")),
    optimizer=Optimizer(lr=1.0, betas=(0.9, 1.0), sharding="no_shard", lora=Lora(rank=8, targets=("to_q", "to_k"))),
    rule=Window(size=4),
    scorers={"a": Scorer(rule=First(), weight=2.0)},
    warmup=3,
    rules=(First(), SlowWindow(size=2)),
    extra={"anything": [1, None]},
)


def changed(path: str, value: Any, data: Any = None) -> Any:
    """`full()` with the value at a dotted path replaced; a list is reached by its index."""
    data = copy.deepcopy(full() if data is None else data)
    *sections, last = path.split(".")
    node = data
    for key in sections:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[int(last) if isinstance(node, list) else last] = value
    return data


def problems(data: Any, cls: type = Config) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(cls, data)
    return caught.value.problems


def test_every_kind_of_field_is_parsed() -> None:
    loaded = load(Config, full())
    assert loaded == WANTED
    assert type(loaded.optimizer.lr) is float
    assert [type(beta) for beta in loaded.optimizer.betas] == [float, float]


def test_what_is_left_out_takes_the_default() -> None:
    loaded = load(Config, {"run": {"name": "x", "steps": 1}, "optimizer": {"lr": 0.1}})
    assert loaded == Config(run=Run(name="x", steps=1), optimizer=Optimizer(lr=0.1))
    assert loaded.warmup == "auto"
    assert loaded.run.seed is None


def test_a_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert load(Config, changed("run.output", "~/runs")).run.output == Path("/somebody/runs")


def test_null_turns_an_optional_section_off_and_an_empty_one_takes_defaults() -> None:
    assert load(Config, changed("optimizer.lora", None)).optimizer.lora is None
    assert load(Config, changed("optimizer.lora", {})).optimizer.lora == Lora()


@pytest.mark.parametrize("section", ["run", "optimizer", "optimizer.lora", "rule", "scorers.a", "scorers", "rules.1"])
def test_a_section_may_be_a_dict_a_dictconfig_or_a_dataclass(section: str) -> None:
    node: Any = full()
    built: Any = WANTED
    for key in section.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
        built = (
            built[int(key)]
            if isinstance(built, tuple)
            else built[key]
            if isinstance(built, dict)
            else getattr(built, key)
        )
    assert load(Config, changed(section, OmegaConf.create(node))) == WANTED
    assert load(Config, changed(section, built)) == WANTED


def test_a_whole_dictconfig_loads_like_a_dict_and_its_interpolations_are_followed() -> None:
    assert load(Config, OmegaConf.create(full())) == WANTED
    assert load(Config, OmegaConf.create(changed("warmup", "${run.steps}"))).warmup == 10


@pytest.mark.parametrize(
    ("section", "key", "known"),
    [
        ("", "optimiser", "optimizer"),
        ("run", "step", "steps"),
        ("optimizer", "learning", "lr"),
        ("optimizer", "beta", "betas"),
        ("optimizer.lora", "ranks", "rank"),
        ("rule", "mover", "move"),
        ("scorers.a", "weigth", "weight"),
        ("scorers.a.rule", "counts", "count"),
        ("rules.1", "stray", "stay"),
    ],
)
def test_a_misspelt_key_is_refused_at_every_level_with_the_known_ones(section: str, key: str, known: str) -> None:
    path = f"{section}.{key}" if section else key
    [problem] = problems(changed(path, 17))
    assert problem.startswith(f"{path}: unknown key of ")
    assert "(got 17 (int))" in problem
    assert known in problem.partition(";")[2]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("run.steps", "10", "expected an int, got '10' (str)"),
        ("run.steps", 10.0, "expected an int, got 10.0 (float)"),
        ("run.steps", True, "expected an int, got True (bool)"),
        ("run.steps", None, "expected an int, got null"),
        ("run.steps", [1], "expected an int, got [1] (list)"),
        ("run.seed", "none", "expected an int, got 'none' (str)"),
        ("run.name", 7, "expected text, got 7 (int)"),
        ("run.name", False, "expected text, got False (bool)"),
        ("run.resume", 1, "expected true or false, got 1 (int)"),
        ("run.resume", "yes", "expected true or false, got 'yes' (str)"),
        ("run.output", 3, "expected a path, got 3 (int)"),
        ("run.output", "", "expected a path, got '' (str)"),
        ("optimizer.lr", "1e-4", "expected a number, got '1e-4' (str)"),
        ("optimizer.lr", False, "expected a number, got False (bool)"),
        ("optimizer.lr", 10**400, "is not a finite number"),
        ("optimizer.betas", [0.9], "expected 2 values, got 1: [0.9] (list)"),
        ("optimizer.betas", 0.9, "expected a list of 2, got 0.9 (float)"),
        ("optimizer.betas.1", "a", "expected a number, got 'a' (str)"),
        ("optimizer.lora", True, "expected a section of Lora, got True (bool)"),
        ("optimizer.lora.targets", "to_q", "expected a list of text, got 'to_q' (str)"),
        ("optimizer.lora.targets.1", 2, "expected text, got 2 (int)"),
        ("optimizer", None, "expected a section of Optimizer, got null"),
        ("optimizer", Lora(), "expected a section of Optimizer, got Lora(rank=32"),
        ("scorers", ["a"], "expected a mapping of names to a section of Scorer, got ['a'] (list)"),
        ("warmup", "never", "expected an int or one of auto, got 'never' (str)"),
        ("rules", {"a": 1}, "expected a list of a section of Rule, got {'a': 1} (dict)"),
    ],
)
def test_a_wrong_type_is_refused_with_the_value_received(path: str, value: Any, told: str) -> None:
    [problem] = problems(changed(path, value))
    assert problem.startswith(f"{path}: ")
    assert told in problem


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_must_be_finite(value: float) -> None:
    [problem] = problems(changed("optimizer.lr", value))
    assert problem.startswith(f"optimizer.lr: {value} is not a finite number")


def test_an_unknown_choice_is_refused_with_the_nearest_and_all_allowed_ones() -> None:
    [problem] = problems(changed("optimizer.sharding", "no-shard"))
    assert problem == (
        "optimizer.sharding: unknown value 'no-shard' (str); did you mean no_shard? known: full, no_shard"
    )
    [problem] = problems(changed("optimizer.sharding", None))
    assert problem == "optimizer.sharding: unknown value null; known: full, no_shard"


def test_true_is_no_choice_of_an_integer_literal() -> None:
    fields = dataclasses.make_dataclass("Bits", [("bits", Literal[1, 8])])
    assert load(fields, {"bits": 8}).bits == 8
    [problem] = problems({"bits": True}, fields)
    assert "True (bool)" in problem


def test_missing_values_are_named_with_what_they_should_be() -> None:
    data = full()
    del data["run"]["steps"], data["optimizer"]
    assert problems(data) == (
        "optimizer: missing; give a section of Optimizer",
        "run.steps: missing; give an int",
    )
    assert problems(changed("optimizer.lr", "???")) == ("optimizer.lr: missing; give a number",)


def test_all_problems_are_reported_at_once() -> None:
    data = changed("optimizer.lr", math.nan)
    data = changed("run.step", 3, changed("run.steps", "many", data))
    data = changed("scorers.a.rule._target_", f"{HERE}.Frist", changed("rules.1.size", 0, data))
    found = problems(data)
    assert [problem.partition(":")[0] for problem in found] == [
        "run.step",
        "run.steps",
        "optimizer.lr",
        "scorers.a.rule._target_",
        "rules.1",
    ]
    with pytest.raises(ConfigError) as caught:
        load(Config, data)
    assert str(caught.value) == "\n".join(found)
    assert caught.value.report().count("error: ") == 5


def test_a_refusal_of_post_init_carries_the_path_of_its_section() -> None:
    assert problems(changed("rule.size", 0)) == ("rule: size must be at least 1, got 0",)
    assert problems(changed("optimizer.lr", -1.5)) == ("optimizer: lr must be positive, got -1.5",)
    assert problems(changed("warmup", 11)) == ("warmup of 11 steps does not fit a run of 10; lower it",)
    with pytest.raises(ConfigError, match=r"^train\.rule: size must be at least 1, got -3$"):
        load(Window, {"size": -3}, path="train.rule")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (f"{HERE}.Widnow", f"module {HERE} has no class 'Widnow'; did you mean Window"),
        (
            f"{HERE[:-9]}.setting.Window",
            "package tests.unit.config has no module 'setting'; did you mean settings? known: ",
        ),
        (f"{HERE}.Window.size", f"package {HERE} has no module 'Window'; known: none"),
        ("not_installed_here.Window", "there is no module 'not_installed_here'"),
        (f"{HERE}.Lora", f"{HERE}.Lora is not a Rule; name a subclass of {HERE}.Rule"),
        (f"{HERE}.full", f"{HERE}.full is not a Rule"),
        (f"{HERE}.Rule", f"{HERE}.Rule is abstract; name a concrete Rule"),
        (f"{HERE}.Unsettled", f"{HERE}.Unsettled has no settings; make it a dataclass"),
        ("Window", "expected module.Class, got 'Window' (str); name a Rule"),
        (".settings.Window", "expected module.Class, got '.settings.Window' (str)"),
        ("a..b", "expected module.Class, got 'a..b' (str)"),
        ("", "expected module.Class, got '' (str)"),
        (5, "expected module.Class, got 5 (int)"),
        (None, "expected module.Class, got null"),
    ],
)
def test_a_target_must_name_a_class_of_the_right_kind(target: Any, told: str) -> None:
    [problem] = problems(changed("rule._target_", target))
    assert problem.startswith("rule._target_: ")
    assert told in problem


def test_a_target_in_a_module_that_fails_or_lacks_a_package_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    (tmp_path / "broken.py").write_text("from dataclasses import no_such_name\n")
    (tmp_path / "raising.py").write_text("limit = 3\nlimit / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = problems(changed("rule._target_", "raising.Window"))
    place = f"{tmp_path}/raising.py:2"
    assert problem == f"rule._target_: cannot import raising: {place}: ZeroDivisionError: division by zero"
    [problem] = problems(changed("rule._target_", "needy.Window"))
    assert "cannot import needy (No module named 'surely_not_installed'); install the package" in problem
    [problem] = problems(changed("rule._target_", "broken.Window"))
    assert "cannot import broken (cannot import name 'no_such_name'" in problem


def test_a_base_class_needs_a_target() -> None:
    [problem] = problems(changed("rule", {"size": 3}))
    assert problem == f"rule: missing _target_ (got {{'size': 3}} (dict)); name a subclass of {HERE}.Rule"


def test_a_target_may_refine_a_concrete_class_and_then_has_its_fields() -> None:
    assert load(Window, {"_target_": f"{HERE}.SlowWindow", "size": 1, "stay": 2}) == SlowWindow(size=1, stay=2)
    assert load(Window, {"_target_": f"{HERE}.Window", "size": 1}) == Window(size=1)


def test_settings_of_another_class_are_refused() -> None:
    [problem] = problems(changed("rule._target_", f"{HERE}.First"))
    assert problem == "rule.size: unknown key of First (got 4 (int)); known: count"


@pytest.mark.parametrize("data", [None, 3, "run", [1, 2]])
def test_the_root_must_be_a_mapping(data: Any) -> None:
    [problem] = problems(data)
    assert problem.startswith("expected a section of Config, got ")


def test_keys_must_be_text() -> None:
    assert problems(changed("scorers", {1: {}})) == ("scorers.1: a key must be text, got 1 (int); quote it",)
    [problem] = problems({**full(), None: 1})
    assert problem == "None: a key must be text, got null; quote it"


def test_a_field_type_outside_the_list_is_our_mistake() -> None:
    fields = dataclasses.make_dataclass("Wrong", [("items", list[int])])
    with pytest.raises(AssertionError, match="items: a setting cannot be of type"):
        load(fields, {"items": [1]})


def test_dump_gives_plain_data_that_loads_back() -> None:
    data = dump(WANTED)
    assert data["rule"] == {"_target_": f"{HERE}.Window", "size": 4, "move": "progressive"}
    assert data["optimizer"]["lora"] == {"rank": 8, "alpha": 64.0, "targets": ["to_q", "to_k"]}
    assert data["run"]["output"] == "out"
    assert OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(data)))) == data
    assert load(Config, data) == WANTED


def test_sampling_params_survive_the_round_trip_with_their_step_rule() -> None:
    params = DiffusionSamplingParams(steps=25, height=720, width=720, shift=3.0, sde=WindowSteps(size=4, overlap=3))
    data = dump(params)
    assert data["sde"]["_target_"] == "unirl.types.steps.WindowSteps"
    assert load(DiffusionSamplingParams, data) == params
    [problem] = problems({**data, "steps": 4}, DiffusionSamplingParams)
    assert "a window of 4 steps" in problem


RULES: st.SearchStrategy[Rule] = st.one_of(
    st.builds(First, count=st.integers()),
    st.builds(Window, size=st.integers(1), move=st.sampled_from(["progressive", "random"])),
    st.builds(SlowWindow, size=st.integers(1), stay=st.integers()),
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
CONFIGS = st.builds(
    Config,
    run=st.builds(
        Run, name=st.text().filter(lambda t: t != "???"), steps=st.integers(), seed=st.none() | st.integers()
    ),
    optimizer=st.builds(
        Optimizer,
        lr=st.floats(1e-300, 1e300),
        betas=st.tuples(NUMBERS, NUMBERS),
        lora=st.none() | st.builds(Lora, alpha=NUMBERS, targets=st.lists(st.sampled_from(["a", "b"])).map(tuple)),
    ),
    rule=RULES,
    scorers=st.dictionaries(st.text(), st.builds(Scorer, rule=RULES, weight=NUMBERS), max_size=3),
    warmup=st.just("auto"),
    rules=st.lists(RULES, max_size=3).map(tuple),
)


@given(CONFIGS)
def test_load_inverts_dump(config: Config) -> None:
    assert load(Config, dump(config)) == config


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("???")
TREES = st.recursive(LEAVES, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=3), x, max_size=2))


@pytest.mark.parametrize(
    "path", ["run", "run.seed", "optimizer.lora.targets", "rule._target_", "scorers", "rules.0", "warmup"]
)
@given(value=TREES)
def test_whatever_stands_in_a_recipe_loads_or_is_a_config_error(path: str, value: Any) -> None:
    found: tuple[str, ...] = ()
    try:
        load(Config, changed(path, value))
    except ConfigError as error:
        found = error.problems
    assert all(problem.startswith(path.partition(".")[0]) for problem in found)


def test_an_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a: b", "c: d")))
    assert error.problems == ("a: b", "c: d")
