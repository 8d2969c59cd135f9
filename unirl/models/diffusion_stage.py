"""The one DiffusionStage: rollout, replay and single predictions of any family, through one `predict`."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.base import Bundle, DiffusionFamily, Point
from unirl.sde.elements import Elements
from unirl.sde.noise import StepNoise, initial_noise
from unirl.sde.solver import SOLVERS
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import STRATEGIES, SDEStrategy
from unirl.sde.trajectory import Predict, Replay, replay_trajectory, sample_trajectory
from unirl.types.condition import Conditions, Embedding
from unirl.types.sample import Part
from unirl.types.sample_id import rollout_of
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment


@dataclasses.dataclass(frozen=True)
class DiffusionStage:
    """The trainable unit of a diffusion model.

    guidance_gradient: whether the unconditional branch carries gradient in training. Without it, that branch has a
                       forward of its own without a graph, or none at all while the weights are those of the rollout
    compute_dtype:     dtype of the forward; below float32 it runs under autocast, weights keep their own
    """

    family: DiffusionFamily
    bundle: Bundle
    guidance_gradient: bool
    compute_dtype: torch.dtype

    def rollout(self, part: Part, conditions: Conditions) -> LatentSegment:
        """Generate the rows of an unfilled `part`."""
        sampling = part.diffusion_sampling
        shape = self.family.latent_shape(self.bundle, sampling)
        latents = initial_noise(part.ids, shape, sampling.seed, same_in_group=sampling.same_initial_noise)
        sde_indices = sampling.resolve_sde_indices(rollout_of(part.ids[0]))
        recorder = _Recorder(sde_indices) if self._reuses_unconditional(conditions) else None
        segment = sample_trajectory(
            self._model(conditions, sampling.guidance, recorder),
            latents.to(self.bundle.device),
            self.family.schedule(self.bundle, sampling),
            strategy=_strategy(sampling),
            solver=SOLVERS[sampling.solver],
            sde_indices=sde_indices,
            noise=StepNoise(part.ids, sampling.seed),
            storage_dtype=getattr(torch, sampling.storage_dtype),
            elements=_elements(conditions),
        )
        return segment if recorder is None else dataclasses.replace(segment, unconditional=recorder.stacked())

    def replay(self, part: Part, steps: torch.Tensor, *, unchanged: bool = False) -> Replay:
        """Score the recorded transitions of a filled `part` at `steps` `(S,)` (schedule indices) in one forward.

        unchanged: the weights are still those of the rollout, so the unconditional velocity that it recorded is the one
        that would be computed (see `guidance_gradient`)
        """
        sampling, segment, conditions = part.diffusion_sampling, _segment(part), part.guidance_branches
        recorded = None
        if unchanged and segment.unconditional is not None and self._reuses_unconditional(conditions):
            columns = torch.searchsorted(segment.sde_indices, steps)
            recorded = segment.unconditional[:, columns.to(segment.unconditional.device)].flatten(0, 1)
        model = self._model(conditions, sampling.guidance, recorded)
        elements = _elements(conditions)
        return replay_trajectory(model, segment, steps, strategy=_strategy(sampling), elements=elements)

    def noised(
        self, conditions: Conditions, x_0: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor
    ) -> torch.Tensor:
        """Points of the forward process, `(1 - sigma) x_0 + sigma eps`; given elements keep their values.

        x_0: `(N, *latent)`; noise: `(N, K, *latent)`; sigma: `(N, K)`. Returns the shape of noise.
        """
        level = sigma.reshape(*sigma.shape, *([1] * (x_0.ndim - 1)))
        elements, noisy = _elements(conditions), (1 - level) * x_0[:, None] + level * noise
        return torch.stack([elements.pin(points) for points in noisy.unbind(1)], dim=1)

    def velocity(
        self, conditions: Conditions, latents: torch.Tensor, *, sigma: torch.Tensor, time: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """Velocity at points off the trajectory, for losses on the forward process.

        latents: `(N, K, *latent)`, K points for each row of `conditions`; sigma, time: `(N, K)`.
        Returns `(N, K, *latent)`.
        """
        self.family.refuse_points(self.bundle)
        count, points = latents.shape[:2]
        rows = torch.arange(count, device=latents.device).repeat_interleave(points)
        level = sigma.flatten()
        step = Step(torch.zeros_like(rows), sigma=level, sigma_next=level, sigma_star=level, time=time.flatten())
        model = self._model(conditions, guidance)
        return model(latents.flatten(0, 1), step, rows).unflatten(0, (count, points))

    def schedule(self, part: Part) -> Schedule:
        """The schedule that the rows of a filled `part` were made with."""
        segment = _segment(part)
        return Schedule(segment.sigmas, segment.times)

    def predict(
        self,
        latents: torch.Tensor,
        step: Step,
        conditions: Conditions,
        guidance: float,
        *,
        unconditional: torch.Tensor | None = None,
        rollout: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Guided velocity in float32, one row of `conditions` for each row of `latents` `(B, *latent)`.

        unconditional: the velocity of that branch, where it is known already
        rollout:       nothing is trained, so that both branches share one forward whatever `guidance_gradient` is
        Returns the velocity, and that of the unconditional branch where there is guidance.
        """
        # Latents stored in half precision, and therefore walked in it, would not fit a float32 model.
        latents = latents.float()
        with torch.autocast(latents.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            if conditions.negative is None:
                return self._branch(latents, step, conditions.positive, guidance), None
            if unconditional is not None:
                conditional = self._branch(latents, step, conditions.positive, guidance)
            elif self.guidance_gradient or rollout:
                both = type(conditions.positive).concat([conditions.negative, conditions.positive])
                velocity = self._branch(torch.cat([latents, latents]), step.repeat(2), both, guidance)
                unconditional, conditional = velocity.chunk(2)
            else:
                # Under no_grad as well: pi_old and the reference must share the forwards of pi, down to the low bits.
                with torch.no_grad():
                    unconditional = self._branch(latents, step, conditions.negative, guidance)
                conditional = self._branch(latents, step, conditions.positive, guidance)
        at = Point(latents, step, conditions.positive, guidance)
        return self.family.guide(conditional, unconditional, at), unconditional

    def _branch(self, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float) -> torch.Tensor:
        return self.bundle.run(lambda: self.family.predict(self.bundle, latents, step, embedding, guidance)).float()

    def _reuses_unconditional(self, conditions: Conditions) -> bool:
        return conditions.negative is not None and not self.guidance_gradient

    def _model(
        self, conditions: Conditions, guidance: float, unconditional: _Recorder | torch.Tensor | None = None
    ) -> Predict:
        """The model as the loops see it. unconditional: where to put that branch's velocity, or what it is."""
        whole = torch.arange(len(conditions))
        recorder = unconditional if isinstance(unconditional, _Recorder) else None
        known = unconditional if isinstance(unconditional, torch.Tensor) else None

        def model(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
            chosen = rows.cpu()
            own = conditions if torch.equal(chosen, whole) else conditions.select(chosen)
            velocity, other = self.predict(
                latents, step, own, guidance, unconditional=known, rollout=recorder is not None
            )
            if recorder is not None and other is not None:
                recorder.add(int(step.index[0]), other)
            return velocity

        return model


class _Recorder:
    """Keeps the unconditional velocity of the stochastic steps of one rollout."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self._steps, self._kept = steps, list[torch.Tensor]()

    def add(self, step: int, velocity: torch.Tensor) -> None:
        if step in self._steps:
            self._kept.append(velocity)

    def stacked(self) -> torch.Tensor | None:
        return torch.stack(self._kept, dim=1) if self._kept else None


def _elements(conditions: Conditions) -> Elements:
    return Elements(conditions.positive.weights, conditions.positive.given)


def _strategy(sampling: DiffusionSamplingParams) -> SDEStrategy:
    return STRATEGIES[sampling.strategy](sampling.noise_level)


def _segment(part: Part) -> LatentSegment:
    assert isinstance(part.segment, LatentSegment), "replay needs the trajectory of the rollout"
    return part.segment
