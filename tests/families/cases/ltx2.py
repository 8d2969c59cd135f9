"""LTX-2: both streams at every step, and what is seen and heard at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.families.case import Case, run_pipeline
from tests.families.tiny import gemma_tokenizer, redraw
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.ltx2 import LTX2
from unirl.sde.steps import Schedule
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 64
RATE = 24.0


def write(folder: Path) -> Path:
    parts: dict[str, Any] = {
        "transformer": _transformer(),
        "vae": _video_autoencoder(),
        "audio_vae": _audio_autoencoder(),
        "text_encoder": Gemma3ForConditionalGeneration(_gemma3()),
        "connectors": _connectors(),
        "vocoder": LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
    }
    redraw(parts.values())
    draws = torch.Generator().manual_seed(1)
    for name in ("vae", "audio_vae"):
        for buffer, start in (("latents_mean", 0.0), ("latents_std", 1.0)):
            values = parts[name].get_buffer(buffer)
            values.copy_(start + 0.3 * torch.rand(values.shape, generator=draws))
    # The published line starts at 1024 tokens, far beyond a tiny video.
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=16,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    parts["tokenizer"] = gemma_tokenizer(padding_side="left")
    LTX2Pipeline(**parts).save_pretrained(folder)
    return folder


def _transformer() -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
    )


def _video_autoencoder() -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=8,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def _audio_autoencoder() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        mel_bins=8,
    )


def _connectors() -> LTX2TextConnectors:
    settings: dict[str, Any] = {}
    for stream in ("video", "audio"):
        settings |= {
            f"{stream}_connector_num_attention_heads": 4,
            f"{stream}_connector_attention_head_dim": 8,
            f"{stream}_connector_num_layers": 1,
            f"{stream}_connector_num_learnable_registers": 8,
        }
    return LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=3, rope_double_precision=False, rope_type="split", **settings
    )


def _gemma3() -> Gemma3Config:
    text = {
        "vocab_size": len(gemma_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=5,
        mm_tokens_per_image=4,
    )


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline, sampling = bundle.processors["pipeline"], case.sampling
    embedding = family(Path(pipeline.name_or_path)).encode(bundle, case.prompts, sampling)
    video, audio = embedding.streams(latents)
    _, frames, height, width = embedding.video_shape
    steps: list[torch.Tensor | None] = []

    def keep(_: Any, __: int, ___: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen = pipeline._unpack_latents(state["latents"], frames, height, width)
        heard = pipeline._unpack_audio_latents(state["audio_latents"], *embedding.audio_shape[1:])
        steps.append(torch.cat([seen.flatten(1), heard.flatten(1)], dim=1))
        return {}

    pipeline._callback_tensor_inputs = ["latents", "audio_latents"]
    statistics = (pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    _, output = run_pipeline(
        pipeline,
        case.prompts.required_texts,
        pipeline._pack_latents(video),
        case,
        # The pipeline takes what an autoencoder gives, and normalises it.
        audio_latents=pipeline._denormalize_audio_latents(pipeline._pack_audio_latents(audio), *statistics),
        negative_prompt=[sampling.negative_prompt] * len(video),
        num_frames=sampling.frames,
        frame_rate=RATE,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        max_sequence_length=LENGTH,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    return steps, Media(videos=output.frames, fps=RATE, audio=output.audio, audio_rate=16000)


@dataclasses.dataclass(frozen=True)
class GuidedVelocity(LTX2):
    """Guidance in the space of velocities, and no look at x_0."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance)


@dataclasses.dataclass(frozen=True)
class NoTerminal(LTX2):
    """The schedule ends where its shift ends."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        pinned = super().schedule(bundle, sampling)
        gaps = (1 - pinned.sigmas[:-1]) / 0.9
        sigmas = torch.cat([1 - gaps * 0.95, torch.zeros(1)])
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def family(folder: Path) -> LTX2:
    return LTX2(str(folder), max_sequence_length=LENGTH)


CASES = [
    Case(
        name="ltx2",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(
            steps=4, height=64, width=32, frames=5, guidance=3.0, negative_prompt="a blurred one"
        ),
        reference=reference,
        wrong={
            "the video's scale for both": lambda folder: dataclasses.replace(family(folder), audio_guidance=None),
            "no rescaling": lambda folder: dataclasses.replace(family(folder), guidance_rescale=0.0),
            "guided velocity": lambda folder: GuidedVelocity(str(folder), max_sequence_length=LENGTH),
            "another frame rate": lambda folder: dataclasses.replace(family(folder), frame_rate=24.5),
            "another terminal": lambda folder: NoTerminal(str(folder), max_sequence_length=LENGTH),
        },
    )
]
