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

    hidden: `(T, D)`; head: hidden states to logits; targets: `(T,)`. Returns `(T,)` float32 twice; the entropy carries
    no gradient.
    """
    if len(targets) == 0:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    size = max(_LARGEST_CHUNK // vocabulary, 1)
    rows = hidden.split(size)
    chunks = [
        _Chunk(head, own, wanted, temperature, kept)
        for own, wanted, kept in zip(rows, targets.split(size), _split(support, len(rows), size), strict=True)
    ]
    if not torch.is_grad_enabled():
        pieces = [chunk.scored() for chunk in chunks]
    elif not head(hidden[:1].detach()).requires_grad:
        pieces = [chunk.differentiated() for chunk in chunks]
    elif len(chunks) > 1:
        pieces = [chunk.recomputed() for chunk in chunks]
    else:  # what the backward of one chunk holds anyway may wait for it
        pieces = [chunks[0].scored()]
    log_probs, entropies = zip(*pieces, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    """Some of the tokens. Each way of scoring them gives their log-probs and their entropies."""

    head: Callable[[torch.Tensor], torch.Tensor]
    hidden: torch.Tensor
    targets: torch.Tensor
    temperature: float
    support: Support | None

    def scored(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(self.hidden)
        normaliser = logits.logsumexp(-1)
        with torch.no_grad():
            entropy = self._entropy((logits - normaliser[:, None]).exp_(), logits, normaliser)
        return logits.gather(1, self.targets[:, None])[:, 0] - normaliser, entropy

    def recomputed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits are computed again in the backward."""
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.scored, use_reentrant=False, preserve_rng_state=False)

    def differentiated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The head is frozen: what each log-prob says of its own hidden state is found at once, and the logits go."""
        leaf = self.hidden.detach().requires_grad_()
        logits = self._logits(leaf)
        with torch.no_grad():
            normaliser = logits.logsumexp(-1)
            log_probs = logits.gather(1, self.targets[:, None])[:, 0] - normaliser
            probs = (logits - normaliser[:, None]).exp_()
            entropy = self._entropy(probs, logits, normaliser)
            slopes = probs.neg_()
            slopes[torch.arange(len(slopes), device=slopes.device), self.targets] += 1
        (gradient,) = torch.autograd.grad(logits, leaf, slopes)
        along = (self.hidden * gradient).sum(-1, dtype=torch.float32)
        return log_probs + (along - along.detach()), entropy

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(T, V)`, of the distribution that was sampled."""
        logits = self.head(hidden).float()
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits if self.support is None else _restricted(logits, self.support)

    def _entropy(self, probs: torch.Tensor, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        if self.support is not None:
            logits = logits.clamp(min=torch.finfo(logits.dtype).min)  # outside, 0 times -inf is 0
        with torch.autocast(probs.device.type, enabled=False):  # it would round the logits, and the bound above to -inf
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
