"""What the Hunyuan pipelines share. Their prompt templates have as many tokens as with the real tokenizers."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.parts import qwen_tokenizer

WIDTH = 32  # of the text encoders


def templated(
    tokenizer: transformers.PreTrainedTokenizerFast, head: str, tokens: int
) -> transformers.PreTrainedTokenizerFast:
    """`head`, the part of a template that pipelines cut off again by its length, becomes that many tokens."""
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(head, "~" * tokens)
    return tokenizer


def glyph_parts() -> dict[str, Any]:
    """A language model for the text, a letter model for what the text quotes."""
    tokenizer = qwen_tokenizer()
    qwen = transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    )
    letters = transformers.T5Config(
        vocab_size=384,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return {
        "text_encoder": transformers.Qwen2_5_VLTextModel(qwen),
        "tokenizer": tokenizer,
        "text_encoder_2": transformers.T5EncoderModel(letters),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
