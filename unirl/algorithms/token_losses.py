"""Losses of tokens as functions: tensors in, tensors out, no model, no config, no reduction over tokens.

Packed layout: T tokens of N sequences end to end, `lengths` `(N,)` sums to T, `mask` `(T,)` is True where a token is
trained. `r = exp(new - old)`, A the advantage of a token. Every loss returns one value a token. The caller multiplies
by `token_weights` and divides by the `terms` of the whole optimizer step, all micro-batches and ranks, once::

    new, old = trained_only(new, mask), trained_only(old, mask)
    losses = clipped_surrogate(bounded_ratio(new, old), per_token(advantages, lengths, len(mask)), low, high)
    loss = weighted_sum(losses, token_weights(mask, lengths, "token-mean")) / terms_of_the_step

`bounded_ratio`, `clipped_surrogate` and `clipped_away` are those of `losses.py`.
"""

from __future__ import annotations

from typing import Literal

import jaxtyping as jt
import torch

from unirl.algorithms.losses import MAX_LOG_RATIO, bounded_exp, bounded_ratio, clipped_away

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]


# Packed sequences


def per_token(
    values: jt.Shaped[torch.Tensor, "N"], lengths: jt.Int[torch.Tensor, "N"], tokens: int
) -> jt.Shaped[torch.Tensor, "T"]:
    """The value of its sequence for each of T = `tokens` tokens."""
    return torch.repeat_interleave(values, lengths, output_size=tokens)


def per_sequence(
    values: jt.Float[torch.Tensor, "T"], lengths: jt.Int[torch.Tensor, "N"]
) -> jt.Float[torch.Tensor, "N"]:
    """The sum over the tokens of each sequence."""
    # Unlike index_add, it adds in the same order every time on a GPU.
    return torch.segment_reduce(values, "sum", lengths=lengths)


def trained_only(values: jt.Float[torch.Tensor, "T"], mask: jt.Bool[torch.Tensor, "T"]) -> jt.Float[torch.Tensor, "T"]:
    """`values` with 0 where no token is trained.

    For log-probs, before anything is computed from them: a NaN there (a tool's token has no log-prob) would come back
    through the derivative of `exp` as 0 x NaN, whatever the loss is multiplied by.
    """
    return torch.where(mask, values, 0)


# Aggregation


def token_weights(
    mask: jt.Bool[torch.Tensor, "T"],
    lengths: jt.Int[torch.Tensor, "N"],
    aggregation: Aggregation,
    horizon: int | None = None,
) -> jt.Float64[torch.Tensor, "T"]:
    """What each token counts, so that `weighted_sum(losses, weights) / terms` is the named mean.

    token-mean:              1; over all trained tokens
    seq-mean-token-mean:     1 / trained tokens of its sequence; over sequences (GRPO, arXiv 2402.03300)
    seq-mean-token-sum-norm: 1 / horizon, a constant length; over sequences (Dr.GRPO, arXiv 2503.20783)

    0 where a token is not trained. A sequence must not be cut between micro-batches, batches may be.
    """
    if (horizon is not None) != (aggregation == "seq-mean-token-sum-norm"):
        raise ValueError(f"a horizon belongs to seq-mean-token-sum-norm, got horizon={horizon} with {aggregation}")
    trained = mask.double()
    if aggregation == "token-mean":
        return trained
    if horizon is None:
        return trained / per_token(per_sequence(trained, lengths).clamp(min=1), lengths, len(mask))
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}: the longest answer, max_new_tokens")
    return trained / horizon


def terms(mask: jt.Bool[torch.Tensor, "T"], lengths: jt.Int[torch.Tensor, "N"], aggregation: Aggregation) -> float:
    """What these sequences add to the denominator: trained tokens, or sequences with at least one.

    The caller adds up micro-batches and ranks. Where the whole step has none, every loss is 0 with a gradient of 0:
    the caller leaves the optimizer step out, and does not divide.
    """
    trained = mask.double()
    counted = trained if aggregation == "token-mean" else per_sequence(trained, lengths) > 0
    return float(counted.sum())


def weighted_sum(
    losses: jt.Float[torch.Tensor, "T"], weights: jt.Float64[torch.Tensor, "T"]
) -> jt.Float64[torch.Tensor, ""]:
    """`sum_t w_t loss_t` in float64. A token of weight 0 is left out, not multiplied by 0: its loss may be NaN."""
    return torch.where(weights > 0, losses * weights, 0).sum()


# Ratios


def sequence_ratio(
    log_probs: jt.Float[torch.Tensor, "T"],
    old_log_probs: jt.Float[torch.Tensor, "T"],
    mask: jt.Bool[torch.Tensor, "T"],
    lengths: jt.Int[torch.Tensor, "N"],
) -> jt.Float[torch.Tensor, "T"]:
    """GSPO: `s = exp(mean over trained tokens of (new - old))` of its sequence for each token (arXiv 2507.18071).

    In place of r in a clipped loss with seq-mean-token-mean it is the paper's sequence loss, and the gradient of each
    trained token is `-A s / trained tokens` where it is not clipped. 1 where nothing of a sequence is trained.
    """
    log_ratio = trained_only(log_probs - old_log_probs, mask)
    counts = per_sequence(mask.to(log_ratio.dtype), lengths).clamp(min=1)
    return per_token(bounded_exp(per_sequence(log_ratio, lengths) / counts), lengths, len(mask))


