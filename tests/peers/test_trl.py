"""One step of TRL's GRPOTrainer and one of ours on the same completions: log-probs, entropy, loss and gradient.

TRL runs for real: it generates, scores, normalises and steps by itself. Its second and third step on a rollout are
compared: there the ratio is not 1, and some tokens are clipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.trl_run import FAMILY, SAMPLING, OptimizerStep, recorded
from tests.tiny_language_policy import language_policy
from unirl.algorithms.base import Progress
from unirl.algorithms.cispo import CISPO
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.gspo import GSPO
from unirl.algorithms.token_base import TokenAlgorithm
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, TokenGeometry
from unirl.types.metric import Metrics, values

TOLERANCE = 1e-5
Case = tuple[FSDPBackend, TokenAlgorithm, list[OptimizerStep]]
CASES: dict[str, tuple[dict[str, Any], TokenAlgorithm]] = {
    "grpo": (
        # Without its weight on k3, which makes its expected gradient that of KL(pi || ref).
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.05, "use_bias_correction_kl": False},
        GRPO(aggregation="seq-mean-token-mean", clip_low=0.2, clip_high=0.2, kl_coef=0.05, anchor="rollout"),
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.1, "scale_rewards": "none"},
        GRPO(
            aggregation="seq-mean-token-sum-norm",
            horizon=SAMPLING.max_new_tokens,
            clip_low=0.1,
            clip_high=0.1,
            anchor="rollout",
        ),
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        GRPO(aggregation="token-mean", clip_low=0.1, clip_high=0.28, anchor="rollout"),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.15, "epsilon_high": 0.2},
        GSPO(clip_low=0.15, clip_high=0.2, anchor="rollout"),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, CISPO(cap=1.1, anchor="rollout")),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    FAMILY.save(FAMILY.load(torch.device("cpu"), torch.float32), folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    settings, algorithm = CASES[request.param]
    steps = recorded(tmp_path_factory.mktemp(request.param), checkpoint, **settings)
    backend = language_policy(FAMILY, reference=algorithm.needs.reference)
    return backend, algorithm, steps


def take_over(backend: FSDPBackend, step: OptimizerStep) -> None:
    backend.stage.bundle.transformer.load_state_dict(step.weights, strict=False)


def train(backend: FSDPBackend, algorithm: TokenAlgorithm, step: OptimizerStep, geometry: TokenGeometry) -> Metrics:
    take_over(backend, step)
    return TrainStack(backend, algorithm, geometry).train(Batch.of(step.part, 0, ranks=1), Progress(0, 10))


def test_log_probs_and_entropy_are_those_of_trl(case: Case) -> None:
    backend, _, steps = case
    for step in steps:
        take_over(backend, step)
        replay = backend.stage.replay(step.part)
        torch.testing.assert_close(replay.log_probs, step.packed(step.log_probs), rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(replay.entropy, step.packed(step.entropies), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("geometry", [TokenGeometry(), TokenGeometry(token_budget=40)], ids=["whole", "token budget"])
def test_loss_and_gradient_of_all_weights_are_those_of_trl(case: Case, geometry: TokenGeometry) -> None:
    backend, algorithm, steps = case
    clipped = []
    for step in steps:
        figures = values(train(backend, algorithm, step, geometry))
        assert figures["train/loss"] == pytest.approx(step.loss, abs=TOLERANCE)
        clipped.append(figures["train/clip_fraction"])
        moments = backend.state()["optimizer"]
        assert set(moments) == set(step.gradients)
        for name, expected in step.gradients.items():
            difference = (moments[name]["exp_avg"] - expected).norm()
            assert difference <= TOLERANCE * expected.norm(), f"{name}: {difference / expected.norm():.1e}"
    assert clipped[0] == 0
    assert any(0 < share < 1 for share in clipped)
