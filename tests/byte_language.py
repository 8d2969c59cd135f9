"""A checkpoint folder of a small Llama whose tokens are bytes, with a chat template and a begin token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BEGIN, END, TURN_END = "<begin>", "<end>", "<turn_end>"
# Two tokens beside the bytes: "ab" and "abc". The text "ab" is never read as the tokens of its letters.
MERGES = [("a", "b"), ("ab", "c")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<turn_end>{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, *, begin: bool = True) -> Any:
    """begin: whether a text read as it stands gets the begin token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ab", "abc", BEGIN, END, TURN_END])}
    bytes_ = Tokenizer(models.BPE(vocabulary, MERGES))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    if begin:
        bytes_.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, vocabulary[BEGIN])])
    special: dict[str, Any] = {"bos_token": BEGIN, "eos_token": END, "additional_special_tokens": [TURN_END]}
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, chat_template=template, **special)


def write_checkpoint(folder: Path, template: str | None = TEMPLATE, *, begin: bool = True, **settings: Any) -> Path:
    """Model, tokenizer and a generation config with two end tokens."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    own = tokenizer(template, begin=begin)
    ends = own.convert_tokens_to_ids([END, TURN_END])
    shape: dict[str, Any] = {
        "vocab_size": len(own),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": own.bos_token_id,
        "eos_token_id": ends[0],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**{**shape, **settings}))
    model.generation_config = GenerationConfig(eos_token_id=ends, bos_token_id=own.bos_token_id)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder
