"""A policy that trains in milliseconds: TinySD3 at its smallest, with the backend, engine and stack of the big ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from unirl.algorithms.base import AlgorithmOutput, Context, Needs, Progress
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm
from unirl.data.prompts import PromptRow, as_roots
from unirl.models.base import DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.tiny import TinySD3
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry
from unirl.types.metric import Metrics
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

SMALL = TinySD3(layers=1, heads=1, head_dim=16, embedding_dim=16)
# With beta1 = 0 the first moment of AdamW is the gradient of the last step.
PLAIN = AdamW(lr=1e-3, betas=(0.0, 0.999))
START = Progress(step=0, total=10)
SAMPLING = DiffusionSamplingParams(steps=4, height=8, width=8, seed=3)


@dataclasses.dataclass(frozen=True)
class Slope(DiffusionAlgorithm):
    """A loss of known numbers: row i has the value A_i in each of `steps` columns, and d/dw = A_i for every weight."""

    steps: int = 1

    @property
    def needs(self) -> Needs:
        return Needs(trajectory=False)

    def columns(self, part: Part) -> int:
        return self.steps

    def anchors(self, context: Context, part: Part, columns: slice) -> Anchors | None:
        return None

    def loss(self, context: Context, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        assert part.advantages is not None
        weights = [w.sum() for w in context.stage.bundle.transformer.parameters() if w.requires_grad]
        total = torch.stack(weights).sum()
        count = len(range(self.steps)[columns])
        return AlgorithmOutput((part.advantages * (1 + total - total.detach()))[:, None].expand(-1, count))


def rows_of(advantages: Sequence[float], rewards: Sequence[float] | None = None) -> Part:
    """Rows without content, for Slope; a row whose reward is NaN is invalid."""
    return Part(
        ids=[f"r0.p0/{row}" for row in range(len(advantages))],
        metadata=[{} for _ in advantages],
        rewards=torch.zeros(len(advantages)) if rewards is None else torch.tensor(list(rewards)),
        advantages=torch.tensor(list(advantages)),
    )


def policy(
    family: DiffusionFamily = SMALL, *, reference: bool = False, total_steps: int = 100, **settings: Any
) -> FSDPBackend:
    """A backend on the CPU that does not clip; `settings` are those of BackendConfig."""
    config = DiffusionBackendConfig(**{"optimizer": PLAIN, "max_grad_norm": None, **settings})
    return FSDPBackend(
        family, config, device=torch.device("cpu"), seed=0, total_steps=total_steps, with_reference=reference
    )


def rollout(
    backend: FSDPBackend,
    *,
    number: int = 0,
    prompts: Sequence[str] = ("one", "two"),
    group: int = 2,
    engine: Trainside | None = None,
    **sampling: Any,
) -> Part:
    """`group` pictures of each prompt in 4 stochastic steps unless `sampling` says otherwise, without rewards."""
    roots = as_roots([PromptRow(prompt) for prompt in prompts], number)
    request = Sample((roots,)).fork(group, dataclasses.replace(SAMPLING, **sampling))
    filled = TrainsideEngine(backend, engine or Trainside(), DiffusionPipeline).generate(request)
    assert filled is not None
    return filled.frontier


def rewarded(
    part: Part, rewards: Sequence[float] | None = None, *, scale: Literal["group_std", "none"] = "none"
) -> Part:
    """`part` with rewards (the brightness of its pictures unless given) and advantages relative to the group."""
    total = brightness(part) if rewards is None else torch.tensor(list(rewards), dtype=torch.float32)
    return part.with_rewards(Scores(total, {}, [()] * len(part))).compute_advantages("group", scale)


def brightness(part: Part) -> torch.Tensor:
    """Mean pixel of each picture, `(N,)` in [0, 1]."""
    assert part.media is not None
    assert part.media.images is not None
    return part.media.images.flatten(1).mean(1)


def trajectory(part: Part) -> LatentSegment:
    """What the rollout recorded."""
    assert isinstance(part.segment, LatentSegment)
    return part.segment


def train(
    backend: FSDPBackend,
    algorithm: DiffusionAlgorithm,
    part: Part,
    *,
    progress: Progress = START,
    **geometry: Any,
) -> Metrics:
    """All updates on one rollout; `geometry` are the settings of DiffusionGeometry."""
    return TrainStack(backend, algorithm, DiffusionGeometry(**geometry)).train(Batch.of(part, 0, ranks=1), progress)


def context(backend: FSDPBackend, *, unchanged: bool = False, progress: Progress = START) -> Context:
    """What the loss of an algorithm is given."""
    return Context(backend.stage, backend, progress, unchanged)


def last_gradient(backend: FSDPBackend) -> torch.Tensor:
    """The gradient of the last optimizer step, all parameters end to end (see PLAIN)."""
    moments = backend.state()["optimizer"]
    return torch.cat([moments[name]["exp_avg"].flatten() for name in sorted(moments)])


def gradient_of(backend: FSDPBackend, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar, all parameters end to end."""
    parameters = backend.state()["parameters"]
    live = backend.stage.bundle.trainable
    names = sorted(parameters)
    grads = torch.autograd.grad(loss, [live[name] for name in names], allow_unused=True)
    return torch.cat(
        [torch.zeros(live[name].numel()) if g is None else g.flatten() for name, g in zip(names, grads, strict=True)]
    )


def weights_of(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    """A copy of the trainable weights."""
    return {name: value.clone() for name, value in backend.state()["parameters"].items()}


def saved(backend: FSDPBackend) -> dict[str, Any]:
    """A copy of the backend's state, as a checkpoint would hold it."""
    return copy.deepcopy(backend.state())


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """`|a - b| / |b|`."""
    return float((a - b).norm() / b.norm())
