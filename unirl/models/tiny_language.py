"""A small language model that trains from nothing on a CPU in seconds: characters as tokens, transformers' Qwen3."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.language.chat import plain
from unirl.models.language.trained import TrainedTokens
from unirl.models.language.transformers_lm import TransformersLM, packed
from unirl.types.condition import PromptTokens
from unirl.types.conversation import Conversation, Turns
from unirl.types.media import Media
from unirl.types.seed import derive_seed

_END = "<end>"


@dataclasses.dataclass(frozen=True)
class TinyLM(TransformersLM):
    """A Qwen3 of 0.6M weights by default, which responds to a prompt as it stands.

    checkpoint: a folder that `save` wrote, whose shape must equal the settings; None draws weights from `init_seed`
    characters: those that a prompt may hold, any other is an error; the one token beside them ends a response
    context:    tokens of prompt and response together
    """

    facts: ClassVar[Facts] = Facts(
        makes="text",
        checkpoints=(),
        parameters="0.6M by default",
        licence="Apache-2.0",
        plans=("tp",),
        advice="for a CPU: the quickstart's language model",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    block_names: ClassVar[tuple[str, ...]] = ("Qwen3DecoderLayer",)

    checkpoint: Path | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4
    characters: str = string.digits + string.ascii_lowercase + " +-*=?:,.()>"
    context: int = 256
    init_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of twice the heads, got {self.width} and {self.heads}")
        if not self.characters or len(set(self.characters)) < len(self.characters):
            raise ValueError(f"characters must be distinct, at least one, got {self.characters!r}")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise ValueError(f"checkpoint {self.checkpoint} holds no config.json: it is no folder that a TinyLM wrote")

    def config(self) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=len(self.characters) + 1,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(self.heads // 2, 1),
            head_dim=self.width // self.heads,
            max_position_embeddings=self.context,
            eos_token_id=len(self.characters),
            tie_word_embeddings=True,
        )

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        from transformers import Qwen3ForCausalLM

        config = self.config()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.init_seed, "tiny language model"))
            model: Any = Qwen3ForCausalLM(config)
        if self.checkpoint is not None:
            saved: Any = Qwen3ForCausalLM.from_pretrained(self.checkpoint)
            model.load_state_dict(saved.state_dict())
        return self.bundled(model.to(device, dtype), self._tokenizer())

    def tokenize(self, bundle: Bundle, prompts: Media) -> PromptTokens:
        for text in prompts.required_texts:
            self._refuse_unknown("prompt", text)
        return packed([bundle.processors["tokenizer"](text)["input_ids"] for text in prompts.required_texts])

    def conversation(self, bundle: Bundle, messages: Conversation, turns: Turns) -> TrainedTokens:
        whole = plain(messages)
        self._refuse_unknown("prompt", messages[0].text)
        self._refuse_unknown("conversation", whole.text)
        [(start, end)] = whole.spans
        number = {character: token for token, character in enumerate(self.characters)}
        tokens = [*(number[character] for character in whole.text), len(self.characters)]
        return TrainedTokens(tokens, [False] * start + [True] * (end - start + 1))

    def _refuse_unknown(self, name: str, text: str) -> None:
        if not text:
            raise ValueError(f"the {name} is empty: a response needs a character to start from")
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise ValueError(f"the {name} {text!r} must be of the characters {self.characters!r}, it has {unknown}")

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {character: number for number, character in enumerate([*self.characters, _END])}
        characters = Tokenizer(models.WordLevel(vocabulary, unk_token=_END))
        characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        characters.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=_END, model_max_length=self.context)
