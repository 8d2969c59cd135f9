"""EMA decays and shadow values: diffusers, Flow-GRPO, DiffusionNFT, UniRL 0.2.0, Flow-Factory (file 40)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from unirl.train.ema import EMA, Shadow

CASES = load("40_ema")
# Ours for each case, and the update count that the authors' code passes at its k-th update.
OURS: dict[str, tuple[EMA, Iterable[int]]] = {
    "flow_grpo_decay0.9_interval1": (EMA(0.9), range(12)),
    "nft_decay0.9_interval1": (EMA(0.9), range(12)),
    "nft_decay0.9999_interval1": (EMA(0.9999), range(12)),
    "nft_old_policy_decay_type_1": (EMA(0.5, warmup="linear", warmup_steps=0), range(0, 240, 20)),
    "nft_old_policy_decay_type_2": (EMA(0.999, warmup="linear", warmup_steps=75, slope=0.0075), range(0, 240, 20)),
    "unirl_constant_default": (EMA(0.001, warmup="constant"), range(0, 240, 20)),
    "unirl_linear": (EMA(0.5, warmup="linear", warmup_steps=0), range(0, 240, 20)),
    "unirl_warmup_nft2": (EMA(0.999, warmup="linear", warmup_steps=75, slope=0.0075), range(0, 240, 20)),
    "unirl_full_0.9999": (EMA(0.9999), range(0, 240, 20)),
    "flow_factory_constant": (EMA(0.999, warmup="constant"), range(12)),
    "flow_factory_power_10": (EMA(0.999), range(12)),
}
DIFFUSERS = {"diffusers_decay0.9999": EMA(0.9999), "diffusers_decay0.9": EMA(0.9)}
INTERVAL = ("flow_grpo_decay0.9_interval8", "nft_decay0.9_interval8")
WITHOUT_COUNTERPART = {
    "diffusers_decay0.999_min_decay0.5": "a lower bound on the decay",
    "diffusers_decay0.9999_update_after_step5": "copies during the first steps",
    "flow_factory_linear": "a linear decay that starts above 0",
    "flow_factory_cosine": "a cosine decay",
    "flow_factory_warmup_cosine": "a cosine decay",
}


def test_every_case_is_tested_or_listed() -> None:
    assert_covered("40_ema", [*OURS, *DIFFUSERS, *INTERVAL], WITHOUT_COUNTERPART)


def shadow_values(case: Case, decays: list[float | None]) -> torch.Tensor:
    """The shadow after each call of our update with these decays (None: no update), along the case's live values."""
    live = torch.nn.Parameter(torch.tensor([0.25], dtype=torch.float64))
    shadow = Shadow({"p": live})
    seen = []
    for decay, value in zip(decays, case.raw("live"), strict=True):
        live.data.fill_(value)
        if decay is not None:
            shadow.update(decay)
        seen.append(shadow.values["p"].item())
    return torch.tensor(seen, dtype=torch.float64)


def expected_shadow(case: Case) -> torch.Tensor:
    return next(case.output(name) for name in case.outputs if name.startswith(("shadow_after", "old_after")))


@pytest.mark.parametrize("name", OURS)
def test_decay_and_shadow(name: str) -> None:
    case, (ema, counts) = CASES[name], OURS[name]
    decays = torch.tensor([ema.decay_at(step) for step in case.raw("steps")], dtype=torch.float64)
    torch.testing.assert_close(decays, case.output("decay_at_steps"), rtol=1e-12, atol=1e-15)
    values = shadow_values(case, [ema.decay_at(count) for count in counts])
    torch.testing.assert_close(values, expected_shadow(case), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers_copies_at_its_first_update_where_ours_starts_at_a_tenth(name: str) -> None:
    """Its count is one behind: step s has our decay at s - 1, and steps 0 and 1 have decay 0."""
    case, ema = CASES[name], DIFFUSERS[name]
    steps, theirs = case.raw("steps"), case.output("decay_at_steps")
    assert theirs[:2].tolist() == [0, 0]
    assert ema.decay_at(0) == pytest.approx(0.1)
    shifted = torch.tensor([ema.decay_at(step - 1) for step in steps[2:]], dtype=torch.float64)
    torch.testing.assert_close(shifted, theirs[2:], rtol=1e-12, atol=0)
    values = shadow_values(case, [0.0, *(ema.decay_at(count) for count in range(1, 12))])
    torch.testing.assert_close(values, expected_shadow(case), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", INTERVAL)
def test_an_interval_is_an_update_at_every_eighth_step_with_the_decay_of_that_step(name: str) -> None:
    case, ema = CASES[name], EMA(0.9)
    decays = torch.tensor([ema.decay_at(step) for step in case.raw("steps")], dtype=torch.float64)
    torch.testing.assert_close(decays, case.output("decay_at_steps"), rtol=1e-12, atol=0)
    calls = [ema.decay_at(step) if (step + 1) % case.raw("update_step_interval") == 0 else None for step in range(12)]
    torch.testing.assert_close(shadow_values(case, calls), expected_shadow(case), rtol=1e-12, atol=1e-14)
