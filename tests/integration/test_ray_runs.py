"""Every trainer on two ranks with sharded weights writes the figures of a run of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import RECIPES, metrics, overrides
from tests.ray_cluster import start_transfer_queue
from unirl.config.run import load_recipe
from unirl.trainer.domains import trainer_of

pytestmark = pytest.mark.ray

TWO = "placement={launcher: ray, device: cpu, devices: 2, deadline: 200}"


def fit(kind: str, output: Path, *settings: str, steps: int = 4) -> None:
    trainer_of(load_recipe(RECIPES[kind][0], [*overrides(kind, output, steps=steps), *settings])).fit()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("flow_grpo_lora", ()),
        ("flow_grpo", ("data.prompts_per_chunk=1",)),
        ("sft", ()),
        ("text_sft", ()),
        ("ar", ()),
    ],
    ids=["flow_grpo_lora", "flow_grpo in chunks", "sft", "text_sft", "ar"],
)
def test_two_ranks_write_the_figures_of_one_process(
    kind: str, settings: tuple[str, ...], ray: None, tmp_path: Path
) -> None:
    """settings: of the two ranks alone"""
    fit(kind, tmp_path / "one")
    fit(kind, tmp_path / "two", TWO, *settings)
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        known = {name: value for name, value in one.items() if value is not None}
        assert two.keys() == one.keys()
        assert {name: two[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["direct", "transfer_queue"])
def test_what_carries_rows_changes_no_figure(transport: str, ray: None, tmp_path: Path) -> None:
    if transport == "transfer_queue":
        start_transfer_queue()
    fit("flow_grpo", tmp_path / "store", TWO)
    fit("flow_grpo", tmp_path / "other", TWO, f"placement.transport={transport}")
    assert metrics(tmp_path / "other") == metrics(tmp_path / "store")


@pytest.mark.timeout(600)
def test_a_run_that_was_saved_on_two_ranks_goes_on_with_one(ray: None, tmp_path: Path) -> None:
    fit("ar", tmp_path / "one", steps=6)
    fit("ar", tmp_path / "moved", TWO, "eval.every=3", steps=4)
    fit("ar", tmp_path / "moved", steps=6)
    for moved, one in zip(metrics(tmp_path / "moved"), metrics(tmp_path / "one"), strict=True):
        known = {name: value for name, value in one.items() if value is not None}
        assert {name: moved[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-5)
