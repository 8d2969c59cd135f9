"""One token of each row through a model that is built as Llama is, without the library's modules around the layers.

At one token a row, a forward takes the time that it takes to start its operations and modules, and these are a third
less. Linear layers are called as the modules that they are: adapters, autocast and tensor parallel stay with them. Any
other model decodes by its own forward. That this one gives the same is shown at load (`parity`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from unirl.models.language.attention import DecodeLayout


@dataclasses.dataclass(frozen=True)
class _Build:
    """What tells one class from the others. normed: queries and keys have norms; window: of an attention module"""

    normed: bool
    window: Callable[[Any], int | None]


_BUILDS = {
    "LlamaModel": _Build(normed=False, window=lambda attention: None),
    "MistralModel": _Build(normed=False, window=lambda attention: attention.config.sliding_window),
    "Qwen2Model": _Build(normed=False, window=lambda attention: attention.sliding_window),
    "Qwen3Model": _Build(normed=True, window=lambda attention: attention.sliding_window),
}


def knows(model: Any) -> bool:
    """Whether `hidden_states` can stand for the forward of this text model of transformers."""
    return type(model).__name__ in _BUILDS


def hidden_states(model: Any, tokens: torch.Tensor, positions: torch.Tensor, layout: DecodeLayout) -> torch.Tensor:
    """tokens, positions: `(N, 1)`; `(N, 1, D)`, without a graph."""
    build = _BUILDS[type(model).__name__]
    embedded = model.embed_tokens(tokens)
    rotation = _Rotation.of(*model.rotary_emb(embedded, positions))
    hidden = embedded[:, 0]
    for number, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        normed = _norm(layer.input_layernorm, hidden)
        query, key, value = (
            project(normed).view(len(normed), -1, 1, attention.head_dim)  # the heads of this rank
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if build.normed:
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        mixed = layout.attend(
            number,
            rotation(query),
            rotation(key),
            value,
            scale=attention.scaling,
            window=build.window(attention),
        )
        hidden = hidden + attention.o_proj(mixed.flatten(1))
        normed = _norm(layer.post_attention_layernorm, hidden)
        hidden = hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return _norm(model.norm, hidden)[:, None]


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """Rotary position embedding of one position a row: `x cos + rotate_half(x) sin`, the half's sign in `sin`."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> _Rotation:
        """From the library's `(N, 1, D)`."""
        first, second = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-first, second], dim=-1)[:, None])

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """states: `(N, heads, 1, D)`"""
        return torch.addcmul(states * self.cos, states.roll(states.shape[-1] // 2, -1), self.sin)


def _norm(module: Any, states: torch.Tensor) -> torch.Tensor:
    """The library's RMSNorm, bit for bit: below float32 it rounds before it multiplies with the weight."""
    width, eps = states.shape[-1:], module.variance_epsilon
    if states.dtype == torch.float32:
        return torch.nn.functional.rms_norm(states, width, module.weight, eps)
    return module.weight * torch.nn.functional.rms_norm(states.float(), width, None, eps).to(states.dtype)
