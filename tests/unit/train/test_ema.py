from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from unirl.train.ema import EMA, Shadow


def parameters(*values: float) -> dict[str, torch.nn.Parameter]:
    return {f"p{i}": torch.nn.Parameter(torch.tensor(value)) for i, value in enumerate(values)}


def live(of: dict[str, torch.nn.Parameter]) -> list[float]:
    return [parameter.item() for parameter in of.values()]


@contextmanager
def marked(live_value: float, shadow_value: float) -> Iterator[tuple[dict[str, torch.nn.Parameter], Shadow]]:
    """A parameter of one value and a shadow of another."""
    of = parameters(shadow_value)
    shadow = Shadow(of)
    of["p0"].data.fill_(live_value)
    yield of, shadow


# Decay


@pytest.mark.parametrize(
    ("ema", "expected"),
    [
        (EMA(0.9, warmup="constant"), [0.9, 0.9, 0.9, 0.9]),
        (EMA(0.9, warmup="inverse"), [1 / 10, 2 / 11, 3 / 12, 4 / 13]),
        (EMA(0.25, warmup="inverse"), [1 / 10, 2 / 11, 0.25, 0.25]),
        (EMA(0.9, warmup="inverse", warmup_steps=1), [0.9, 0.9, 0.9, 0.9]),
        (EMA(0.9, warmup="linear", warmup_steps=0, slope=0.4), [0.0, 0.4, 0.8, 0.9]),
        (EMA(0.9, warmup="linear", warmup_steps=2, slope=0.4), [0.0, 0.0, 0.0, 0.4]),
        (EMA(0.0, warmup="constant"), [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_decay_of_the_first_updates(ema: EMA, expected: list[float]) -> None:
    assert [ema.decay_at(updates) for updates in range(4)] == pytest.approx(expected, abs=1e-15)


def test_the_default_reaches_its_decay_after_89_990_updates() -> None:
    """(1 + t) / (10 + t) >= 0.9999 from t = 89,990 on."""
    assert EMA().decay_at(89_989) < 0.9999
    assert EMA().decay_at(89_990) == 0.9999


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"decay": -0.1}, r"decay must be in \[0, 1\), got -0.1"),
        ({"warmup_steps": 0}, "at least 1 for inverse.*got 0"),
        ({"warmup": "linear", "warmup_steps": -1}, "must not be negative.*got -1"),
    ],
)
def test_settings_that_cannot_average_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EMA(**settings)


# Shadow


def test_a_slow_average_moves_in_float32() -> None:
    """1.25 - 0.25 x 0.999^1000 = 1.1580761; in bfloat16 the shadow would stay at 1."""
    with marked(live_value=1.25, shadow_value=1.0) as (_, shadow):
        for _ in range(1000):
            shadow.update(0.999)
        assert shadow.values["p0"].item() == pytest.approx(1.1580761, abs=2e-5)
        assert shadow.values["p0"].dtype == torch.float32


def test_decay_0_copies_and_keeps_no_tie_to_the_live_weights() -> None:
    with marked(live_value=1.0, shadow_value=2.0) as (of, shadow):
        shadow.update(0.0)
        of["p0"].data.fill_(5.0)
        assert shadow.values["p0"].item() == 1.0


def test_a_swap_shows_the_shadow_inside_and_the_live_weights_after_it() -> None:
    with marked(live_value=1.0, shadow_value=2.0) as (of, shadow):
        with shadow.applied():
            assert live(of) == [2.0]
        assert live(of) == [1.0]
        assert shadow.values["p0"].item() == 2.0


def test_an_exception_inside_a_swap_restores_the_live_weights() -> None:
    with marked(live_value=1.0, shadow_value=2.0) as (of, shadow):
        with pytest.raises(RuntimeError, match="rollout failed"), shadow.applied():
            raise RuntimeError("rollout failed")
        assert live(of) == [1.0]
        assert shadow.values["p0"].item() == 2.0


def test_swaps_nest_in_the_order_they_are_entered() -> None:
    of = parameters(1.0)
    first, second = Shadow(of), Shadow(of)
    first.values["p0"].fill_(2.0)
    second.values["p0"].fill_(3.0)
    with first.applied():
        with second.applied():
            assert live(of) == [3.0]
        assert live(of) == [2.0]
    assert live(of) == [1.0]
    assert [shadow.values["p0"].item() for shadow in (first, second)] == [2.0, 3.0]


def test_a_swap_changes_neither_identity_nor_requires_grad() -> None:
    with marked(live_value=1.0, shadow_value=2.0) as (of, shadow):
        before = id(of["p0"])
        with shadow.applied():
            assert (id(of["p0"]), of["p0"].requires_grad) == (before, True)
        assert (id(of["p0"]), of["p0"].requires_grad) == (before, True)
        assert not shadow.values["p0"].requires_grad


def test_a_graph_built_before_a_swap_walks_back_through_the_live_weights() -> None:
    """d(w^2)/dw = 2w at w = 3, not at the shadow's 5."""
    with marked(live_value=3.0, shadow_value=5.0) as (of, shadow):
        loss = of["p0"] ** 2
        with shadow.applied():
            pass
        loss.backward()
        assert of["p0"].grad is not None
        assert of["p0"].grad.item() == 6.0
