"""Wan 2.1 and 2.2 (arXiv 2503.20314): videos of text, or of text and a first frame, through diffusers' pipelines."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, Facts, Point
from unirl.models.diffusion.grouped import in_ways
from unirl.models.latents import Grid
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.models.sources import to_pil
from unirl.sde.schedule import twice_shifted_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import per_row
from unirl.types.batch import dense
from unirl.types.condition import Embedding
from unirl.types.kinds import Kind
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams, SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

# Fixed: the transformer attends to the zeros behind a prompt, and that of image-to-video counts on 512 tokens.
_TEXT_TOKENS = 512
_TRAIN_STEPS = 1000
_LARGEST_480P = 480 * 832

_Facts = partial(Facts, licence="Apache-2.0", plans=("sp",))


@dataclasses.dataclass(frozen=True, eq=False)
class WanEmbedding(Embedding):
    """frames:  `(N, 4 + C, F, h, w)`, beside the latents: mask and latents of the picture and of grey after it
    picture: `(N, 257, D)`, what CLIP sees of it, where the transformer attends to that
    """

    frames: torch.Tensor | None = dense(None)
    picture: torch.Tensor | None = dense(None)


@dataclasses.dataclass(frozen=True)
class Wan(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`; 512 text tokens without a mask; guidance as in classifier_free.

    The table is that of diffusers' Euler scheduler: UniPC, which the checkpoints name, looks back on earlier steps.
    Without a shift in the recipe it is `shift_480p` up to 480 x 832 pixels and 5 above. One frame is a picture.

    kind: of checkpoint: whether it has two experts, a time for each token, a CLIP image encoder
    """

    # Bare names: self- and cross-attention.
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("WanTransformerBlock",)
    kind: ClassVar[tuple[bool, bool, bool]]
    pipelines: ClassVar[tuple[str, ...]] = ("WanPipeline", "WanImageToVideoPipeline")
    kinds: ClassVar[frozenset[Kind]] = frozenset({"video"})
    published: ClassVar[Grid] = Grid(scale=8, stride=4)
    float32: ClassVar[tuple[str, ...]] = ("vae", "image_encoder")
    fps: ClassVar[float | None] = 16.0
    shift_480p: ClassVar[float] = 3.0

    def prepare(self, pipeline: Any) -> None:
        clip = pipeline.transformer.config.image_dim is not None
        kind = (pipeline.transformer_2 is not None, pipeline.config.expand_timesteps, clip)
        if kind != self.kind:
            fitting = [family.__name__ for family in FAMILIES if family.kind == kind]
            raise ValueError(f"checkpoint {self.checkpoint} is of another kind than {type(self).__name__}: {fitting}")

    def made(self, sampling: SamplingParams) -> frozenset[Kind]:
        assert isinstance(sampling, DiffusionSamplingParams)
        return frozenset({"picture"}) if sampling.frames == 1 else self.kinds

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        own = self.shift_480p if sampling.height * sampling.width <= _LARGEST_480P else 5.0
        return twice_shifted_sigmas(sampling.steps, sampling.shift or own, _TRAIN_STEPS)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * _TRAIN_STEPS

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """A prompt of image-to-video comes with one picture, which is resized to the video's frames."""
        pipeline, pictures = bundle.pipeline, _pictures(prompts)
        tokens = _text_states(pipeline, prompts.required_texts, bundle.device)
        beside = pipeline.transformer.config.in_channels != pipeline.vae.config.z_dim
        if not pictures and not beside:
            return WanEmbedding(tokens=tokens)
        if not pictures:
            raise ValueError(f"{self.checkpoint} makes videos of a first frame: give each prompt a picture (sources)")
        pixels = pipeline.video_processor.preprocess(pictures, height=sampling.height, width=sampling.width)
        pixels = pixels.to(bundle.device, torch.float32)[:, :, None]
        shape = self.latent_shape(bundle, sampling)
        if beside:
            seen = None if pipeline.image_encoder is None else pipeline.encode_image(pictures, bundle.device)
            frames = _begun(pipeline, pixels, sampling.frames)
            return WanEmbedding(tokens=tokens, frames=frames, picture=seen)
        if not pipeline.config.expand_timesteps:
            raise ValueError(f"{self.checkpoint} makes videos of text alone, and the prompts come with pictures")
        given = torch.zeros(len(pixels), *shape, device=bundle.device)
        given[:, :, :1] = latent_space.encode(pipeline.vae, pixels)
        weights = torch.ones(shape, device=bundle.device)
        weights[:, 0] = 0
        return WanEmbedding(tokens=tokens, weights=weights, given=given)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return bundle.transformer(**_inputs(bundle, latents, step, embedding), return_dict=False)[0]

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        media = super().decode(bundle, latents, sampling)
        assert media.videos is not None
        return Media(images=media.videos[:, 0]) if sampling.frames == 1 else media

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        videos = media.videos if media.images is None else media.images[:, None]
        return super().encode_media(bundle, Media(videos=videos), sampling)

    def recompute_blocks(self, bundle: Bundle) -> None:
        bundle.trained.enable_gradient_checkpointing()  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class Wan21(Wan):
    """Wan 2.1 text-to-video."""

    facts: ClassVar[Facts] = _Facts(
        makes="video of text",
        checkpoints=("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        parameters="1.4B / 14.3B",
        guidance="classifier-free, off at 1; 5 is usual",
        advice="Flow-GRPO: 20 steps, 33 frames, guidance 4.5, lr 1e-4, KL 0.004 (wan21_flow_grpo); "
        "ftfy, where installed, changes texts: have it everywhere or nowhere",
    )
    kind: ClassVar[tuple[bool, bool, bool]] = (False, False, False)


@dataclasses.dataclass(frozen=True)
class Wan21ImageToVideo(Wan):
    """Wan 2.1 image-to-video: the picture enters as latents beside those of the video, and through CLIP."""

    facts: ClassVar[Facts] = _Facts(
        makes="video of text and a first frame",
        checkpoints=("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        parameters="14.3B",
        guidance="classifier-free, off at 1; 5 is usual",
        advice="works without ftfy, which diffusers' own pipeline does not",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (*ATTENTION, "add_k_proj", "add_v_proj")
    kind: ClassVar[tuple[bool, bool, bool]] = (False, False, True)


@dataclasses.dataclass(frozen=True)
class Wan22TI2V5B(Wan):
    """Wan 2.2 TI2V-5B: videos of text, or of text and a first frame, which is then given and not generated."""

    facts: ClassVar[Facts] = _Facts(
        makes="video of text, or of text and a first frame",
        checkpoints=("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
        parameters="5.0B",
        guidance="classifier-free, off at 1; 5 is usual",
        advice="made for 704 x 1280 and 24 frames a second",
    )
    kind: ClassVar[tuple[bool, bool, bool]] = (False, True, False)
    published: ClassVar[Grid] = Grid(scale=16, stride=4)
    shift_480p: ClassVar[float] = 5.0
    fps: ClassVar[float | None] = 24.0


@dataclasses.dataclass(frozen=True)
class Wan22A14B(Wan):
    """Wan 2.2 A14B: one expert makes the steps of high noise, another those of low noise.

    boundary:     the first expert has the model times from 1000 x this on
    low_guidance: guidance scale of the second expert; None takes that of the first
    trained:      which of them; the other stays as it is, and its steps carry no gradient
    """

    facts: ClassVar[Facts] = _Facts(
        makes="video of text, or of text and a first frame",
        checkpoints=("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        parameters="2 x 14.3B",
        guidance="classifier-free, off at 1; 4 in high noise and 3 in low (T2V), 3.5 in both (I2V)",
        advice="boundary 0.875 for T2V, 0.9 for I2V; LoRA on the high-noise expert alone needs the least memory",
    )
    kind: ClassVar[tuple[bool, bool, bool]] = (True, False, False)

    boundary: float = 0.875
    low_guidance: float | None = None
    trained: Literal["high", "low", "both"] = "both"

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        if not 0 < self.boundary < 1:
            raise ValueError(f"boundary must be in (0, 1), got {self.boundary}")
        if self.low_guidance is not None and not self.low_guidance >= 1:
            raise ValueError(f"low_guidance must be at least 1 (1 = none) or null, got {self.low_guidance}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The transformer is both experts in one module; one that is not trained comes in `frozen_dtype`."""
        from unirl.models.diffusion.wan_modules import Experts

        frozen = frozen_dtype or dtype
        high, low = (dtype if self.trained in (name, "both") else frozen for name in ("high", "low"))
        pipeline = self.loaded(device, {"default": frozen, "transformer": high, "transformer_2": low})
        if pipeline.config.boundary_ratio != self.boundary:
            found = pipeline.config.boundary_ratio
            raise ValueError(f"boundary={self.boundary}, but the experts of {self.checkpoint} meet at {found}")
        bundle = self.bundled(pipeline)
        experts = Experts(bundle.transformer, bundle.frozen.pop("transformer_2"))
        part = {"high": experts.transformer, "low": experts.transformer_2, "both": None}[self.trained]
        return dataclasses.replace(bundle, transformer=experts, part=part)

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        schedule = super().schedule(bundle, sampling)
        stochastic = sampling.resolve_sde_indices(0)
        if stochastic and self.trained != "both":
            high = self._high(schedule.times)
            own = (high if self.trained == "high" else ~high).nonzero().flatten().tolist()
            if not set(own) & set(stochastic):
                raise ValueError(
                    f"trained={self.trained}: that expert makes the steps {own}, but the stochastic ones, which train, "
                    f"are {list(stochastic)}; choose others in sampling.sde"
                )
        return schedule

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        inputs = _inputs(bundle, latents, step, embedding)

        def forward(rows: list[int], *, expert: Any) -> torch.Tensor:
            own = {name: None if value is None else value[rows] for name, value in inputs.items()}
            return expert(**own, return_dict=False)[0]

        experts: Any = bundle.transformer
        forwards = [partial(forward, expert=expert) for expert in (experts.transformer, experts.transformer_2)]
        return in_ways(bundle, [(0 if high else 1, None) for high in self._high(step.time).tolist()], forwards)

    def guided(self, guidance: float) -> bool:
        return guidance != 1 or self.low_guidance not in (None, 1)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        low = at.guidance if self.low_guidance is None else self.low_guidance
        scales = torch.where(self._high(at.step.time), at.guidance, low)
        return unconditional + per_row(scales, conditional) * (conditional - unconditional)

    def adapter_files(self, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """That of the low-noise expert is for `load_lora_weights(..., load_into_transformer_2=True)`."""
        files = {"high": "pytorch_lora_weights.safetensors", "low": "pytorch_lora_weights_2.safetensors"}
        if self.trained != "both":
            return {files[self.trained]: weights}
        prefixes = {"high": "transformer.", "low": "transformer_2."}
        return {
            files[expert]: {name.removeprefix(own): w for name, w in weights.items() if name.startswith(own)}
            for expert, own in prefixes.items()
        }

    def _high(self, time: torch.Tensor) -> torch.Tensor:
        return time >= self.boundary * _TRAIN_STEPS


FAMILIES: tuple[type[Wan], ...] = (Wan21, Wan21ImageToVideo, Wan22TI2V5B, Wan22A14B)


def _inputs(bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding) -> dict[str, torch.Tensor | None]:
    """What a transformer is called with."""
    assert isinstance(embedding, WanEmbedding)
    times = step.time
    if bundle.pipeline.config.expand_timesteps:
        # A time for each 2 x 2 patch: that of given frames is 0.
        frames, height, width = latents.shape[2:]
        weights = torch.ones(frames) if embedding.weights is None else embedding.weights[0, :, 0, 0]
        generated = (weights != 0).to(latents.device)
        times = step.time[:, None] * generated.repeat_interleave(height * width // 4)
    return {
        "hidden_states": latents if embedding.frames is None else torch.cat([latents, embedding.frames], dim=1),
        "timestep": times,
        "encoder_hidden_states": embedding.tokens,
        "encoder_hidden_states_image": embedding.picture,
    }


def _text_states(pipeline: Any, texts: list[str], device: torch.device) -> torch.Tensor:
    """`(N, 512, D)`, zeros behind each prompt. The pipeline's own would do, but that of image-to-video needs ftfy."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    cleaned = [prompt_clean(text) for text in texts]
    length = {"padding": "max_length", "truncation": True, "max_length": _TEXT_TOKENS}
    encoded = pipeline.tokenizer(cleaned, return_tensors="pt", **length).to(device)
    states = pipeline.text_encoder(encoded.input_ids, encoded.attention_mask).last_hidden_state
    return states * encoded.attention_mask[..., None]


def _pictures(prompts: Media) -> list[Image]:
    """The first frame that each prompt comes with, as the processors take it; none where no prompt has one."""
    counts = {len(pictures) for pictures in prompts.sources or []}
    if not counts - {0}:
        return []
    if counts != {1}:
        raise ValueError(f"this family takes one picture a prompt, its first frame, got {sorted(counts)}")
    return [to_pil(picture) for [picture] in prompts.sources or []]


def _begun(pipeline: Any, pixels: torch.Tensor, frames: int) -> torch.Tensor:
    """Mask and latents of a video of which only the first frame is known: `WanEmbedding.frames`."""
    grey = pixels.expand(-1, -1, frames, -1, -1) * (torch.arange(frames, device=pixels.device) == 0)[:, None, None]
    latents = latent_space.encode(pipeline.vae, grey)
    mask = torch.zeros_like(latents[:, :1]).expand(-1, pipeline.vae_scale_factor_temporal, -1, -1, -1).clone()
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)
