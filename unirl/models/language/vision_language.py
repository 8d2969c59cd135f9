"""Vision-language models of transformers that read pictures as runs of tokens: Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch

from unirl.data.pictures import read_picture
from unirl.models.base import Bundle, Facts
from unirl.models.language.attention import Layout, install
from unirl.models.language.chat import Chat
from unirl.models.language.parity import refuse_other_forwards, trial_tokens
from unirl.models.language.trained import TrainedTokens
from unirl.models.language.transformers_lm import TransformersLM, packed, refuse_length
from unirl.models.pictures import as_pil, source_pictures
from unirl.models.pretrained import check_checkpoint, check_class, resolve
from unirl.models.sources import to_pil
from unirl.types.condition import PromptTokens
from unirl.types.conversation import Conversation, Message, Turns
from unirl.types.media import Media

if TYPE_CHECKING:
    from PIL.Image import Image

_T = TypeVar("_T")
_MODELS = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
_TOWER = "visual"
_PICTURE = Path("picture")  # all that a chat template knows of one
_VIDEO_SETTINGS = "video_preprocessor_config.json"


@dataclasses.dataclass(frozen=True)
class VisionLanguage(TransformersLM):
    """A checkpoint of Qwen2.5-VL or Qwen3-VL. A prompt is its pictures, then its text, by the chat template.

    Prompts of a step may come with pictures of any number and size, or without any.

    checkpoint:         a hub id, a folder, or `random:qwen2_5_vl` and `random:qwen3_vl`
    system:             the system message of the chat template
    template_arguments: further arguments of the chat template
    max_prompt_tokens:  a longer prompt, its pictures counted, is an error: to cut it would cut a picture
    min_pixels, max_pixels: a picture is scaled to an area between these; null takes the checkpoint's own, which may
                        be thousands of tokens a picture
    trained:            text: the tower that sees the pictures stays as it is, and LoRA wraps the text model alone; all:
                        LoRA wraps what its targets name in the tower too (`qkv`, `attn.proj`)
    """

    facts: ClassVar[Facts] = Facts(
        makes="text from pictures",
        checkpoints=("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"),
        parameters="3.8B, 8.3B, 8.8B",
        licence="Qwen Research (Qwen2.5-VL-3B), Apache-2.0 (the others)",
        plans=("tp",),
        advice="set max_pixels: a picture is a token for every 28 x 28 pixels of it (Qwen3-VL: 32 x 32, no tp)",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    block_names: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer")
    reads_pictures: ClassVar[bool] = True

    checkpoint: str
    system: str | None = None
    template_arguments: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    max_prompt_tokens: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    trained: Literal["text", "all"] = "text"

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, *_MODELS, index="config.json")
        for name in ("max_prompt_tokens", "min_pixels", "max_pixels"):
            value = self.__dict__[name]
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or null, got {value}")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")
        if self.trained not in ("text", "all"):
            raise ValueError(f"trained must be text or all, got {self.trained!r}")

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(resolve(self.checkpoint))

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """A model whose packed forward is not its own forward is refused. frozen_dtype: of the tower, where it is."""
        from transformers import AutoModelForImageTextToText

        folder, config = resolve(self.checkpoint), self.config()
        check_class(self.checkpoint, (config.architectures or [config.model_type])[0], _MODELS)
        processors = self._processors(folder, config.vision_config)
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        bundle = Bundle(transformer=model.to(device), processors=processors)
        trial = _trial(config, self.vocabulary(bundle))
        refuse_other_forwards(
            self,
            bundle,
            trial,
            own=lambda row, prompt: model(**_arguments(config, row, trial, prompt), use_cache=False).logits,
            install=lambda: install(model.base_model.language_model),
            avoid=_marks(config),
        )
        if self.trained == "text":
            # Beside the model, what is trained, wrapped, checkpointed and sharded is the rest of it.
            bundle.frozen[_TOWER] = model.base_model.visual.to(frozen_dtype or dtype)
            del model.base_model.visual
        return bundle

    def tokenize(self, bundle: Bundle, prompts: Media) -> PromptTokens:
        pairs = zip(prompts.required_texts, source_pictures(prompts), strict=True)
        rows, pictures = zip(*(self._prompt(bundle, text, own) for text, own in pairs), strict=True)
        return dataclasses.replace(packed(list(rows)), pictures=list(pictures))

    def divided(self, bundle: Bundle, picture: np.ndarray, texts: list[str]) -> tuple[PromptTokens, list[list[int]]]:
        """Prompts about one picture `(H, W, 3)` uint8: what all of them start with, the picture in it, and the rests.

        A rest has a token at least: the one behind which the model answers.
        """
        rows = [self._chat(bundle).opened((Message("user", (_PICTURE, text)),)) for text in texts]
        cut = _cut(bundle, [as_pil(picture)])
        repeats = [_repeats(bundle, row, cut, text) for row, text in zip(rows, texts, strict=True)]
        columns = zip(*(row[:-1] for row in rows), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        model: Any = bundle.transformer
        assert model.config.image_token_id in rows[0][:shared], "the template sets pictures before the text"
        start = packed([_expanded(rows[0][:shared], repeats[0][:shared])])
        for text, row in zip(texts, rows, strict=True):
            refuse_length(text, [*start.tokens.tolist(), *row[shared:]], self.max_prompt_tokens)
        return dataclasses.replace(start, pictures=[cut]), [row[shared:] for row in rows]

    def conversation(self, bundle: Bundle, messages: Conversation, turns: Turns) -> TrainedTokens:
        row = self._chat(bundle).trained(messages, turns, self.end_tokens(bundle))
        pictures = [to_pil(read_picture(path)) for message in messages for path in message.pictures]
        cut = _cut(bundle, pictures)
        repeats = _repeats(bundle, row.tokens, cut, messages[0].text)
        whole = TrainedTokens(_expanded(row.tokens, repeats), _expanded(row.trained, repeats), cut or None)
        model: Any = bundle.transformer
        if model.config.image_token_id in whole.tokens[whole.prompt :]:
            raise ValueError(
                "a picture stands behind the first turn that is trained: train the last turn only "
                "(data.limit.turns=last)"
            )
        refuse_length(messages[0].text, whole.tokens[: whole.prompt], self.max_prompt_tokens)
        return whole

    def positions(self, bundle: Bundle, prompts: PromptTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Time, height and width of each token. ValueError where a row has not a placeholder for every feature."""
        model: Any = bundle.transformer
        rows, following = [], []
        pictures = prompts.pictures or [{} for _ in prompts.lengths]
        for tokens, own in zip(prompts.tokens.split(prompts.lengths.tolist()), pictures, strict=True):
            grids = own.get("image_grid_thw")
            here = tokens == model.config.image_token_id
            features = 0 if grids is None else _features(grids, model.config.vision_config.spatial_merge_size)
            if int(here.sum()) != features:
                raise ValueError(
                    f"the prompt has {int(here.sum())} placeholders of pictures, its pictures are {features} features: "
                    "placeholders must be expanded exactly once, for the same sizes"
                )
            places, delta = model.base_model.get_rope_index(tokens[None], here[None].int(), image_grid_thw=grids)
            rows.append(places[:, 0].T)
            following.append(len(tokens) + int(delta))
        return torch.cat(rows), torch.tensor(following)

    def hidden_states(
        self,
        bundle: Bundle,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        *,
        pictures: list[dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        model: Any = bundle.transformer
        embeddings = model.get_input_embeddings()(tokens)
        seen = [own for own in pictures or () if own]
        layers: dict[str, Any] = {}
        if seen:
            features, deeper = _look(bundle, seen)
            # Prompts stand before responses, in which a model may have written a placeholder of no picture.
            places = (tokens.flatten() == model.config.image_token_id).nonzero()[: len(features), 0]
            assert len(places) == len(features), "`positions` has looked at every prompt"
            flat = embeddings.flatten(0, 1)
            embeddings = flat.index_copy(0, places, features.to(flat.dtype)).view_as(embeddings)
            if deeper:
                mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_fill(0, places, True)
                layers = {"visual_pos_masks": mask.view_as(tokens), "deepstack_visual_embeds": deeper}
        return model.base_model.language_model(
            inputs_embeds=embeddings, position_ids=positions.permute(2, 0, 1), use_cache=False, layout=layout, **layers
        ).last_hidden_state

    def adapter_excludes(self) -> str | None:
        return rf".*\b{_TOWER}\b.*" if self.trained == "text" else None

    def save(self, bundle: Bundle, folder: Path) -> None:
        from transformers.utils.hub import cached_file

        with _whole(bundle):
            TransformersLM.save(self, bundle, folder)
        bundle.processors["image_processor"].save_pretrained(folder)
        # Ours read no videos; who loads the folder may.
        settings = cached_file(resolve(self.checkpoint), _VIDEO_SETTINGS, _raise_exceptions_for_missing_entries=False)
        if settings is not None:
            shutil.copyfile(settings, folder / _VIDEO_SETTINGS)

    def _processors(self, folder: str, vision: Any) -> dict[str, Any]:
        """The parts of the checkpoint's processor.

        The whole needs torchvision, for its videos, and where that is there it scales pictures by another library: the
        same prompt would be other pixels on another machine.
        """
        from transformers import AutoImageProcessor, AutoTokenizer
        from transformers.processing_utils import ProcessorMixin

        tokenizer = AutoTokenizer.from_pretrained(folder)
        whole = ProcessorMixin.get_processor_dict(folder)[0]
        if "chat_template" in whole:
            tokenizer.chat_template = whole["chat_template"]
        if tokenizer.chat_template is None:
            raise ValueError(f"checkpoint {self.checkpoint} has no chat template, which says where pictures stand")
        images: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        cut = (images.patch_size, images.temporal_patch_size, images.merge_size)
        read = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        if cut != read:
            raise ValueError(
                f"checkpoint {self.checkpoint}: its processor cuts pictures into patches of {cut} (side, frames, "
                f"merged), its model reads {read}"
            )
        images.size = dataclasses.replace(
            images.size,
            shortest_edge=self.min_pixels or images.size.shortest_edge,
            longest_edge=self.max_pixels or images.size.longest_edge,
        )
        if images.size.shortest_edge > images.size.longest_edge:
            raise ValueError(
                f"pictures of {images.size.shortest_edge} to {images.size.longest_edge} pixels: set min_pixels and "
                "max_pixels both, one of them contradicts the checkpoint's other"
            )
        return {"tokenizer": tokenizer, "image_processor": images}

    def _prompt(self, bundle: Bundle, text: str, pictures: list[Image]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Token ids with a placeholder for every feature of the pictures, and the pictures as the tower takes them."""
        row = self._chat(bundle).opened((Message("user", (*[_PICTURE] * len(pictures), text)),))
        cut = _cut(bundle, pictures)
        expanded = _expanded(row, _repeats(bundle, row, cut, text))
        refuse_length(text, expanded, self.max_prompt_tokens)
        return expanded, cut

    def _chat(self, bundle: Bundle) -> Chat:
        return Chat(bundle.processors["tokenizer"], self.system, self.template_arguments)


def _expanded(row: list[_T], repeats: list[int]) -> list[_T]:
    return [item for item, times in zip(row, repeats, strict=True) for _ in range(times)]


def _cut(bundle: Bundle, pictures: list[Image]) -> dict[str, torch.Tensor]:
    """Pictures in patches, as the tower takes them; nothing where there are none."""
    if not pictures:
        return {}
    patches = bundle.processors["image_processor"](images=pictures, return_tensors="pt")
    return {name: patches[name] for name in ("pixel_values", "image_grid_thw")}


def _repeats(bundle: Bundle, row: list[int], cut: dict[str, torch.Tensor], text: str) -> list[int]:
    """How often each token of a rendered row is to stand: a placeholder once a feature of its picture, others once."""
    model: Any = bundle.transformer
    mark, merge = model.config.image_token_id, model.config.vision_config.spatial_merge_size
    runs = [_features(grid, merge) for grid in cut["image_grid_thw"]] if cut else []
    if row.count(mark) != len(runs):
        name = bundle.processors["tokenizer"].decode([mark])
        raise ValueError(
            f"the text {text!r} comes with {len(runs)} pictures and has {row.count(mark)} placeholders once the chat "
            f"template is filled in: leave {name} out of texts, the template sets it"
        )
    following = iter(runs)
    return [next(following) if token == mark else 1 for token in row]


def _look(bundle: Bundle, pictures: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features `(F, D)` of all pictures, and those that are added after the first layers; none in Qwen2.5-VL."""
    model: Any = bundle.transformer
    tower = _tower(bundle)
    pixels = torch.cat([own["pixel_values"] for own in pictures]).to(bundle.device, tower.dtype)
    grids = torch.cat([own["image_grid_thw"] for own in pictures]).to(bundle.device)
    seen = tower(pixels, grid_thw=grids)
    return seen.pooler_output, seen.deepstack_features if model.config.model_type == "qwen3_vl" else []


def _tower(bundle: Bundle) -> Any:
    if _TOWER in bundle.frozen:
        return bundle.frozen[_TOWER]
    model: Any = bundle.transformer
    return model.base_model.visual


def _features(grids: torch.Tensor, merge: int) -> int:
    """Of pictures whose patches are `grids` `(..., 3)`."""
    return int((grids.prod(-1) // merge**2).sum())


@contextmanager
def _whole(bundle: Bundle) -> Iterator[None]:
    """The model with its tower in its place."""
    model: Any = bundle.transformer
    if _TOWER not in bundle.frozen:
        yield
        return
    model.base_model.visual = bundle.frozen[_TOWER]
    try:
        yield
    finally:
        del model.base_model.visual


def _marks(config: Any) -> tuple[int, ...]:
    """The tokens that mean more to the model than a word."""
    return config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id


def _trial(config: Any, vocabulary: int) -> PromptTokens:
    """A prompt without pictures, and one with a small picture that is twice as wide as high."""
    vision = config.vision_config
    grid = torch.tensor([[1, 2 * vision.spatial_merge_size, 4 * vision.spatial_merge_size]])
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(int(grid.prod()), patch, generator=torch.Generator().manual_seed(0))
    words = trial_tokens(6, vocabulary, avoid=_marks(config)).tolist()
    run = [config.image_token_id] * _features(grid, vision.spatial_merge_size)
    seen = [words[3], config.vision_start_token_id, *run, config.vision_end_token_id, *words[4:]]
    pictures = [{}, {"pixel_values": pixels, "image_grid_thw": grid}]
    return dataclasses.replace(packed([words[:3], seen]), pictures=pictures)


def _arguments(config: Any, row: torch.Tensor, prompts: PromptTokens, prompt: int) -> dict[str, torch.Tensor]:
    """`row` `(1, T)`, which answers a prompt, as the model's own forward takes it."""
    assert prompts.pictures is not None
    pictures = {name: value.to(row.device) for name, value in prompts.pictures[prompt].items()}
    return {"input_ids": row, "mm_token_type_ids": (row == config.image_token_id).int(), **pictures}
