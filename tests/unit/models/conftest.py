"""The tiny SD3 pipeline, written once."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.rollouts import CPU
from unirl.models.base import Bundle
from unirl.models.diffusion.sd3 import SD3
from unirl.models.random_weights.sd3 import write as write_sd3


@pytest.fixture(scope="session")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> SD3:
    folder = write_sd3(tmp_path_factory.mktemp("sd3") / "pipeline")
    return SD3(checkpoint=str(folder), max_sequence_length=48)


@pytest.fixture(scope="session")
def sd3_without_t5(tmp_path_factory: pytest.TempPathFactory) -> SD3:
    folder = write_sd3(tmp_path_factory.mktemp("sd3") / "pipeline", with_t5=False)
    return SD3(checkpoint=str(folder), t5=False, max_sequence_length=48)


@pytest.fixture
def bundle(sd3: SD3) -> Bundle:
    return sd3.load(CPU, torch.float32)
