"""Rollouts that are scored chunk by chunk, behind their generation."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.tiny_policy import SAMPLING, policy
from tests.unit.reward.samples import Rule
from unirl.data.prompts import ListedPrompts, PromptRow, as_roots
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.observability.timing import PhaseTimer
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.trainer.rl import DataConfig
from unirl.trainer.scored import scored
from unirl.types.sample import Part, Sample

WAIT = 20.0
PROMPTS = ("one", "two", "three", "four")


@dataclasses.dataclass
class Rollouts:
    """Four prompts of two pictures each; `generated` is called with the number of each chunk before it is made."""

    engine: TrainsideEngine
    reward: Handle[RewardService]
    timer: PhaseTimer
    generated: Callable[[int], None] = lambda number: None
    chunks: list[Sample] = dataclasses.field(default_factory=list)

    def generate(self, sample: Sample) -> Sample:
        self.generated(len(self.chunks))
        filled = self.engine.generate(sample)
        assert filled is not None
        self.chunks.append(filled)
        return filled

    def settle(self) -> None:
        """Wait for the scores that were started: a call that is waited for comes after them."""
        with contextlib.suppress(ValueError):
            self.reward.score(self.chunks[0])

    def scored(self, sizes: list[int], max_invalid: float = 0.0) -> Part:
        roots = as_roots([PromptRow(prompt) for prompt in PROMPTS], 0)
        request = Sample((roots,)).fork(2, SAMPLING)
        return scored(request, self, self.reward, sizes=sizes, max_invalid=max_invalid, timer=self.timer)  # type: ignore[arg-type]


@contextlib.contextmanager
def rollouts(scorer: Scorer) -> Iterator[Rollouts]:
    engine = TrainsideEngine(policy(), Trainside(batch_size=2), DiffusionPipeline)
    with Placement(device="cpu").slab() as slab:
        reward = slab.spawn(RewardService, RewardConfig({"r": WeightedScorer(scorer)}))
        yield Rollouts(engine, reward, PhaseTimer())


def brightness(sample: ScorerInput) -> float:
    return float(sample.picture.mean())


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1]], ids=str)
def test_samples_and_rewards_do_not_depend_on_the_chunks(sizes: list[int]) -> None:
    with rollouts(Rule(brightness)) as one:
        whole, chunked = one.scored([4]), one.scored(sizes)
    assert chunked.ids == whole.ids == [f"r0.p{row}/{child}" for row in range(4) for child in range(2)]
    assert whole.rewards is not None
    assert chunked.rewards is not None
    assert len(set(whole.rewards.tolist())) == 8
    assert torch.equal(chunked.rewards, whole.rewards)
    assert whole.segment is not None
    assert chunked.segment is not None
    assert torch.equal(chunked.segment.latents, whole.segment.latents)  # type: ignore[union-attr]


def test_a_chunk_is_scored_while_the_next_is_generated() -> None:
    """The scorer of chunk 0 ends only when chunk 1 is under way: without the overlap nobody would open the gate."""
    gate = threading.Event()

    def held(sample: ScorerInput) -> float:
        assert gate.wait(WAIT)
        return brightness(sample)

    with rollouts(Rule(held)) as one:
        one.generated = lambda number: gate.set() if number == 1 else None
        part = one.scored([1, 3])
    assert part.valid.all()


def test_a_single_chunk_is_scored_in_the_thread_of_the_run() -> None:
    threads = set()
    with rollouts(Rule(lambda sample: threads.add(threading.current_thread()) or 1.0)) as one:
        one.scored([4])
        assert threads == {threading.main_thread()}


class Broken(Scorer):
    def score(self, samples: list[ScorerInput]) -> list[float]:
        return []


def test_what_a_scorer_raises_ends_the_rollout_with_its_type_before_the_other_chunks() -> None:
    with rollouts(Broken()) as one:
        one.generated = lambda number: one.settle() if number == 1 else None
        with pytest.raises(ValueError, match="scorer r returned 0 scores for 2 samples") as caught:
            one.scored([1, 1, 1, 1])
    assert len(one.chunks) <= 2  # 1 where the scores are there before the next chunk begins
    assert caught.value.__notes__ == ["in RewardService.score on rank 0 of slab main"]


def test_a_chunk_that_alone_exceeds_max_invalid_ends_the_rollout() -> None:
    """2 of 8 are invalid after the first chunk, whatever the others would be."""

    def fails(sample: ScorerInput) -> float:
        if sample.prompt == "one":
            raise OSError("gone")
        return 1.0

    with rollouts(Rule(fails)) as one:
        assert one.scored([1, 1, 2], max_invalid=0.25).valid.tolist() == [False] * 2 + [True] * 6
        one.chunks.clear()
        one.generated = lambda number: one.settle() if number == 1 else None
        with pytest.raises(RuntimeError, match=r"2 of 8 samples have no reward.* r: r0\.p0/0: OSError: gone") as caught:
            one.scored([1, 1, 2], max_invalid=0.2)
    assert len(one.chunks) <= 2
    assert isinstance(caught.value.__cause__, OSError)


def test_a_rollout_that_fails_leaves_no_score_in_the_queue() -> None:
    gate, seen = threading.Event(), list[str]()

    def held(sample: ScorerInput) -> float:
        seen.append(sample.prompt)
        assert gate.wait(WAIT)
        return 1.0

    def fail(number: int) -> None:
        if number == 2:
            threading.Timer(0.5, gate.set).start()
            raise MemoryError("no room")

    with rollouts(Rule(held)) as one:
        one.generated = fail
        with pytest.raises(MemoryError, match="no room"):
            one.scored([1, 1, 2])
    assert set(seen) == {"one"}


def test_waiting_for_scores_is_the_time_of_the_reward_and_generating_that_of_the_rollout() -> None:
    ticks = iter(range(1000))
    with rollouts(Rule(brightness)) as one:
        one.timer = PhaseTimer(lambda: float(next(ticks)))
        one.scored([1, 1, 2])
        lap = one.timer.lap()
    assert (lap["seconds/rollout"], lap["seconds/reward"]) == (3.0, 1.0)  # entries of a phase, on a clock that counts


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_chunk_has_at_least_one_prompt_and_at_most_those_of_a_step(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"prompts_per_chunk must be 1 to prompts_per_step=2, or null, got {chunk}"):
        DataConfig(ListedPrompts(PROMPTS), prompts_per_step=2, samples_per_prompt=2, prompts_per_chunk=chunk)
