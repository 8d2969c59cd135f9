"""The one DiffusionStage: rollout, replay and single predictions of any family, through one `predict`."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.base import Bundle, DiffusionFamily
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

    guidance_gradient: whether the unconditional branch carries gradient in training
    compute_dtype:     dtype of the forward; below float32 it runs under autocast, weights keep their own
    """

    family: DiffusionFamily
    bundle: Bundle
    guidance_gradient: bool
    compute_dtype: torch.dtype

    def rollout(self, part: Part, conditions: Conditions) -> LatentSegment:
        """Generate the rows of an unfilled `part`."""
        sampling = _sampling(part)
        shape = self.family.latent_shape(self.bundle, sampling)
        latents = initial_noise(part.ids, shape, sampling.seed, same_in_group=sampling.same_initial_noise)
        return sample_trajectory(
            self._model(conditions, sampling.guidance),
            latents.to(self.bundle.device),
            self.family.schedule(self.bundle, sampling),
            strategy=_strategy(sampling),
            solver=SOLVERS[sampling.solver],
            sde_indices=sampling.resolve_sde_indices(rollout_of(part.ids[0])),
            noise=StepNoise(part.ids, sampling.seed),
            storage_dtype=getattr(torch, sampling.storage_dtype),
        )

    def replay(self, part: Part, steps: torch.Tensor) -> Replay:
        """Score the recorded transitions of a filled `part` at `steps` `(S,)` (schedule indices) in one forward."""
        sampling = _sampling(part)
        model = self._model(_conditions(part), sampling.guidance)
        return replay_trajectory(model, _segment(part), steps, strategy=_strategy(sampling))

    def velocity(
        self, conditions: Conditions, latents: torch.Tensor, *, sigma: torch.Tensor, time: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """Velocity at points off the trajectory, for losses on the forward process.

        latents: `(N, K, *latent)`, K points for each row of `conditions`; sigma, time: `(N, K)`. Returns `(N, K, *latent)`.
        """
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

    def predict(self, latents: torch.Tensor, step: Step, conditions: Conditions, guidance: float) -> torch.Tensor:
        """Guided velocity in float32, one row of `conditions` for each row of `latents` `(B, *latent)`.

        Without gradients both branches share one forward; in training the unconditional one has its own, without a
        graph, unless `guidance_gradient` asks for one.
        """
        with torch.autocast(latents.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            if conditions.negative is None:
                return self._branch(latents, step, conditions.positive).float()
            if self.guidance_gradient or not torch.is_grad_enabled():
                both = Embedding.concat([conditions.negative, conditions.positive])
                velocity = self._branch(torch.cat([latents, latents]), step.repeat(2), both)
                unconditional, conditional = velocity.float().chunk(2)
            else:
                with torch.no_grad():
                    unconditional = self._branch(latents, step, conditions.negative).float()
                conditional = self._branch(latents, step, conditions.positive).float()
        return self.family.guide(conditional, unconditional, guidance)

    def _branch(self, latents: torch.Tensor, step: Step, embedding: Embedding) -> torch.Tensor:
        return self.family.predict(self.bundle, latents, step, embedding)

    def _model(self, conditions: Conditions, guidance: float) -> Predict:
        whole = torch.arange(len(conditions))

        def model(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
            chosen = rows.cpu()
            own = conditions if torch.equal(chosen, whole) else conditions.select(chosen)
            return self.predict(latents, step, own, guidance)

        return model


def _strategy(sampling: DiffusionSamplingParams) -> SDEStrategy:
    return STRATEGIES[sampling.strategy](sampling.noise_level)


def _sampling(part: Part) -> DiffusionSamplingParams:
    assert part.sampling is not None, "a stage works on generated parts"
    return part.sampling


def _conditions(part: Part) -> Conditions:
    assert part.conditions is not None, "replay needs the conditions of the rollout"
    return part.conditions


def _segment(part: Part) -> LatentSegment:
    assert isinstance(part.segment, LatentSegment), "replay needs the trajectory of the rollout"
    return part.segment
