"""What SFT does in place of a rollout: latents and conditions of given media."""

from __future__ import annotations

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.policy import Policy
from unirl.types.sample import Part
from unirl.types.segment import CleanLatents


class SupervisedEncoder(Remote):
    """Encodes with the frozen modules of the policy that its siblings train."""

    def __init__(self, policy: Policy) -> None:
        self._stage = policy.stage
        self._pipeline = DiffusionPipeline(policy.stage)

    @remote(Dispatch.DP_SCATTER)
    def encode(self, part: Part) -> Part:
        """A given Part with its targets."""
        assert part.media is not None, "a supervised part carries media"
        assert part.media.texts is not None, "a supervised part carries captions"
        with torch.no_grad():
            latents = self._stage.family.encode_media(self._stage.bundle, part.media).float()
            conditions = self._pipeline.encode(part.media.texts, negative_prompt=None)
        return part.with_targets(segment=CleanLatents(latents=latents), conditions=conditions)
