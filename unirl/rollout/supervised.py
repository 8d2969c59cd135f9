"""What SFT does in place of a rollout: latents and conditions of given media."""

from __future__ import annotations

import dataclasses

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.diffusion_stage import DiffusionStage
from unirl.models.policy import Policy
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import CleanLatents


class SupervisedEncoder(Remote):
    """Encodes with the frozen modules of the policy that its siblings train."""

    def __init__(self, policy: Policy[DiffusionStage], sampling: DiffusionSamplingParams) -> None:
        # Guidance belongs to sampling: in training every caption stands for itself.
        self._stage, self._sampling = policy.stage, dataclasses.replace(sampling, guidance=1.0)
        self._pipeline = DiffusionPipeline(policy.stage)

    @remote(Dispatch.DP_SCATTER)
    def encode(self, part: Part) -> Part:
        """A given Part with its targets."""
        assert part.media is not None, "a supervised part carries media"
        with torch.no_grad():
            latents = self._stage.family.encode_media(self._stage.bundle, part.media, self._sampling).float()
            conditions = self._pipeline.encode(part.media, self._sampling)
        return part.with_targets(segment=CleanLatents(latents=latents), conditions=conditions)
