"""One token of each row: temperature, top-k, top-p, and a draw that a sample owns whatever stands beside it."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.sampling import ARSamplingParams
from unirl.types.seed import generator

_CHUNK = 256


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
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    kept = None
    if sampling.truncated_support:
        kept = likeliest(logits, sampling.top_k, sampling.top_p)
        logits = logits.masked_fill(~kept, -torch.inf)
    highest = logits.amax(-1, keepdim=True)
    weights = logits.new_zeros(len(logits), logits.shape[1] + _padding(logits.shape[1]))
    torch.sub(logits, highest, out=weights[:, : logits.shape[1]]).exp_()
    tokens, total = _at_share(weights, uniform.to(logits.device)[:, None])
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # of NaN: what fills the last chunk has no weight otherwise
    log_probs = logits.gather(1, tokens) - highest - total.log().to(logits.dtype)
    return Drawn(tokens[:, 0], log_probs[:, 0], kept)


def _padding(vocabulary: int) -> int:
    """Places that fill the last chunk; a small vocabulary is not cut into chunks."""
    return 0 if vocabulary <= 2 * _CHUNK else -vocabulary % _CHUNK


def _at_share(weights: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of weights `(B, V)` passes `share` `(B, 1)` of their total; and this total, float64.

    A large vocabulary is walked in chunks, then within the one that holds the place.
    """
    if weights.shape[1] <= 2 * _CHUNK:
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        return _passing(weights, share * total)[0], total
    chunks = weights.unflatten(1, (-1, _CHUNK))
    sums = chunks.sum(-1)
    total = sums.sum(-1, keepdim=True, dtype=torch.float64)
    chunk, rest = _passing(sums, share * total)
    within = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK))[:, 0]
    return chunk * _CHUNK + _passing(within, rest)[0], total


def _passing(weights: torch.Tensor, point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place where the running sum of weights `(B, W)` exceeds `point`, and what is left of `point` there.

    In float64: in float32 small steps of a large vocabulary would vanish.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(sums, point, right=True)
    # By rounding, the point may be the whole sum: then the last place that has any weight.
    place = torch.minimum(place, torch.searchsorted(sums, sums[:, -1:].contiguous()))
    # NaN weights have neither; whichever token stands for them carries the NaN, which refuses the optimizer step.
    place = place.clamp(max=weights.shape[1] - 1)
    left = point - sums.gather(1, place) + weights.gather(1, place)
    return place, left.clamp(min=0)


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
