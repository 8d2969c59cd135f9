"""Log-probs of given tokens in chunks: a float32 matrix (tokens, vocabulary) never exists, forwards or backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Head = Callable[[torch.Tensor], torch.Tensor]
_LARGEST_CHUNK = 2**23  # logits at a time: 32 MiB in float32


@dataclasses.dataclass(frozen=True)
class Support:
    """The part of the vocabulary that each of T tokens was drawn from. tokens: `(sum S,)`, sizes: `(T,)`"""

    tokens: torch.Tensor
    sizes: torch.Tensor


def token_log_probs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocabulary: int,
    support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(head(hidden) / temperature)` at `targets`, over the support where there is one; and the entropy.

    hidden: `(T, D)`; head: hidden states to logits; targets: `(T,)`. Returns `(T,)` float32 twice; the entropy carries
    no gradient.
    """
    size = max(_LARGEST_CHUNK // vocabulary, 1)
    score = _way(head, hidden, keeps_all=len(targets) <= size)
    rows = hidden.split(size)  # of no token at all it is one empty piece
    pieces = [
        score(head, own, wanted, temperature, kept)
        for own, wanted, kept in zip(rows, targets.split(size), _split(support, len(rows), size), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _way(head: Head, hidden: torch.Tensor, *, keeps_all: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """How a chunk is scored. keeps_all: one chunk is all there is, so its logits may wait for the backward."""
    if not torch.is_grad_enabled():
        return _scored
    if not head(hidden[:1].detach()).requires_grad:
        return _differentiated
    return _scored if keeps_all else _recomputed


def _scored(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, support: Support | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one chunk."""
    logits = _logits(head, hidden, temperature, support)
    normaliser = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = _entropy((logits - normaliser[:, None]).exp_(), logits, normaliser, support)
    return logits.gather(1, targets[:, None])[:, 0] - normaliser, entropy


def _recomputed(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, support: Support | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the chunk are computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(
        _scored, head, hidden, targets, temperature, support, use_reentrant=False, preserve_rng_state=False
    )


def _differentiated(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, support: Support | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """With a frozen head, what each log-prob says of its own hidden state is computed at once, and the logits go."""
    leaf = hidden.detach().requires_grad_()
    logits = _logits(head, leaf, temperature, support)
    with torch.no_grad():
        normaliser = logits.logsumexp(-1)
        log_probs = logits.gather(1, targets[:, None])[:, 0] - normaliser
        probs = (logits - normaliser[:, None]).exp_()
        entropy = _entropy(probs, logits, normaliser, support)
        slopes = probs.neg_()
        slopes[torch.arange(len(targets), device=targets.device), targets] += 1
    (gradient,) = torch.autograd.grad(logits, leaf, slopes)
    along = (hidden * gradient).sum(-1, dtype=torch.float32)
    return log_probs + (along - along.detach()), entropy


def _logits(head: Head, hidden: torch.Tensor, temperature: float, support: Support | None) -> torch.Tensor:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    return logits if support is None else _restricted(logits, support)


def _entropy(
    probs: torch.Tensor, logits: torch.Tensor, normaliser: torch.Tensor, support: Support | None
) -> torch.Tensor:
    """probs, logits: `(T, V)`"""
    if support is not None:
        logits = logits.clamp(min=torch.finfo(logits.dtype).min)  # 0 of -inf is nothing
    return normaliser - torch.linalg.vecdot(probs, logits)


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
