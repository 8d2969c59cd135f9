"""One token of each row: temperature, top-k, top-p, and a draw that a sample owns whatever stands beside it."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.sampling import ARSamplingParams
from unirl.types.seed import generator


@dataclasses.dataclass(frozen=True)
class Drawn:
    """tokens: `(B,)`; log_probs: `(B,)` of the distribution drawn from; kept: `(B, V)` bool, None where that is all"""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    kept: torch.Tensor | None


def uniforms(ids: list[str], sampling: ARSamplingParams) -> torch.Tensor:
    """`(N, max_new_tokens)` in [0, 1), float64: those of a sample follow from the seed and its id alone."""
    draws = [
        torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator(sampling.seed, "token", sample_id))
        for sample_id in ids
    ]
    return torch.stack(draws)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: ARSamplingParams) -> Drawn:
    """logits: `(B, V)` float32; uniform: `(B,)` float64. At temperature 0 the likeliest token, whose log-prob is 0."""
    if sampling.temperature == 0:
        return Drawn(logits.argmax(-1), logits.new_zeros(len(logits)), None)
    logits = logits / sampling.temperature
    kept = None
    if sampling.truncated_support:
        kept = likeliest(logits, sampling.top_k, sampling.top_p)
        logits = logits.masked_fill(~kept, -torch.inf)
    log_probs = logits.log_softmax(-1)
    # The inverse of the distribution function, in float64: in float32 small steps of a large vocabulary would vanish.
    cumulative = log_probs.exp().double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, uniform.to(logits.device)[:, None] * total, right=True)[:, 0]
    # u * total may round up to the total: then the last token that has any probability.
    last = torch.searchsorted(cumulative, total)[:, 0]
    # NaN logits have neither; whichever token stands for it carries their NaN, which refuses the optimizer step.
    tokens = torch.minimum(tokens, last).clamp(max=logits.shape[-1] - 1)
    return Drawn(tokens, log_probs.gather(1, tokens[:, None])[:, 0], kept)


def likeliest(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`(B, V)` bool: the `top_k` largest (ties kept), of these the smallest set of probability `top_p`."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    kept = logits > -torch.inf
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        kept &= ~torch.zeros_like(kept).scatter(1, order, dropped)
    return kept