def importance_weights(
    old_log_probs: jt.Float[torch.Tensor, "T"],
    rollout_log_probs: jt.Float[torch.Tensor, "T"],
    mask: jt.Bool[torch.Tensor, "T"],
    lengths: jt.Int[torch.Tensor, "N"],
    *,
    level: Level,
    cap: float,
    floor: float | None = None,
) -> jt.Float[torch.Tensor, "T"]:
    """Weights for losses of tokens that another engine drew: `w = pi_old / mu`, detached, 0 where nothing is trained.

    old_log_probs:     log pi_old, as the trainer computes them
    rollout_log_probs: log mu, as the engine that sampled reports them
    level:             w of each token, or of the whole sequence, the product of its trained tokens
    cap:               alone, w is truncated to `min(w, cap)`
    floor:             with a floor, w outside `[floor, cap]` is 0 instead (IcePop, arXiv 2510.18855)

    Multiply the losses. A token that a floor rejects stays in the denominator.
    """
    log_ratio = trained_only(old_log_probs - rollout_log_probs, mask).detach()
    if level == "sequence":
        log_ratio = per_token(per_sequence(log_ratio, lengths), lengths, len(mask))
    ratio = bounded_exp(log_ratio)
    weights = ratio.clamp(max=cap) if floor is None else torch.where((ratio < floor) | (ratio > cap), 0, ratio)
    return trained_only(weights, mask)


# Policy losses


def dual_clip(
    losses: jt.Float[torch.Tensor, "T"], advantages: jt.Float[torch.Tensor, "T"], cap: float
) -> jt.Float[torch.Tensor, "T"]:
    """`min(loss, -A cap)` where A < 0: a ratio above `cap` > 1 pushes no further (arXiv 1912.09729)."""
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * cap), losses)


def cispo(
    log_probs: jt.Float[torch.Tensor, "T"],
    ratio: jt.Float[torch.Tensor, "T"],
    advantages: jt.Float[torch.Tensor, "T"],
    *,
    cap: float,
    floor: float = 0.0,
) -> jt.Float[torch.Tensor, "T"]:
    """`-sg(clip(r, floor, cap)) A log pi`: no token loses its gradient (MiniMax-M1, arXiv 2506.13585).

    The bounds are of r itself: the paper's `1 + eps_high` is cap = 1 + eps_high.
    """
    return -ratio.detach().clamp(floor, cap) * advantages * log_probs


def dppo(
    log_probs: jt.Float[torch.Tensor, "T"],
    old_log_probs: jt.Float[torch.Tensor, "T"],
    advantages: jt.Float[torch.Tensor, "T"],
    delta: float,
) -> tuple[jt.Float[torch.Tensor, "T"], jt.Bool[torch.Tensor, "T"]]:
    """`-A r`, dropped (0) where r has moved with A and `|pi - pi_old| > delta` (arXiv 2602.04879, binary TV).

    Returns the loss and the mask of dropped tokens, which stay in the denominator.
    """
    ratio = bounded_ratio(log_probs, old_log_probs)
    shift = (log_probs.exp() - old_log_probs.exp()).abs()
    dropped = (shift > delta) & clipped_away(ratio, advantages, 0.0, 0.0)
    return torch.where(dropped, 0, -advantages * ratio), dropped


def drpo(
    log_probs: jt.Float[torch.Tensor, "T"],
    old_log_probs: jt.Float[torch.Tensor, "T"],
    advantages: jt.Float[torch.Tensor, "T"],
    epsilon: float,
) -> jt.Float[torch.Tensor, "T"]:
    """`-A r + |A| pi_old (r - 1)^2 / (2 epsilon)`: DPPO's mask made a smooth pull back (arXiv 2606.09821)."""
    ratio = bounded_ratio(log_probs, old_log_probs)
    return -advantages * ratio + advantages.abs() * old_log_probs.exp() * (ratio - 1) ** 2 / (2 * epsilon)


# Penalties and values


def kl_estimate(
    log_probs: jt.Float[torch.Tensor, "T"], reference: jt.Float[torch.Tensor, "T"], kind: KLEstimator
) -> jt.Float[torch.Tensor, "T"]:
    """An estimate of KL(pi || ref) from tokens of pi, with `d = log ref - log pi` (joschu.net/blog/kl-approx.html).

    k1: `-d`, unbiased, but as a loss its expected gradient is 0
    k2: `d^2 / 2`, its gradient is that of the KL
    k3: `exp(d) - 1 - d`, at least 0, its gradient is that of KL(ref || pi); d above 20 counts as 20, without a gradient
    """
    log_ratio = reference - log_probs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    # Bounded above alone: far below, k3 goes on as -d, which pulls back a token that the reference would not write.
    bounded = torch.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)
    return bounded.expm1() - bounded


def value_loss(
    values: jt.Float[torch.Tensor, "T"],
    old_values: jt.Float[torch.Tensor, "T"],
    returns: jt.Float[torch.Tensor, "T"],
    clip: float,
) -> jt.Float[torch.Tensor, "T"]:
    """`max((v - R)^2, (v_clip - R)^2) / 2` with `v_clip` within `clip` of the old value (PPO's critic)."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2


def overlong_penalty(lengths: jt.Int[torch.Tensor, "N"], max_length: int, buffer: int) -> jt.Float[torch.Tensor, "N"]:
    """DAPO's soft penalty, to be added to rewards: 0 up to `max_length - buffer`, then linear to -1 at `max_length`.

    arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer must be within 1..{max_length} (max_length) tokens, got {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)
