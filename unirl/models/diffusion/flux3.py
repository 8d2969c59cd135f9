"""FLUX.3 klein, making pictures and editing them, through the modules of diffusers' Flux3ModularPipeline."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.flux2 import PatchedFamily, from_pixels
from unirl.models.diffusion.grouped import in_ways
from unirl.models.pretrained import check_checkpoint, ragged_embedding, resolve
from unirl.models.published import ATTENTION
from unirl.models.sources import EditEmbedding, to_pil
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_PARTS = ("transformer", "text_encoder", "vae")
_WINDOW = 80  # a prompt is padded to a multiple of it, and the transformer sees the padding
_POSITION_SCALE = 0.5  # of rows and columns


@dataclasses.dataclass(frozen=True)
class FLUX3(PatchedFamily):
    """Velocity `eps - x0` at time sigma; two guidance branches.

    Rows whose prompts fill different windows of 80 tokens, or whose source pictures have other sizes, are predicted in
    forwards of their own. The distilled checkpoint is a flow map: it predicts the mean velocity of a whole step, so it
    samples, but neither stochastic steps nor losses on single points have a meaning.

    max_sequence_length: tokens of a prompt
    text_layers:         whose hidden states are the embedding
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("black-forest-labs/flux-3-image-klein-base", "black-forest-labs/flux-3-image-klein"),
        parameters="5.5B / 5.5B",
        licence="FLUX Kommunity License",
        gated=True,
        guidance="classifier-free, off at 1; 4 is usual. Distilled (without `base`): none",
        advice="the base checkpoint, 50 steps to evaluate; the distilled one (16 steps) cannot be trained",
    )
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock")
    pipelines: ClassVar[tuple[str, ...]] = ("Flux3ModularPipeline", "Flux3DistilledModularPipeline")

    max_sequence_length: int = 8192
    text_layers: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 28, 32)

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, *self.pipelines, index="modular_model_index.json")

    def loaded(self, device: torch.device, dtypes: dict[str, torch.dtype]) -> Any:
        """With the tokenizer alone: its processor needs torchvision, for pictures that the text encoder never gets."""
        from diffusers import Flux3ModularPipeline, ModularPipeline
        from transformers import AutoTokenizer

        found = ModularPipeline.from_pretrained(resolve(self.checkpoint))
        if not isinstance(found, Flux3ModularPipeline):
            raise ValueError(f"{self.checkpoint} holds a {type(found).__name__}, this family is FLUX.3")
        pipeline: Any = found
        pipeline.load_components(names=list(_PARTS), dtype={**dtypes, "vae": torch.float32})
        absent = [name for name in _PARTS if pipeline.components[name] is None]
        if absent:
            raise ValueError(f"{absent} of {self.checkpoint} could not be loaded; diffusers' warning says why")
        source = pipeline.get_component_spec("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source.pretrained_model_name_or_path, subfolder=source.subfolder)
        pipeline.update_components(tokenizer=tokenizer)
        pipeline.to(device)
        pipeline.name_or_path = resolve(self.checkpoint)  # as other pipelines have it; an exported adapter names it
        pipeline.vae.enable_slicing()
        return pipeline

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """The blocks make the scheduler with the shift of the model; no checkpoint has one of its own."""
        if _is_flow_map(bundle) and (sampling.guidance != 1 or sampling.resolve_sde_indices(0)):
            raise ValueError(
                f"{self.checkpoint} is a flow map, distilled for deterministic steps without guidance: "
                f"sampling.guidance=1 and sampling.noise_level=0, got {sampling.guidance} and {sampling.noise_level}"
            )
        return super().sigmas(bundle, sampling)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def refuse_points(self, bundle: Bundle) -> None:
        if _is_flow_map(bundle):
            raise ValueError(
                f"{self.checkpoint} is a flow map: it has no velocity at a point, train the base checkpoint"
            )

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """The mask of the embedding is the window, not the prompt in it."""
        texts = ragged_embedding([self._hidden_states(bundle, text) for text in prompts.required_texts])
        sources = None
        if prompts.sources is not None:
            sources = [_source_latents(bundle, pictures) for pictures in prompts.sources]
        return EditEmbedding(tokens=texts.tokens, mask=texts.mask, sources=sources)

    def _hidden_states(self, bundle: Bundle, text: str) -> torch.Tensor:
        """`(window, D)`"""
        tokenizer = bundle.pipeline.tokenizer
        message = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        limit = self.max_sequence_length
        length = len(tokenizer(chat, truncation=True, max_length=limit).input_ids)
        window = min(-(-length // _WINDOW) * _WINDOW, limit)
        padding = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": window}
        inputs = tokenizer(chat, return_tensors="pt", **padding).to(bundle.device)
        # Position 1 of all padding is that of the training environment; transformers 5 would take another.
        positions = torch.arange(window, device=bundle.device)[None].masked_fill(inputs.attention_mask == 0, 1)
        states = bundle.frozen["text_encoder"](
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=positions,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return torch.cat([states[layer][0] for layer in self.text_layers], dim=-1)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert isinstance(embedding, EditEmbedding)
        assert embedding.mask is not None
        windows = embedding.mask.sum(1).tolist()
        sources = [[]] * len(latents) if embedding.sources is None else embedding.sources

        def forward(rows: list[int], *, edit: bool) -> torch.Tensor:
            own, window = embedding.select(rows), windows[rows[0]]
            # Source pictures have blocks of their own, which a row without any sees for the sake of other ranks.
            pictures = (own.stacked_sources() or [latents[rows]]) if edit else []
            times, targets = step.time[rows], step.sigma_next[rows] if _is_flow_map(bundle) else None
            return _velocity(bundle, latents[rows], times, own.tokens[:, :window], targets=targets, sources=pictures)

        rows = [
            (1 if own else 0, (window, tuple(picture.shape for picture in own)))
            for window, own in zip(windows, sources, strict=True)
        ]
        return in_ways(bundle, rows, [partial(forward, edit=False), partial(forward, edit=True)])

    def save(self, bundle: Bundle, folder: Path) -> None:
        bundle.pipeline.save_pretrained(str(folder), overwrite_modular_index=True)


def _velocity(
    bundle: Bundle,
    latents: torch.Tensor,
    times: torch.Tensor,
    texts: torch.Tensor,
    *,
    targets: torch.Tensor | None,
    sources: list[torch.Tensor],
) -> torch.Tensor:
    """One forward. texts: `(N, window, D)`; targets: the ends of a flow map's steps; sources: `(N, C, h, w)` each."""
    window, device = texts.shape[1], latents.device
    text_ids = torch.zeros(window, 4, device=device)
    text_ids[:, 3] = torch.arange(window, device=device)
    velocity = bundle.transformer(
        hidden_states=latents.flatten(2).mT,
        encoder_hidden_states=texts,
        timestep=times,
        target_timestep=targets,
        img_ids=_positions(0, latents),
        txt_ids=text_ids,
        image_cond_hidden_states=torch.cat([source.flatten(2) for source in sources], dim=2).mT if sources else None,
        image_cond_ids=torch.cat([_positions(-1 - n, source) for n, source in enumerate(sources)]) if sources else None,
        return_dict=False,
    )[0]
    return velocity.mT.unflatten(2, latents.shape[-2:])


def _source_latents(bundle: Bundle, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sources `(3, H, W)` in [0, 1] of one prompt to latents: one alone is kept whole, several are cut to fit."""
    pipeline = bundle.pipeline
    mode = "fill" if len(pictures) == 1 else "crop"
    pixels = [pipeline.image_processor.preprocess(to_pil(picture), resize_mode=mode)[0] for picture in pictures]
    return [from_pixels(pipeline.vae, picture)[0] for picture in pixels]


def _positions(layer: int, picture: torch.Tensor) -> torch.Tensor:
    """`(h w, 4)`: time, row, column and layer of each token of `(N, C, h, w)`; sources lie on layers -1, -2, ..."""
    rows, columns = (_POSITION_SCALE * torch.arange(side) for side in picture.shape[-2:])
    return torch.cartesian_prod(torch.zeros(1), rows, columns, torch.tensor([float(layer)])).to(picture.device)


def _is_flow_map(bundle: Bundle) -> bool:
    return bundle.pipeline.transformer.config.flow_map
