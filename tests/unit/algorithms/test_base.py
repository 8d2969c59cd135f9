from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.tiny_policy import Slope, context, policy, rows_of
from unirl.algorithms.base import Progress
from unirl.types.metric import Metric, maximum, mean, merge


def gradient(steps: int, replay_batch: int | None, terms: int) -> tuple[float, Metric]:
    """The gradient of every weight, and the reported loss."""
    backend, algorithm, part = policy(), Slope(steps=steps), rows_of([2.0, 4.0])
    own = dataclasses.replace(context(backend), replay_batch=replay_batch)
    anchors = algorithm.frozen_anchors(own, part)
    assert len(anchors) == math.ceil(steps / (replay_batch or steps))
    report = algorithm.backward(own, part, anchors, terms=terms)
    found = {w.grad[(0,) * w.ndim].item() for w in backend.stage.bundle.transformer.parameters() if w.grad is not None}
    assert len(found) == 1
    return found.pop(), report["train/loss"]


@pytest.mark.parametrize("replay_batch", [None, 1, 2, 3, 4, 10])
def test_cutting_the_steps_into_forwards_changes_neither_gradient_nor_report(replay_batch: int | None) -> None:
    found, report = gradient(4, replay_batch, terms=8)
    assert found == pytest.approx(3.0, rel=1e-6)
    assert report == Metric(3.0, 8.0, "mean")


def test_the_sum_is_divided_by_the_terms_of_the_whole_step() -> None:
    """Two rows of three terms each in a step of twelve: (2 + 4) x 3 / 12."""
    assert gradient(3, None, terms=12)[0] == pytest.approx(1.5, rel=1e-6)


def test_anchors_of_another_cut_are_refused() -> None:
    backend, part = policy(), rows_of([1.0])
    with pytest.raises(ValueError, match="zip"):
        Slope(steps=4).backward(dataclasses.replace(context(backend), replay_batch=2), part, [None], terms=4)


def test_no_graph_is_kept_for_pi_old() -> None:
    seen = []

    class Recording(Slope):
        def anchors(self, context: object, part: object, columns: slice) -> None:
            seen.append((columns, torch.is_grad_enabled()))

    Recording(steps=5).frozen_anchors(dataclasses.replace(context(policy()), replay_batch=2), rows_of([1.0]))
    assert seen == [(slice(0, 2), False), (slice(2, 4), False), (slice(4, 5), False)]


@pytest.mark.parametrize(("step", "total", "fraction"), [(0, 10, 0.0), (5, 10, 0.5), (9, 10, 0.9), (0, 0, 0.0)])
def test_progress_counts_from_0_towards_1(step: int, total: int, fraction: float) -> None:
    assert Progress(step, total).fraction == fraction


def test_reports_merge_by_their_terms_and_maxima_stay_maxima() -> None:
    merged = merge([{"clip": mean(0.25, 12), "top": maximum(1.0)}, {"clip": mean(0.75, 4), "top": maximum(3.0)}])
    assert merged == {"clip": Metric(0.375, 16.0, "mean"), "top": maximum(3.0)}
