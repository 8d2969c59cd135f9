"""Dotted names of a recipe's leaves."""

from __future__ import annotations

from unirl.observability.flatten import flatten


def test_leaves_get_dotted_names_and_lists_stay_whole() -> None:
    tree = {"run": {"steps": 80, "seed": None}, "data": {"prompts": {"rows": [1, 2]}}, "logging": {}}
    assert flatten(tree) == {"run.steps": 80, "run.seed": None, "data.prompts.rows": [1, 2], "logging": {}}
