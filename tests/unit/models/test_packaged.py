"""Checkpoints that a package carries."""

from __future__ import annotations

import pytest

from unirl.models.language.packaged import from_package


@pytest.mark.parametrize("checkpoint", ["Qwen/Qwen3-8B", "/data/checkpoints/mine", "HuggingFaceTB/SmolLM2-360M"])
def test_what_no_package_carries_stays_what_it_was(checkpoint: str) -> None:
    assert from_package(checkpoint) == checkpoint
