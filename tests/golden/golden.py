"""Reads the golden vectors of `data/`: cases by name, tensors by name, and a check that no case is forgotten."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_DATA = Path(__file__).parent / "data"
_SHARED = "shared_inputs."


@dataclasses.dataclass(frozen=True)
class Case:
    """What one call of the authors' code was given and returned; `shared` are the inputs that its file names once."""

    name: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    float32: dict[str, Any]
    shared: dict[str, Any]

    def input(self, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """An input of the case, or else of the file."""
        return tensor(self.raw(name), dtype)

    def raw(self, name: str) -> Any:
        """The same as plain JSON."""
        value = self.inputs[name] if name in self.inputs else self.shared[name]
        if isinstance(value, str) and value.startswith(_SHARED):
            return self.shared[value.removeprefix(_SHARED)]
        return value

    def output(self, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """An output of the authors' code, or the right number beside it."""
        return tensor(self.outputs[name], dtype)


@functools.cache
def load(name: str) -> dict[str, Case]:
    """The cases of `data/<name>.json`, by name."""
    content = json.loads((_DATA / f"{name}.json").read_text())
    cases = [
        Case(
            name=case["name"],
            inputs=case["inputs"],
            outputs=case["outputs"],
            float32=case.get("float32", {}),
            shared=content.get("shared_inputs", {}),
        )
        for case in content["cases"]
    ]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), f"{name}.json names a case twice"
    return by_name


def tensor(value: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Nested lists of numbers (and of "nan", "inf", "-inf") as a tensor."""
    return torch.tensor(_numbers(value), dtype=dtype)


def assert_covered(name: str, tested: Iterable[str], without_counterpart: dict[str, str]) -> None:
    """Every case of the file is tested, or stands with a reason in the table of those that have no counterpart here."""
    tested = set(tested)
    assert not tested & set(without_counterpart), (
        f"{name}: tested and listed: {sorted(tested & set(without_counterpart))}"
    )
    assert tested | set(without_counterpart) == set(load(name)), (
        f"{name}: {sorted(set(load(name)) ^ (tested | set(without_counterpart)))}"
    )


def _numbers(value: Any) -> Any:
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)
