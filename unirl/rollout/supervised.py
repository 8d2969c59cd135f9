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
            latents = self._latents(part)
            conditions = self._pipeline.encode(part.media, self._sampling)
        return part.with_targets(segment=CleanLatents(latents=latents), conditions=conditions)

    def _latents(self, part: Part) -> torch.Tensor:
        """x_0 of the pictures, or what was given as such."""
        family, bundle = self._stage.family, self._stage.bundle
        if not isinstance(part.segment, CleanLatents):
            assert part.media is not None, "a record without latents has a picture"
            return family.encode_media(bundle, part.media, self._sampling).float()
        given, wanted = tuple(part.segment.latents.shape[1:]), family.latent_shape(bundle, self._sampling)
        if given != wanted:
            raise ValueError(
                f"the latents of the records have the shape {given}; for sampling of {self._sampling.height} x "
                f"{self._sampling.width} {type(family).__name__} makes {wanted}"
            )
        return part.segment.latents.to(bundle.device)
