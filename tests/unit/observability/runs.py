"""A small run on disk whose every figure is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.observability.metrics import MetricsLog
from unirl.observability.run_folder import RunFolder

RL = {
    "domain": "diffusion",
    "run": {"name": "demo", "seed": 7, "steps": 4, "output": "runs"},
    "model": {"_target_": "unirl.models.tiny.Tiny"},
    "algorithm": {"_target_": "unirl.algorithms.flow_grpo.FlowGRPO", "kl_coef": 0.2},
    "reward": {"scorers": {"svm": {"scorer": {"quality": 95}, "weight": 2.5}}},
    "eval": {"every": 2, "scorers": {"knn": {"k": 5}}},
    "logging": {"trackers": None},
}

# Before training, half way, at the end: the reward and its judge stay together.
TOGETHER = {0: (0.5, 0.48), 2: (0.75, 0.72), 4: (0.9, 0.875)}


def write_run(
    root: Path,
    *,
    config: Mapping[str, Any] = RL,
    evaluations: Mapping[int, tuple[float, float]] = TOGETHER,
    diversity: Sequence[float] = (0.8, 0.7, 0.68),
    steps: int = 4,
) -> RunFolder:
    """`steps` steps of RL; evaluations are `step: (svm, knn)`, and diversity is given at each."""
    folder = RunFolder.open(root, "demo", config=config, seed=7, command=["unirl", "train", "demo"])
    log = MetricsLog(folder.metrics)
    for step in range(steps + 1):
        metrics = _training(step) if step else {}
        if step in evaluations:
            svm, knn = evaluations[step]
            varied = diversity[list(evaluations).index(step)]
            metrics |= {"eval/svm": svm, "eval/reward": 2.5 * svm, "eval/knn": knn, "eval/digits/diversity": varied}
        log.append(step, metrics)
    return folder


def _training(step: int) -> dict[str, float]:
    return {
        "reward/mean": 1.0 + step / 4,
        "reward/std": 0.5,
        "reward/group_std": 0.25,
        "reward/svm": 0.4 + step / 10,
        "reward/invalid": 0.0,
        "advantage/constant_groups": 0.125,
        "train/loss": -0.01 * step,
        "train/kl": 0.001 * step,
        "train/ratio_deviation": 0.1,
        "train/first_ratio_deviation": 0.0,
        "train/rollout_gap": 0.0,
        "train/rollout_gap_max": 0.0,
        "train/clip_fraction": 0.375,
        "train/grad_norm": 0.6,
        "train/lr": 1e-3,
        "train/skipped": 0.0,
        "seconds/rollout": 0.25,
        "seconds/train": 0.5,
        "seconds/step": 1.0,
    }
