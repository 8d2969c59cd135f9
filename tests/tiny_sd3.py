"""A folder that diffusers loads as a Stable Diffusion 3 pipeline: every part real, tiny and random.

The shape is that of 3.5-medium: dual attention, query and key norms, two CLIP encoders and T5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

SIDE = 32  # pixels of the default sample


def write_pipeline(folder: Path, *, with_t5: bool = True, layers: int = 2, width: int = 32, seed: int = 0) -> Path:
    """Write the pipeline to `folder` and return it. layers, width: of the transformer (width a multiple of 8)."""
    parts: dict[str, Any] = {
        "transformer": _transformer(layers, width),
        "vae": _autoencoder(),
        "text_encoder": CLIPTextModelWithProjection(_clip(width=8)),
        "text_encoder_2": CLIPTextModelWithProjection(_clip(width=16)),
        "text_encoder_3": T5EncoderModel(_t5()) if with_t5 else None,
    }
    draws = torch.Generator().manual_seed(seed)
    for module in parts.values():
        if module is not None:
            _redraw(module, draws)
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts["tokenizer"] = parts["tokenizer_2"] = _clip_tokenizer()
    parts["tokenizer_3"] = _tokenizer(bos=None, eos="</s>", pad="<pad>", length=512) if with_t5 else None
    StableDiffusion3Pipeline(**parts).save_pretrained(folder)
    return folder


def _redraw(module: torch.nn.Module, draws: torch.Generator) -> None:
    """Every parameter anew: an initial zero (a gate, a bias, a table) would hide what it multiplies."""
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=draws)
        if parameter.ndim > 1:
            fan_in = parameter.shape[-1] if "embed" in name.split(".")[-2] else parameter[0].numel()
            parameter.data = noise / math.sqrt(fan_in)
        else:
            parameter.data = 0.1 * noise + (0 if name.endswith("bias") else 1)


def _transformer(layers: int, width: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=SIDE // 2,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=width // 8,
        joint_attention_dim=32,
        caption_projection_dim=width,
        pooled_projection_dim=8 + 16,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _autoencoder() -> AutoencoderKL:
    settings = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 8),
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": SIDE,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return AutoencoderKL(**settings)


def _clip(width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
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


def _t5() -> T5Config:
    return T5Config(
        vocab_size=258,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )


def _clip_tokenizer() -> PreTrainedTokenizerFast:
    return _tokenizer(bos="<|startoftext|>", eos="<|endoftext|>", pad="<|endoftext|>", length=77)


def _tokenizer(*, bos: str | None, eos: str, pad: str, length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every byte is a token."""
    specials = [bos or pad, eos]
    vocabulary = {token: row for row, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}" if bos else f"$A {eos}",
        special_tokens=[(token, vocabulary[token]) for token in specials],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=length
    )
