"""Rows that ranks keep, and launchers of several ranks that keep what their methods return."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.distributed.tensor.in_process import InProcess
from unirl.distributed.tensor.plane import DataPlane, resolved
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows, nested
from unirl.types.condition import Conditions, Embedding
from unirl.types.media import Media
from unirl.types.metric import Metrics, total
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

SAMPLING = DiffusionSamplingParams(steps=2, height=8, width=8, seed=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Holder(Rows):
    """A batch with one heavy field."""

    content: Rows = nested(heavy=(Rows,))


@dataclasses.dataclass(frozen=True)
class Counting(Transport):
    """As in the process, and writes down which parcels were asked for."""

    name: ClassVar[str] = "counting"
    asked: list[Parcel] = dataclasses.field(default_factory=list, hash=False)

    def put(self, rows: Rows) -> Rows:
        return rows

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        self.asked.extend(parcels)
        return [parcel.ticket for parcel in parcels]


def kept(shards: Sequence[Rows], parcel_bytes: int = 2**20, transport: Transport | None = None) -> FieldRef:
    """The reference to shards that ranks keep, each in parcels of its own, end to end."""
    plane = DataPlane(transport or InProcess(), parcel_bytes)
    held = [plane.parked(Holder(shard), f"by rank {rank}", {}).content for rank, shard in enumerate(shards)]
    return FieldRef.concat([ref for ref in held if isinstance(ref, FieldRef)])


def brought(ref: FieldRef) -> Any:
    """The rows of a reference."""
    return resolved(ref)


class Studio(Remote):
    """Draws: picture, latents and conditions of a row are of the number that its id ends with. size: of a picture."""

    def __init__(self, size: int = 4) -> None:
        self.size = size

    @remote(Dispatch.DP_SCATTER)
    def draw(self, sample: Sample) -> Sample:
        part = sample.frontier
        numbers = torch.tensor([float(sample_id.replace("/", "p").split("p")[-1]) for sample_id in part.ids])
        images = numbers[:, None, None, None].expand(-1, 3, self.size, self.size).clone()
        filled = part.fill(media=Media(images=images), segment=path(images), conditions=prompts_of(numbers), version=1)
        return sample.with_frontier(filled)

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def brighten(self, sample: Sample) -> Sample:
        """Pictures in twice their light; what else there is stays."""
        part = sample.frontier
        assert part.media is not None
        assert part.media.images is not None
        return sample.with_frontier(dataclasses.replace(part, media=Media(images=2 * part.media.images)))

    @remote(Dispatch.DP_SCATTER)
    def same(self, sample: Sample) -> Sample:
        return sample

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def light(self, sample: Sample) -> Metrics:
        """The sum of the pictures."""
        return {"light": total(float(pictures(sample).double().sum()))}

    @remote(Dispatch.DP_SCATTER)
    def paint_over(self, sample: Sample) -> Metrics:
        """As `light`, of pictures that are black afterwards."""
        light = self.light(sample)
        pictures(sample).zero_()
        return light

    @remote(Dispatch.DP_COLLECTIVE, reads=("media",))
    def together(self, sample: Sample | None) -> Metrics | None:
        return None if sample is None else self.light(sample)

    @remote(Dispatch.BROADCAST)
    def kept(self) -> Metrics:
        """Objects whose tensors Ray keeps in the ranks."""
        import ray

        return {"kept": total(float(ray.get_runtime_context().worker.rdt_manager.rdt_store.get_num_objects()))}

    @remote(Dispatch.BROADCAST, reads=("media",))
    def everyone(self, sample: Sample) -> Metrics:
        return self.light(sample)

    @remote(Dispatch.RANK_ZERO, reads=("media",))
    def first(self, sample: Sample) -> Metrics:
        return self.light(sample)


class Mortal(Studio):
    """Ends when it is told to."""

    @remote(Dispatch.BROADCAST)
    def die(self, rank: int) -> None:
        if self.rank_info.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def request(prompts: int, group: int = 2) -> Sample:
    """`group` unfilled rows for each prompt."""
    ids = [f"r0.p{row}" for row in range(prompts)]
    roots = Part(ids=ids, metadata=[{} for _ in ids], media=Media(texts=[f"a {row}" for row in range(prompts)]))
    return Sample((roots,)).fork(group, SAMPLING)


def pictures(sample: Sample) -> torch.Tensor:
    """Those of the frontier."""
    media = sample.frontier.media
    assert media is not None
    assert media.images is not None
    return media.images


def path(images: torch.Tensor) -> LatentSegment:
    """Two steps, the first one stochastic; all latents of a row are its picture, in bfloat16."""
    latents = images[:, None].expand(-1, 3, *images.shape[1:]).to(torch.bfloat16)
    steps = torch.tensor([1.0, 0.5, 0.0])
    return LatentSegment(latents, torch.arange(3), steps, 1000 * steps[:2], torch.tensor([0]), images[:, 0, 0, :1])


def prompts_of(numbers: torch.Tensor) -> Conditions:
    """One guidance branch, and no mask."""
    return Conditions(Embedding(numbers[:, None, None].expand(-1, 2, 3).clone()))
