"""A language model of 20,000 weights with a chat template, saved as a folder that `CausalLM` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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


def tokenizer(template: str | None = CHATML) -> Any:
    """Bytes as tokens, with one merge: two line breaks are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "ĊĊ"])}
    built = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "</s>"]
    )
    found.chat_template = template
    return found


def save_model(folder: Path, template: str | None = CHATML) -> Path:
    """A Llama of two layers beside its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer(template)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
