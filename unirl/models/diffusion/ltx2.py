"""LTX-2 (arXiv 2601.03233): video and sound in one walk, through diffusers' LTX2Pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from unirl.models.base import Bundle, Facts, Point, classifier_free
from unirl.models.latents import Grid, to_unit
from unirl.models.pretrained import check_count, check_dynamic
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.steps import Step
from unirl.types.batch import padded, shared
from unirl.types.condition import Embedding
from unirl.types.kinds import Kind
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LTX2Embedding(Embedding):
    """What the two streams read of a prompt, and their shapes: `tokens` are the video's.

    audio_tokens: `(N, L, D)`
    video_shape:  `(C, F, H, W)` of the video's latent, the first part of the flat vector that is walked
    audio_shape:  `(C, L, M)` of the sound's latent, the second part: L moments of M mel bins
    """

    audio_tokens: torch.Tensor = padded(mask="mask")
    video_shape: tuple[int, ...] = shared()
    audio_shape: tuple[int, ...] = shared()

    def streams(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(N, D)` -> video `(N, C, F, H, W)` and sound `(N, C, L, M)`."""
        return _streams(latents, self.video_shape, self.audio_shape)


@dataclasses.dataclass(frozen=True)
class LTX2(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`, of video and sound at once; the latent is one flat vector `(D,)`.

    Guidance is classifier-free, at a scale for each stream, and then scales what it predicts of x_0 towards the
    standard deviation of the conditional prediction (arXiv 2305.08891). The two guidances of the pipeline that need a
    third and a fourth forward (spatio-temporal, modality isolation) are not offered.

    frame_rate:          frames a second; with the number of frames it gives the length of the sound
    audio_guidance:      scale of the sound, where `sampling.guidance` is that of the video; null takes that one
    guidance_rescale:    how far the scaling goes, from 0 (not at all) to 1
    stream_weights:      how much the streams count in log-probs, KL and losses
                         elements  every latent element alike: the video has most of them
                         streams   each stream one half
    max_sequence_length: text tokens of a prompt; a multiple of the learned registers that take the place of padding
    """

    facts: ClassVar[Facts] = Facts(
        makes="video with sound",
        checkpoints=("Lightricks/LTX-2", "Lightricks/LTX-2.5-Diffusers"),
        parameters="18.9B",
        licence="LTX-2 Community License (text encoder: Gemma Terms of Use)",
        gated=True,
        guidance="classifier-free with rescale 0.7, off at 1; 3 for the video, 7 for the sound",
        advice="guidance doubles a forward of 19B: set it and audio_guidance to 1 to train without",
    )
    kinds: ClassVar[frozenset[Kind]] = frozenset({"video", "sound"})
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("LTX2VideoTransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("LTX2Pipeline",)
    published: ClassVar[Grid] = Grid(scale=32, patch=1, stride=8)
    float32: ClassVar[tuple[str, ...]] = ("vae", "audio_vae", "vocoder")

    frame_rate: float = 24.0
    audio_guidance: float | None = 7.0
    guidance_rescale: float = 0.7
    stream_weights: Literal["elements", "streams"] = "elements"
    max_sequence_length: int = 1024

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        if not self.frame_rate > 0:
            raise ValueError(f"frame_rate must be positive, got {self.frame_rate}")
        if self.audio_guidance is not None and not self.audio_guidance >= 1:
            raise ValueError(f"audio_guidance must be at least 1 (1 = none), got {self.audio_guidance}")
        if not 0 <= self.guidance_rescale <= 1:
            raise ValueError(f"guidance_rescale must be in [0, 1], got {self.guidance_rescale}")
        if self.stream_weights not in ("elements", "streams"):
            raise ValueError(f"stream_weights must be elements or streams, got {self.stream_weights!r}")
        check_count("max_sequence_length", self.max_sequence_length)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        scale = vae["spatial_compression_ratio"] or vae["patch_size"] * halved
        return Grid(scale, patch=1, stride=vae["temporal_compression_ratio"] or vae["patch_size_t"] * halved)

    def prepare(self, pipeline: Any) -> None:
        check_dynamic(pipeline.scheduler.config, "shift_terminal")

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        return (sum(math.prod(shape) for shape in self._shapes(bundle, sampling)),)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * bundle.pipeline.scheduler.config.num_train_timesteps

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> LTX2Embedding:
        # What the connectors make of a prompt is kept, not the states of all layers of the text encoder: 385 MB each.
        pipeline = bundle.pipeline
        states, mask, _, _ = pipeline.encode_prompt(
            prompts.required_texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=bundle.device,
        )
        tokens, audio_tokens, mask = pipeline.connectors(states, mask, padding_side=pipeline.tokenizer.padding_side)
        video_shape, audio_shape = self._shapes(bundle, sampling)
        return LTX2Embedding(
            tokens=tokens,
            audio_tokens=audio_tokens,
            mask=mask.bool(),
            video_shape=video_shape,
            audio_shape=audio_shape,
            weights=self._weights(video_shape, audio_shape, bundle.device),
        )

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, LTX2Embedding)
        video, audio = embedding.streams(latents)
        _, frames, height, width = embedding.video_shape
        video_velocity, audio_velocity = bundle.transformer(
            hidden_states=video.flatten(2).transpose(1, 2),
            audio_hidden_states=audio.transpose(1, 2).flatten(2),
            encoder_hidden_states=embedding.tokens,
            audio_encoder_hidden_states=embedding.audio_tokens,
            timestep=step.time,
            sigma=step.time,
            encoder_attention_mask=embedding.mask,
            audio_encoder_attention_mask=embedding.mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.frame_rate,
            audio_num_frames=embedding.audio_shape[1],
            use_cross_timestep=True,
            return_dict=False,
        )
        channels = embedding.audio_shape[0]
        sound = audio_velocity.unflatten(2, (channels, -1)).transpose(1, 2)
        return torch.cat([video_velocity.transpose(1, 2).flatten(1), sound.flatten(1)], dim=1)

    def guided(self, guidance: float) -> bool:
        return guidance != 1 or self._audio_guidance(guidance) != 1

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        """Each stream at its own scale; the rescaling looks at x_0, which is `x - sigma v`."""
        assert isinstance(at.embedding, LTX2Embedding)
        guided = []
        streams = (at.embedding.streams(tensor) for tensor in (at.latents, conditional, unconditional))
        scales = (at.guidance, self._audio_guidance(at.guidance))
        for x, own, other, scale in zip(*streams, scales, strict=True):
            sigma = at.step.sigma.view(-1, *[1] * (x.ndim - 1))
            target, clean = x - sigma * own, x - sigma * classifier_free(own, other, scale)
            clean = clean * (self.guidance_rescale * (_spread(target) / _spread(clean)) + 1 - self.guidance_rescale)
            guided.append(((x - clean) / sigma).flatten(1))
        return torch.cat(guided, dim=1)

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pipeline = bundle.pipeline
        video, audio = _streams(latents.float(), *self._shapes(bundle, sampling))
        vae, audio_vae = pipeline.vae, pipeline.audio_vae
        mean, std = (column.view(-1, 1, 1, 1) for column in (vae.latents_mean, vae.latents_std))
        time = video.new_zeros(len(video)) if vae.config.timestep_conditioning else None
        pixels = vae.decode(video * std / vae.config.scaling_factor + mean, time, return_dict=False)[0]
        # Channels and mel bins have one mean and deviation each, in the order that the transformer sees them.
        mean, std = (column.view(audio.shape[1], 1, -1) for column in (audio_vae.latents_mean, audio_vae.latents_std))
        waves = pipeline.vocoder(audio_vae.decode(audio * std + mean, return_dict=False)[0])
        return Media(
            videos=to_unit(pixels).transpose(1, 2),
            fps=self.frame_rate,
            audio=waves.float().cpu(),
            audio_rate=pipeline.vocoder.config.output_sampling_rate,
        )

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        raise ValueError(
            "supervised training of LTX-2 is not offered: diffusers does not ship the mel spectrogram that its "
            "sound autoencoder was trained on"
        )

    def _audio_guidance(self, guidance: float) -> float:
        return guidance if self.audio_guidance is None else self.audio_guidance

    def _shapes(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the video's latent and of the sound's. ValueError, with the nearest size, for what cannot be made."""
        pipeline = bundle.pipeline
        moments = pipeline.audio_sampling_rate / pipeline.audio_hop_length
        moments /= pipeline.audio_vae_temporal_compression_ratio
        config = pipeline.audio_vae.config
        audio = (
            config.latent_channels,
            round(sampling.frames / self.frame_rate * moments),
            config.mel_bins // pipeline.audio_vae_mel_compression_ratio,
        )
        return super().latent_shape(bundle, sampling), audio

    def _weights(
        self, video_shape: tuple[int, ...], audio_shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor | None:
        if self.stream_weights == "elements":
            return None
        sizes = torch.tensor([math.prod(video_shape), math.prod(audio_shape)])
        # The mean of the weights is 1, so that nothing but the balance of the streams changes.
        return (sizes.sum() / (2 * sizes)).repeat_interleave(sizes).to(device)


def _streams(
    latents: torch.Tensor, video_shape: tuple[int, ...], audio_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    video, audio = latents.split([math.prod(video_shape), math.prod(audio_shape)], dim=1)
    return video.unflatten(1, video_shape), audio.unflatten(1, audio_shape)


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row, `(N, 1, ...)`."""
    return x.std(dim=tuple(range(1, x.ndim)), keepdim=True)
