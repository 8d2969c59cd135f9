"""What families ask of a published pipeline."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from unirl.models.pretrained import check_checkpoint, check_euler, euler_sigmas, flow_shift, ragged_embedding
from unirl.sde.schedule import uniform_sigmas

EULER = "FlowMatchEulerDiscreteScheduler"


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


def test_a_scheduler_that_makes_another_table_is_refused() -> None:
    check_euler({**FlowMatchEulerDiscreteScheduler(shift=6.0).config, "_class_name": EULER})
    with pytest.raises(ValueError, match="use_dynamic_shifting"):
        check_euler({**FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config, "_class_name": EULER})
    with pytest.raises(ValueError, match="the checkpoint has UniPC"):
        check_euler({**UniPCMultistepScheduler().config, "_class_name": "UniPCMultistepScheduler"})


def test_the_shift_of_a_flow_goes_by_another_name_in_other_schedulers() -> None:
    assert flow_shift({"_class_name": EULER, "shift": 6.0}) == 6.0
    assert flow_shift({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}) == 3.0
    with pytest.raises(ValueError, match="the checkpoint has SCMScheduler"):
        flow_shift({"_class_name": "SCMScheduler"})


@pytest.mark.parametrize("shift", [None, 3.0])
@pytest.mark.parametrize("terminal", [None, 0.1])
def test_a_dynamic_table_is_the_schedulers_own(shift: float | None, terminal: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.register_to_config(shift_terminal=terminal)
    config = {**scheduler.config, "_class_name": EULER}
    # 2176 tokens are halfway from 256 (mu = 0.5) to 4096 (mu = 1.15).
    mu = 0.825 if shift is None else math.log(shift)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
    sigmas = euler_sigmas(config, uniform_sigmas(4), 2176, shift)
    assert scheduler.sigmas is not None
    torch.testing.assert_close(sigmas.float(), scheduler.sigmas[:-1], rtol=0, atol=1e-6)


def test_a_dynamic_shift_must_have_the_form_that_the_family_computes() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear")
    config = {**scheduler.config, "_class_name": EULER}
    check_euler(config, "use_dynamic_shifting", time_shift="linear")
    with pytest.raises(ValueError, match="shift is exponential, the checkpoint has 'linear'"):
        check_euler(config, "use_dynamic_shifting")


def test_ragged_rows_keep_what_is_theirs() -> None:
    rows = [torch.ones(2, 3), 2 * torch.ones(4, 3)]
    embedding = ragged_embedding(rows)
    assert embedding.mask is not None
    assert embedding.mask.tolist() == [[True, True, False, False], [True] * 4]
    for row, tokens, mask in zip(rows, embedding.tokens, embedding.mask, strict=True):
        assert torch.equal(tokens[mask], row)
        assert not tokens[~mask].any()
