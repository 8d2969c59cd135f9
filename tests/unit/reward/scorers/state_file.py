"""Weights of a scorer in one file: written by name, and refused where they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unirl.reward.model_scorer import ModelScorer


def write_state(file: Path, state: Mapping[str, torch.Tensor]) -> None:
    """`state` as `file`, tied weights twice."""
    save_file({name: value.clone() for name, value in state.items()}, file)


def assert_refused(
    scorer: ModelScorer, file: Path, state: Mapping[str, torch.Tensor], changes: Mapping[str, tuple[torch.Tensor, str]]
) -> None:
    """The scorer, which reads `file`, refuses `state` with each of these weights in its place, with that message."""
    for name, (value, message) in changes.items():
        write_state(file, {**state, name: value})
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(scorer, batch_size=2).prepare()
