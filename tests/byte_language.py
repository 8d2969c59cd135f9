"""Checkpoint folders of a small Llama whose tokens are bytes, with or without a chat template and a begin token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BEGIN, END, TURN_END = "<begin>", "<end>", "<turn_end>"
CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
# Tokens beside the bytes: "ab", "abc" and two line breaks. The text "ab" is never read as the tokens of its letters.
MERGES = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<turn_end>{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier turns of the assistant lose their reasoning, as under Qwen3 and DeepSeek-R1.
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same, with marks around what the assistant wrote.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A system turn is not known, and turns alternate.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, *, begin: bool = True, end: str = END) -> Any:
    """begin: whether a text read as it stands gets the begin token; end: the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in MERGES]
    special = [BEGIN, END, TURN_END, CHATML_START, CHATML_END, "</s>"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *merged, *special])}
    bytes_ = Tokenizer(models.BPE(vocabulary, MERGES))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    if begin:
        bytes_.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, vocabulary[BEGIN])])
    named: dict[str, Any] = {"bos_token": BEGIN, "eos_token": end, "additional_special_tokens": special}
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, chat_template=template, **named)


def write_checkpoint(
    folder: Path,
    template: str | None = TEMPLATE,
    *,
    begin: bool = True,
    end: str = END,
    model: str = "Llama",
    **settings: Any,
) -> Path:
    """Model, tokenizer and a generation config with two end tokens: `end` and TURN_END."""
    import transformers

    own = tokenizer(template, begin=begin, end=end)
    ends = own.convert_tokens_to_ids([end, TURN_END])
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
        config = getattr(transformers, f"{model}Config")(**{**shape, **settings})
        made: Any = getattr(transformers, f"{model}ForCausalLM")(config)
    made.generation_config = transformers.GenerationConfig(eos_token_id=ends, bos_token_id=own.bos_token_id)
    made.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder
