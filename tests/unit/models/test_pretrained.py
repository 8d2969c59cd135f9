"""What families ask of a published pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from unirl.models.pretrained import check_checkpoint, check_euler, check_size, ragged_embedding, static_shift
from unirl.types.sampling import DiffusionSamplingParams

EULER = "FlowMatchEulerDiscreteScheduler"


def sized(height: int, width: int) -> DiffusionSamplingParams:
    return DiffusionSamplingParams(steps=4, height=height, width=width)


def test_a_hub_id_is_taken_at_its_word_and_a_path_that_is_not_there_is_not(tmp_path: Path) -> None:
    check_checkpoint("owner/some-model_2.0", "SanaPipeline")
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        check_checkpoint(str(tmp_path / "nothing" / "here"), "SanaPipeline")


def test_a_folder_must_hold_the_familys_pipeline(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        check_checkpoint(str(tmp_path), "SanaPipeline")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="holds a FluxPipeline, this family is SanaPipeline"):
        check_checkpoint(str(tmp_path), "SanaPipeline")
    check_checkpoint(str(tmp_path), "FluxPipeline")


def test_the_shift_of_an_euler_scheduler_is_its_own_and_any_other_table_is_refused() -> None:
    assert static_shift({**FlowMatchEulerDiscreteScheduler(shift=6.0).config, "_class_name": EULER}) == 6.0
    with pytest.raises(ValueError, match="use_dynamic_shifting"):
        static_shift({**FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config, "_class_name": EULER})
    with pytest.raises(ValueError, match="the checkpoint has UniPC"):
        static_shift({**UniPCMultistepScheduler().config, "_class_name": "UniPCMultistepScheduler"})


def test_a_dynamic_shift_must_have_the_form_that_the_family_computes() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear")
    config = {**scheduler.config, "_class_name": EULER}
    check_euler(config, "use_dynamic_shifting", time_shift="linear")
    with pytest.raises(ValueError, match="shift is exponential, the checkpoint has 'linear'"):
        check_euler(config, "use_dynamic_shifting")


def test_the_nearest_size_is_named() -> None:
    check_size(sized(64, 4096), 32)
    check_size(sized(64, 128), 32, largest=4)
    with pytest.raises(ValueError, match="the nearest is 64 x 32"):
        check_size(sized(65, 1), 32)
    with pytest.raises(ValueError, match="up to 128, asked for 64 x 4096; the nearest is 64 x 128"):
        check_size(sized(64, 4096), 32, largest=4)


def test_ragged_rows_keep_what_is_theirs() -> None:
    rows = [torch.ones(2, 3), 2 * torch.ones(4, 3)]
    embedding = ragged_embedding(rows)
    assert embedding.mask is not None
    assert embedding.mask.tolist() == [[True, True, False, False], [True] * 4]
    for row, tokens, mask in zip(rows, embedding.tokens, embedding.mask, strict=True):
        assert torch.equal(tokens[mask], row)
        assert not tokens[~mask].any()
