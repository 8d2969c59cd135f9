"""Each model, written and loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.models.vision_language.tiny import NAMES, Loaded, loaded
from unirl.models.random_weights.folders import find


@pytest.fixture(scope="package", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find(request.param).write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="package")
def model(checkpoint: Path) -> Loaded:
    """For tests that leave it as it is."""
    return loaded(checkpoint)
