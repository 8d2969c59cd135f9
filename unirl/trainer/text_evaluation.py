"""Evaluation of a language model: avg@k and pass@k beside the figures that every evaluation has."""

from __future__ import annotations

import dataclasses
import math

import torch

from unirl.observability.judges import EVAL, PASS_AT
from unirl.reward.service import RewardConfig
from unirl.trainer.evaluation import EvalConfig, Evaluation
from unirl.types.reward import Scores
from unirl.types.sampling import ARSamplingParams, SamplingParams, refuse_temperature


@dataclasses.dataclass(frozen=True)
class TextEvalConfig(EvalConfig):
    """temperature: of the samples; None takes that of training, 0 the likeliest token
    pass_at: `eval/pass@k` for each of these k: the chance that the best of k samples has a reward of `success` or more
    """

    temperature: float | None = None
    pass_at: tuple[int, ...] = ()
    success: float = 1.0

    def __post_init__(self) -> None:
        EvalConfig.__post_init__(self)
        beyond = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if beyond:
            raise ValueError(
                f"pass_at={beyond} cannot be told from samples_per_prompt={self.samples_per_prompt} samples: take 1 to "
                f"{self.samples_per_prompt}"
            )
        if self.temperature is not None:
            refuse_temperature(self.temperature)
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at temperature 0 are copies of one text: take 1"
            )

    def sampled(self, sampling: SamplingParams) -> SamplingParams:
        assert isinstance(sampling, ARSamplingParams)
        return sampling if self.temperature is None else dataclasses.replace(sampling, temperature=self.temperature)

    def figures(self, reward: RewardConfig) -> list[str]:
        return [*super().figures(reward), *(f"{EVAL}{PASS_AT}{k}" for k in self.pass_at)]

    def passed(self, evaluation: Evaluation, scores: Scores) -> Evaluation:
        """`evaluation` with its pass@k; a sample without a reward has failed."""
        successes = (scores.total >= self.success).unflatten(0, (-1, self.samples_per_prompt)).sum(1)
        figures = {
            f"{EVAL}{PASS_AT}{k}": float(pass_at_k(successes, self.samples_per_prompt, k).mean()) for k in self.pass_at
        }
        return dataclasses.replace(evaluation, metrics={**evaluation.metrics, **figures})


def pass_at_k(successes: torch.Tensor, samples: int, k: int) -> torch.Tensor:
    """`1 - C(n - c, k) / C(n, k)` for each count c of successes among n samples (arXiv 2107.03374, eq. 1)."""
    missed = [math.comb(samples - count, k) / math.comb(samples, k) for count in successes.tolist()]
    return 1 - torch.tensor(missed, dtype=torch.float64)
