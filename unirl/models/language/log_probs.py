"""Log-probs of given tokens in chunks: a float32 matrix (tokens, vocabulary) never exists, forwards or backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

_LARGEST_CHUNK = 2**23  # logits at a time: 32 MiB in float32


@dataclasses.dataclass(frozen=True)
class Support:
    """The part of the vocabulary that each of T tokens was drawn from. tokens: `(sum S,)`, sizes: `(T,)`"""

    tokens: torch.Tensor
    sizes: torch.Tensor


def token_log_probs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    *,
    temperature: float,
    vocabulary: int,
    support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(head(hidden) / temperature)` at `targets`, over the support where there is one; and the entropy.

    hidden: `(T, D)`; head: hidden states to logits; targets: `(T,)`. The logits of a chunk are computed again in the
    backward. Returns `(T,)` float32 twice; the entropy carries no gradient.
    """
    if len(targets) == 0:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    size = max(_LARGEST_CHUNK // vocabulary, 1)
    rows = hidden.split(size)  # of no token at all it is one empty piece
    pieces = [
        _chunk(head, own, wanted, temperature, kept)
        for own, wanted, kept in zip(rows, targets.split(size), _split(support, len(rows), size), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _chunk(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    support: Support | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    def scored(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden).float() / temperature
        if support is not None:
            logits = _restricted(logits, support)
        normaliser = logits.logsumexp(-1)
        with torch.no_grad():
            weighted = (logits - normaliser[:, None]).exp_()
            entropy = normaliser - weighted.mul_(logits.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
        return logits.gather(1, targets[:, None])[:, 0] - normaliser, entropy

    if not torch.is_grad_enabled():
        return scored(hidden)
    return checkpoint(scored, hidden, use_reentrant=False, preserve_rng_state=False)


def _restricted(logits: torch.Tensor, support: Support) -> torch.Tensor:
    """-inf outside of the support."""
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(support.sizes)
    outside = torch.full_like(logits, -torch.inf)
    return outside.index_put((rows, support.tokens), logits[rows, support.tokens])


def _split(support: Support | None, pieces: int, size: int) -> list[Support | None]:
    if support is None:
        return [None] * pieces
    sizes = support.sizes.split(size)
    kept = support.tokens.split([int(piece.sum()) for piece in sizes])
    return [Support(own, piece) for own, piece in zip(kept, sizes, strict=True)]
