"""Cosmos 3 as a text-to-image model, through diffusers' Cosmos3OmniPipeline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.grouped import in_groups
from unirl.models.latents import Grid
from unirl.models.pretrained import flow_shift, ragged_embedding
from unirl.models.published import PublishedFamily
from unirl.sde.schedule import twice_shifted_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Cosmos3(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`; the transformer embeds the text itself, one sample a call.

    The published scheduler is UniPC, whose steps depend on earlier ones. The schedule here is Euler's, at its shift.
    The pipeline's guardrails are not loaded; whether they must be is a question to the licence of the checkpoint.
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("nvidia/Cosmos3-Nano", "nvidia/Cosmos3-Super", "nvidia/Cosmos3-Super-Text2Image"),
        parameters="16B / 65B / 65B",
        licence="NVIDIA Open Model License",
        guidance="classifier-free, off at 1; 6 is usual",
        advice="prompts are expected as long JSON captions; a batch is a loop, so small ones cost nothing",
    )
    # The branch that draws. The branch that reads (to_q, mlp, ...) also writes text, and stays as it is.
    lora_targets: ClassVar[tuple[str, ...]] = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    block_names: ClassVar[tuple[str, ...]] = ("Cosmos3VLTextMoTDecoderLayer",)
    pipelines: ClassVar[tuple[str, ...]] = ("Cosmos3OmniPipeline",)
    published: ClassVar[Grid] = Grid(scale=16, patch=1)

    def parts(self) -> dict[str, Any]:
        return {"safety_checker": None, "enable_safety_checker": False}

    def prepare(self, pipeline: Any) -> None:
        flow_shift(pipeline.scheduler.config)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        config = bundle.pipeline.scheduler.config
        shift = flow_shift(config) if sampling.shift is None else sampling.shift
        return twice_shifted_sigmas(sampling.steps, shift, config.num_train_timesteps)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * bundle.pipeline.scheduler.config.num_train_timesteps

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """tokens: `(N, L)` ids of the system prompt, the prompt, and a sentence that states the size."""
        ids = [_token_ids(bundle, text, "", sampling)[0] for text in prompts.required_texts]
        return ragged_embedding(ids)

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """The sentence that states the size is negated."""
        ids = [_token_ids(bundle, "", text, sampling)[1] for text in prompts.required_texts]
        return ragged_embedding(ids)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None
        rows = list(zip(latents, step.time, embedding.tokens, embedding.mask, strict=True))

        def forward(alone: list[int]) -> torch.Tensor:
            [(x, time, ids, real)] = [rows[row] for row in alone]
            return _velocity(bundle, x, time, ids[real])

        # One packed sequence has no mask between samples.
        return in_groups(bundle, range(len(rows)), forward)


def _token_ids(
    bundle: Bundle, prompt: str, negative: str, sampling: DiffusionSamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a prompt and of a negative prompt, `(L,)`."""
    ids, others = bundle.pipeline.tokenize_prompt(
        prompt, negative, num_frames=1, height=sampling.height, width=sampling.width
    )
    return torch.tensor(ids, device=bundle.device), torch.tensor(others, device=bundle.device)


def _velocity(bundle: Bundle, latent: torch.Tensor, time: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of one sample. latent: `(C, H, W)`; time: a number; ids: `(L,)`. Returns `(1, C, H, W)`."""
    from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as cosmos

    config: Any = bundle.transformer.config
    grid = [math.ceil(side / config.latent_patch_size) for side in latent.shape[1:]]
    length, patches = len(ids), math.prod(grid)
    text, end = cosmos.get_3d_mrope_ids_text_tokens(
        length, temporal_offset=0, use_float_positions=config.enable_fps_modulation
    )
    picture, _ = cosmos.get_3d_mrope_ids_vae_tokens(
        1,
        *grid,
        temporal_offset=end + config.unified_3d_mrope_temporal_modality_margin,
        reset_spatial_indices=config.unified_3d_mrope_reset_spatial_ids,
    )
    sequence = torch.arange(length + patches, device=latent.device)
    (velocity,), *_ = bundle.transformer(
        input_ids=ids,
        text_indexes=sequence[:length],
        position_ids=torch.cat([text, picture], dim=1).to(latent.device),
        und_len=length,
        sequence_length=length + patches,
        vision_tokens=[latent[None, :, None]],
        vision_token_shapes=[(1, *grid)],
        vision_sequence_indexes=sequence[length:],
        vision_mse_loss_indexes=sequence[length:],
        vision_timesteps=time.expand(patches),
        vision_noisy_frame_indexes=[torch.zeros(1, dtype=torch.long, device=latent.device)],
        return_dict=False,
    )
    return velocity[:, :, 0]
