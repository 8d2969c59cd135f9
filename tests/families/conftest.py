"""Every family's tiny checkpoint, written once a session."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from tests.families import cases
from tests.families.case import Case

MODULES = [importlib.import_module(f"{cases.__name__}.{found.name}") for found in pkgutil.iter_modules(cases.__path__)]
ALL: list[Case] = [case for module in MODULES for case in module.CASES]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture(params=ALL, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def checkpoint(case: Case, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if case.name not in checkpoints:
        checkpoints[case.name] = case.write(tmp_path_factory.mktemp(case.name.replace(" ", "-")) / "model")
    return checkpoints[case.name]
