"""One token of each row through a model that is built as Llama is, without the library's modules around the layers.

At one token a row, a forward takes the time that it takes to start its operations and modules, and these are half as
many. A linear layer with anything to it (adapters, quantisation, the hooks of tensor parallel) is called as the module
that it is. Any other model decodes by its own forward. That this one gives the same is shown at load (`parity`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from unirl.models.language.attention import DecodeLayout


class _Step(Protocol):
    """A module, or a function in its place."""

    def __call__(self, states: torch.Tensor, /) -> torch.Tensor: ...


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
    """Whether a Decoder can stand for the forward of this text model of transformers."""
    return type(model).__name__ in _BUILDS


class Decoder:
    """The model as it stands, adapters included: to be made anew when its weights or modules have changed."""

    def __init__(self, model: Any) -> None:
        build = _BUILDS[type(model).__name__]
        self._embed, self._rotary = model.embed_tokens, model.rotary_emb
        self._layers = [_Layer.of(layer, build) for layer in model.layers]
        self._norm = _norm(model.norm)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, layout: DecodeLayout) -> torch.Tensor:
        """tokens, positions: `(N,)`; hidden states `(N, D)`, without a graph."""
        hidden = self._embed(tokens)
        rotation = _Rotation.of(*self._rotary(hidden, positions[:, None]))
        for number, layer in enumerate(self._layers):
            hidden = hidden + layer.attention(number, layer.before_attention(hidden), rotation, layout)
            hidden = hidden + layer.mlp(layer.before_mlp(hidden))
        return self._norm(hidden)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer. query_norm, key_norm: None where its kind has none; window: tokens that one sees, itself included"""

    before_attention: _Step
    query: _Step
    key: _Step
    value: _Step
    query_norm: _Step | None
    key_norm: _Step | None
    out: _Step
    before_mlp: _Step
    gate: _Step
    activation: _Step
    up: _Step
    down: _Step
    head_dim: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, layer: Any, build: _Build) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            before_attention=_norm(layer.input_layernorm),
            query=_linear(attention.q_proj),
            key=_linear(attention.k_proj),
            value=_linear(attention.v_proj),
            query_norm=_norm(attention.q_norm) if build.normed else None,
            key_norm=_norm(attention.k_norm) if build.normed else None,
            out=_linear(attention.o_proj),
            before_mlp=_norm(layer.post_attention_layernorm),
            gate=_linear(mlp.gate_proj),
            activation=mlp.act_fn,
            up=_linear(mlp.up_proj),
            down=_linear(mlp.down_proj),
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=build.window(attention),
        )

    def attention(self, number: int, states: torch.Tensor, rotation: _Rotation, layout: DecodeLayout) -> torch.Tensor:
        shape = len(states), -1, 1, self.head_dim  # with the heads of this rank
        query, key, value = self.query(states).view(shape), self.key(states).view(shape), self.value(states).view(shape)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = layout.attend(number, rotation(query), rotation(key), value, scale=self.scale, window=self.window)
        return self.out(mixed.flatten(1))

    def mlp(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(states)) * self.up(states))


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


def _linear(module: Any) -> _Step:
    """`module`, or what it computes where nothing has been done to it."""
    hooks = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001 - torch tells of them in no other way
    plain = type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter
    if not plain or hooks or "forward" in vars(module):
        return module
    return functools.partial(torch.nn.functional.linear, weight=module.weight, bias=module.bias)


def _norm(module: Any) -> _Step:
    """The library's RMSNorm: below float32, bit for bit, it rounds before it multiplies with the weight."""
    weight, eps, width = module.weight, module.variance_epsilon, module.weight.shape
    least = torch.tensor(eps, device=weight.device)

    def normed(states: torch.Tensor) -> torch.Tensor:
        if states.dtype != torch.float32:
            return weight * torch.nn.functional.rms_norm(states.float(), width, None, eps).to(states.dtype)
        if not states.is_cpu:
            return torch.nn.functional.rms_norm(states, width, weight, eps)
        # There, rms_norm is nine operations.
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        return states * torch.addcmul(least, length, length, value=1 / len(weight)).rsqrt_() * weight

    return normed
