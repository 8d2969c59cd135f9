"""A rollout with its rewards: what is generated is scored while the next prompts are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import Pending
from unirl.observability.timing import PhaseTimer
from unirl.reward.service import RewardService
from unirl.rollout.trainside import TrainsideEngine
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample


def scored(
    request: Sample,
    rollout: Handle[TrainsideEngine],
    reward: Handle[RewardService],
    *,
    sizes: Sequence[int],
    max_invalid: float,
    timer: PhaseTimer,
) -> Part:
    """The filled frontier of `request` with its rewards, generated in chunks of `sizes` prompts.

    A chunk is scored behind the generation of the next ones, the last one where it is waited for: a single chunk is a
    rollout and then its scores. Of the time of scorers, the phase `reward` holds what the rollout had to wait for.
    RuntimeError above `max_invalid`, and what a scorer raises, as soon as the chunk under way is generated.
    """
    count = len(request.frontier)
    filled: list[Sample] = []
    known: list[Scores] = []
    pending: deque[Pending[Scores]] = deque()

    def take(scores: Scores) -> None:
        known.append(scores)
        Scores.concat(known).accepted(max_invalid, of=count)

    *earlier, last = request.split(list(sizes))
    for chunk in earlier:
        with timer("rollout"):
            filled.append(rollout.generate(chunk))
        pending.append(reward.score.start(filled[-1]))
        while pending and pending[0].done():
            take(pending.popleft().result())
    with timer("rollout"):
        filled.append(rollout.generate(last))
    with timer("reward"):
        while pending:
            take(pending.popleft().result())
        take(reward.score(filled[-1]))
    return Sample.concat(filled).frontier.with_rewards(Scores.concat(known))
