"""Ranks that only answer: what they return has the shapes and the references of a real one's, and no content."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from tests.hosted import Done
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.plane import DataPlane
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows
from unirl.types.condition import Conditions, Embedding, PromptTokens
from unirl.types.media import Media
from unirl.types.metric import maximum, mean, total
from unirl.types.reward import Scores
from unirl.types.sample import Sample
from unirl.types.segment import LatentSegment, TextSegment

Answer = Callable[[Call], Any]
TRAINED = ("loss", "ratio_mean", "ratio_deviation", "clip_low", "clip_high", "kl", "grad_norm", "lr", "log_prob")
REFERENCE_BYTES = 120  # what Ray pickles for a reference to an object and its owner


@dataclasses.dataclass(frozen=True)
class Tickets(Transport):
    """Keeps nothing, and gives a ticket as large as Ray's."""

    name: ClassVar[str] = "tickets"

    def put(self, rows: Rows) -> bytes:
        return bytes(REFERENCE_BYTES)

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        raise ValueError("simulated ranks keep nothing")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One call of all ranks, as the driver lives through it; CPU seconds since the process began.

    entered, left:  when the driver gave the arguments, and when it had the results
    packing:        seconds in which it pickled the former and unpickled the latter; those of the ranks count nowhere
    sent, received: bytes
    """

    method: str
    entered: float
    left: float
    packing: float
    sent: int
    received: int


class SimulatedLauncher(Launcher):
    """`world_size` data-parallel ranks. answers: what a method returns, by name; arguments and results are pickled."""

    def __init__(self, world_size: int, answers: Mapping[str, Answer]) -> None:
        self.slab = "main"
        self.ranks = tuple(RankInfo(rank, world_size, dp=world_size) for rank in range(world_size))
        self.exchanges: list[Exchange] = []
        self._answers, self._plane = answers, DataPlane(Tickets())

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        pass

    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        entered = time.process_time()
        arguments = [pickle.dumps(call, protocol=5) for call in calls.values()]
        packed = time.process_time()
        answers = [self._answered(rank, method, call) for rank, call in calls.items()]
        answered = time.process_time()
        values = dict(zip(calls, map(pickle.loads, answers), strict=True))
        left = time.process_time()
        packing = packed - entered + left - answered
        self.exchanges.append(
            Exchange(method, entered, left, packing, sum(map(len, arguments)), sum(map(len, answers)))
        )
        return Done(values)

    def close(self, *, at_once: bool = False) -> None:
        pass

    def _answered(self, rank: int, method: str, call: Call) -> bytes:
        return pickle.dumps(self._plane.parked(self._answers[method](call), f"on rank {rank}", {}), protocol=5)


def scored(call: Call) -> Scores:
    """Rewards that differ within a group."""
    count = len(call.args[0].frontier)
    column = torch.arange(count).remainder(7) / 7
    return Scores(total=column, components={"first": column, "second": 1 - column}, failures=[()] * count)


def trained(call: Call) -> dict[str, Any]:
    """As many figures as a step of Flow-GRPO reports."""
    figures = {f"train/{name}": mean(0.5, 8.0) for name in TRAINED}
    return {**figures, "train/skipped": total(0.0), "train/first_ratio_deviation": maximum(0.0)}


def pictures(call: Call) -> Sample:
    """Those of SD3.5 at the size that the request asks for. On the meta device: they have sizes and no memory."""
    sample = call.args[0]
    part, sampling = sample.frontier, sample.frontier.diffusion_sampling
    count, chosen = len(part), sampling.resolve_sde_indices(0)
    positions = sorted({end for step in chosen for end in (step, step + 1)} | {sampling.steps})
    segment = LatentSegment(
        latents=_nothing(count, len(positions), 16, sampling.height // 8, sampling.width // 8),
        positions=torch.tensor(positions),
        sigmas=torch.linspace(1, 0, sampling.steps + 1),
        times=torch.linspace(1000, 100, sampling.steps),
        sde_indices=torch.tensor(chosen),
        log_probs=_nothing(count, len(chosen)),
    )
    branch = Embedding(tokens=_nothing(count, 333, 4096, dtype=torch.bfloat16), pooled=_nothing(count, 2048))
    return sample.with_frontier(
        part.fill(
            media=Media(images=_nothing(count, 3, sampling.height, sampling.width)),
            segment=segment,
            conditions=Conditions(branch, branch),
            version=0,
        )
    )


def responses(call: Call) -> Sample:
    """To prompts of 100 tokens, as long as the request allows."""
    sample = call.args[0]
    part, length = sample.frontier, sample.frontier.sampling.max_new_tokens
    count = len(part)
    tokens = torch.arange(count * length).remainder(150_000)
    segment = TextSegment(
        tokens=tokens,
        log_probs=-(tokens.float() + 1).log(),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        lengths=torch.full((count,), length),
        truncated=torch.zeros(count, dtype=torch.bool),
    )
    prompts = PromptTokens(tokens=torch.ones(count * 100, dtype=torch.int64), lengths=torch.full((count,), 100))
    texts = Media(texts=["word " * (4 * length // 5)] * count)
    return sample.with_frontier(part.fill(media=texts, segment=segment, conditions=prompts, version=0))


def _nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
