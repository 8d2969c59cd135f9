"""Which responses a language model is trained on: dynamic sampling, the penalty of long ones, cut-off ones (DAPO)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from unirl.algorithms.token_base import responses
from unirl.algorithms.token_losses import overlong_penalty, per_token
from unirl.types.advantages import group_numbers, spread_of
from unirl.types.metric import Metrics, mean, total
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams

OVERLONG = "overlong"  # the reward component of the penalty


@dataclasses.dataclass(frozen=True)
class Overlong:
    """`weight` times 0 up to `max_new_tokens - buffer` tokens, then falling to -1 (arXiv 2503.14476, eq. 13)."""

    buffer: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 1 or not self.weight > 0:
            raise ValueError(f"buffer must be at least 1 and weight positive, got {self.buffer} and {self.weight}")

    def penalised(self, part: Part, max_new_tokens: int, rows: torch.Tensor) -> Part:
        """`part` with the penalty in the rewards of `rows`, `(N,)` bool; a row without a reward stays without."""
        assert part.rewards is not None, "rewards come before the penalty"
        penalty = overlong_penalty(responses(part).lengths, max_new_tokens, self.buffer) * rows
        return dataclasses.replace(
            part,
            rewards=part.rewards + self.weight * penalty,
            reward_components={**(part.reward_components or {}), OVERLONG: penalty},
        )


@dataclasses.dataclass(frozen=True)
class ResponseConfig:
    """Off unless a recipe asks for it.

    max_draws:      dynamic sampling (arXiv 2503.14476): a group whose rewards are all equal teaches nothing, so another
                    prompt is drawn in its place, in at most this many extra draws a step. Where places are then still
                    open such groups keep them, with advantages of 0: a step has as many rows as any other
    overlong:       a soft penalty of long responses, added to the reward after groups were judged by it; not in the
                    groups that keep open places, which would then teach length alone
    mask_truncated: responses that max_new_tokens cut off count in the baseline of their group and are not trained
    """

    max_draws: int = 0
    overlong: Overlong | None = None
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if self.max_draws < 0:
            raise ValueError(f"max_draws must not be negative (0 is off), got {self.max_draws}")

    def check(self, samples_per_prompt: int, sampling: ARSamplingParams) -> None:
        """ValueError where this does not fit the rest of the run."""
        if self.max_draws and samples_per_prompt < 2:
            raise ValueError(
                f"responses.max_draws={self.max_draws} draws again where a group has equal rewards, as a group of "
                f"data.samples_per_prompt={samples_per_prompt} always has: set it to 0, or take at least 2 samples"
            )
        if self.overlong is not None and self.overlong.buffer > sampling.max_new_tokens:
            raise ValueError(
                f"responses.overlong.buffer={self.overlong.buffer} is more than sampling.max_new_tokens="
                f"{sampling.max_new_tokens}: about a fifth of that is usual"
            )

    def gathered(self, prompts: int, draw: Callable[[int, int], Part]) -> tuple[Part, Metrics]:
        """A scored Part of `prompts` groups, those whose rewards differ first.

        draw: `draw(number, count)` gives `count` scored groups; number 0 is the rollout itself, others are extra draws
        """
        part = draw(0, prompts)
        if self.max_draws == 0:
            return part, {}
        drawn, extra = [part], 0
        teaching, equal, found = _by_spread(part)
        kept, rest = [teaching], [equal]
        while found < prompts and extra < self.max_draws:
            extra += 1
            drawn.append(draw(extra, prompts - found))
            teaching, equal, more = _by_spread(drawn[-1])
            kept.append(teaching)
            rest.append(equal)
            found += more
        rewards = torch.cat([piece.rewards[piece.valid] for piece in drawn if piece.rewards is not None])
        gathered = Part.concat([*kept, *rest])
        numbers = group_numbers(gathered.groups("group"))
        metrics: Metrics = {
            "rollout/extra_draws": total(float(extra)),
            "rollout/equal_groups": total(float(numbers.max()) + 1 - found),
            "rollout/open_places": total(float(prompts - found)),
            "rollout/drawn_reward": mean(float(rewards.double().mean()), float(len(rewards))),
        }
        return gathered.select((numbers < prompts).nonzero().flatten()), metrics

    def shaped(self, part: Part, sampling: ARSamplingParams) -> Part:
        """A gathered Part as it is trained on."""
        if self.overlong is not None:
            judged = _teaching(part) if self.max_draws else torch.ones(len(part), dtype=torch.bool)
            part = self.overlong.penalised(part, sampling.max_new_tokens, judged)
        if self.mask_truncated:
            segment = responses(part)
            whole = per_token(~segment.truncated, segment.lengths, len(segment.tokens))
            part = dataclasses.replace(part, segment=dataclasses.replace(segment, loss_mask=segment.loss_mask & whole))
        return part


def response_metrics(part: Part) -> Metrics:
    """Figures of the responses."""
    segment = responses(part)
    count = float(len(segment))
    return {
        "rollout/tokens": mean(float(segment.lengths.double().mean()), count),
        "rollout/truncated": mean(float(segment.truncated.double().mean()), count),
    }


def _by_spread(part: Part) -> tuple[Part, Part, int]:
    """The groups of a scored part with different finite rewards, the others, and how many the former are."""
    rows = _teaching(part)
    teaching, equal = part.select(rows.nonzero().flatten()), part.select((~rows).nonzero().flatten())
    return teaching, equal, len(set(teaching.groups("group")))


def _teaching(part: Part) -> torch.Tensor:
    """`(N,)` bool: the rows of groups with different finite rewards."""
    assert part.rewards is not None, "rewards come before groups are judged by them"
    numbers = group_numbers(part.groups("group"))
    return spread_of(part.rewards, numbers).differ[numbers]
