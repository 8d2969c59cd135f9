"""What random pipelines share: tokenizers, text encoders, autoencoders. All real classes, tiny."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import diffusers
import torch
import transformers

FLUX_TEXT_LAYERS = (1, 2, 3)
QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# ChatML; `enable_thinking=false` adds the empty thought of Qwen3.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def redraw(modules: Iterable[torch.nn.Module | None], seed: int = 0) -> None:
    """Every parameter anew: an initial zero (a gate, a bias, a table) would hide what it multiplies."""
    draws = torch.Generator().manual_seed(seed)
    for module in modules:
        for name, parameter in module.named_parameters() if module is not None else ():
            noise = torch.randn(parameter.shape, generator=draws)
            if parameter.ndim > 1:
                fan_in = parameter.shape[-1] if "embed" in ".".join(name.split(".")[-2:-1]) else parameter[0].numel()
                parameter.data = noise / math.sqrt(fan_in)
            else:
                parameter.data = 0.1 * noise + (0 if name.endswith("bias") else 1)


def byte_tokenizer(
    *,
    eos: str,
    pad: str,
    length: int,
    bos: str | None = None,
    extra: tuple[str, ...] = (),
    single: str = "$A",
    padding_side: str = "right",
) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every byte is a token. Ids: bos (or pad) 0, eos 1, other specials, then the bytes.

    single: what stands around a text `$A`
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    specials = list(dict.fromkeys([bos or pad, eos, pad, *extra]))
    vocabulary = {token: row for row, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, vocabulary[token]) for token in specials]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=list(extra),
        model_max_length=length,
        padding_side=padding_side,
    )


def clip_tokenizer() -> transformers.PreTrainedTokenizerFast:
    bos, eos = "<|startoftext|>", "<|endoftext|>"
    return byte_tokenizer(bos=bos, eos=eos, pad=eos, single=f"{bos} $A {eos}", length=77)


def t5_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return byte_tokenizer(eos="</s>", pad="<pad>", single="$A </s>", length=512)


def qwen_tokenizer(*, padding_side: str = "right") -> transformers.PreTrainedTokenizerFast:
    """ChatML with the tokens of pictures; nothing put around a bare text."""
    tokenizer = byte_tokenizer(
        eos="<|im_end|>", pad="<|endoftext|>", length=2048, extra=QWEN_TOKENS, padding_side=padding_side
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def gemma_tokenizer(*, padding_side: str = "right") -> transformers.PreTrainedTokenizerFast:
    return byte_tokenizer(
        bos="<bos>", eos="<eos>", pad="<pad>", single="<bos> $A", length=2048, padding_side=padding_side
    )


def clip_config(width: int = 8) -> transformers.CLIPTextConfig:
    """Of `clip_tokenizer`; for CLIPTextModel or CLIPTextModelWithProjection."""
    return transformers.CLIPTextConfig(
        vocab_size=258,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def t5_encoder(width: int = 32) -> transformers.T5EncoderModel:
    """Of `t5_tokenizer`."""
    config = transformers.T5Config(
        vocab_size=258,
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5EncoderModel(config)


def qwen3_config(vocabulary: int, *, layers: int = 3, width: int = 16) -> transformers.Qwen3Config:
    """vocabulary: `len(qwen_tokenizer(...))`."""
    return transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
    )


def gemma2_config(vocabulary: int, *, layers: int = 3, width: int = 16) -> transformers.Gemma2Config:
    """vocabulary: `len(gemma_tokenizer())`."""
    return transformers.Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        pad_token_id=0,
    )


def autoencoder(*, channels: int = 4, factor: int = 2, **settings: Any) -> diffusers.AutoencoderKL:
    """channels: of the latent; factor: pixels of a latent's side, 2, 4 or 8. settings: replace a default."""
    depth = int(math.log2(factor)) + 1
    defaults: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * depth,
        "up_block_types": ("UpDecoderBlock2D",) * depth,
        "block_out_channels": (8,) * depth,
        "latent_channels": channels,
        "norm_num_groups": 4,
        "sample_size": 32,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return diffusers.AutoencoderKL(**{**defaults, **settings})


def flux2_autoencoder() -> diffusers.AutoencoderKLFlux2:
    """4 pixels a latent, 8 a token; the statistics of the latents are drawn as well."""
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 3,  # type: ignore[arg-type]
        block_out_channels=(8, 8, 8),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    draws = torch.Generator().manual_seed(5)
    vae.bn.running_mean.normal_(generator=draws)  # type: ignore[union-attr]
    vae.bn.running_var.uniform_(0.5, 2, generator=draws)  # type: ignore[union-attr]
    return vae
