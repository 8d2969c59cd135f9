"""What all language models of transformers share, whatever loads them and whatever a prompt looks like."""

from __future__ import annotations

import functools
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from unirl.models.base import Bundle, LanguageFamily, TokenStep
from unirl.models.language import decode, split
from unirl.models.language.attention import Layout, install
from unirl.models.language.config_facts import context_length
from unirl.models.language.parity import refuse_other_forwards, trial_tokens
from unirl.types.condition import PromptTokens


class TransformersLM(LanguageFamily):
    """A model of the library with a language head, and its tokenizer."""

    @abstractmethod
    def config(self) -> Any:
        """The library's config of the model, without its weights."""

    def split_refusal(self, axis: str, size: int) -> str | None:
        return split.refusal(self.config().get_text_config(), axis, size)

    def split(self, bundle: Bundle, axis: str, mesh: torch.distributed.DeviceMesh) -> frozenset[str]:
        return split.split(bundle, axis, mesh)

    def bundled(self, model: Any, tokenizer: Any) -> Bundle:
        """A loaded model, ready for packed forwards."""
        bundle = Bundle(transformer=model, processors={"tokenizer": tokenizer})
        words = trial_tokens(8, self.vocabulary(bundle)).tolist()
        refuse_other_forwards(
            self,
            bundle,
            packed([words[:3], words[3:]]),
            own=lambda row, _: model(input_ids=row, use_cache=False).logits,
            install=lambda: install(model.base_model),
        )
        return bundle

    def blocks(self, bundle: Bundle) -> tuple[str, ...]:
        model: Any = bundle.transformer
        return self.block_names or tuple(model._no_split_modules)  # noqa: SLF001 - the library's own name of its layers

    def positions(self, bundle: Bundle, prompts: PromptTokens) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.arange(length) for length in prompts.lengths.tolist()]
        return torch.cat(rows)[:, None], prompts.lengths

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
        return model.base_model(
            input_ids=tokens, position_ids=positions[..., 0], use_cache=False, layout=layout
        ).last_hidden_state

    def token_step(self, bundle: Bundle) -> TokenStep:
        model: Any = bundle.transformer
        if not decode.knows(model.base_model):
            return super().token_step(bundle)
        read, device = decode.Decoder(model.base_model), bundle.device
        return lambda tokens, positions, layout: read(tokens.to(device), positions[:, 0].to(device), layout)

    def logits(self, bundle: Bundle, hidden: torch.Tensor) -> torch.Tensor:
        model: Any = bundle.transformer
        return model.get_output_embeddings()(hidden)

    def vocabulary(self, bundle: Bundle) -> int:
        model: Any = bundle.transformer
        return model.get_output_embeddings().weight.shape[0]

    def hidden_size(self, bundle: Bundle) -> int:
        model: Any = bundle.transformer
        return model.get_output_embeddings().weight.shape[1]

    def context_length(self, bundle: Bundle) -> int:
        model: Any = bundle.transformer
        return context_length(model.config.get_text_config())

    def end_tokens(self, bundle: Bundle) -> tuple[int, ...]:
        model: Any = bundle.transformer
        named = [model.generation_config.eos_token_id, bundle.processors["tokenizer"].eos_token_id]
        flat = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
        return tuple(dict.fromkeys(token for token in flat if token is not None))

    def special_tokens(self, bundle: Bundle) -> dict[str, int]:
        known = bundle.processors["tokenizer"].added_tokens_decoder
        return {token.content: number for number, token in known.items() if token.special}

    def decode(self, bundle: Bundle, tokens: list[int]) -> str:
        return bundle.processors["tokenizer"].decode(tokens, skip_special_tokens=True)

    def recompute_blocks(self, bundle: Bundle) -> None:
        from torch.utils.checkpoint import checkpoint
        from transformers.modeling_layers import GradientCheckpointingLayer

        model: Any = bundle.transformer
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no blocks to recompute: set gradient_checkpointing=false")
        # The library's own way works in training mode only, in which some of these layers drop out.
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def save(self, bundle: Bundle, folder: Path) -> None:
        model: Any = bundle.transformer
        model.save_pretrained(folder)
        bundle.processors["tokenizer"].save_pretrained(folder)


def packed(rows: list[list[int]]) -> PromptTokens:
    """Token ids of each prompt, end to end."""
    lengths = torch.tensor([len(row) for row in rows])
    return PromptTokens(tokens=torch.tensor([token for row in rows for token in row]), lengths=lengths)


def refuse_length(text: str, row: list[int], limit: int | None) -> None:
    """ValueError for a prompt without tokens, or with more than `limit`."""
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    if not row:
        raise ValueError(f"the prompt {shown!r} has no tokens: a response needs one to start from")
    if limit is not None and len(row) > limit:
        raise ValueError(f"the prompt {shown!r} has {len(row)} tokens, more than max_prompt_tokens={limit}")
