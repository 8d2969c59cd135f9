"""What a person would write by hand for one language model: the yardstick of the benchmark, with the same loss."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Prompts:
    """tokens: `(P, S)`, padded on the left; real: `(P, S)`, 0 in the padding; group: responses to each"""

    tokens: torch.Tensor
    real: torch.Tensor
    group: int


def bare_text_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    asked: Prompts,
    *,
    room: int,
    end: int,
    score: Callable[[torch.Tensor], float],
) -> tuple[float, int]:
    """Returns when the rollout was done, and the tokens written."""
    prompts, real = (rows.repeat_interleave(asked.group, 0) for rows in (asked.tokens, asked.real))
    with torch.no_grad():
        responses, mask = _written(model, prompts, real, room, end)
    rolled_out = time.process_time()
    rewards = torch.tensor([score(row[own]) for row, own in zip(responses, mask, strict=True)]).view(-1, asked.group)
    spread = rewards.std(1, keepdim=True, correction=0) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
    tokens, attended = torch.cat([prompts, responses], 1), torch.cat([real, mask.long()], 1)
    places = (attended.cumsum(1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=attended, position_ids=places, logits_to_keep=responses.shape[1] + 1).logits
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, responses[:, :, None])[:, :, 0]
    ratio = (log_probs - log_probs.detach()).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    ((losses * mask).sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return rolled_out, int(mask.sum())


def _written(
    model: Any, prompts: torch.Tensor, real: torch.Tensor, room: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses `(N, S)` and which of their tokens stand before or at the end token."""
    tokens, cache, attended = prompts, None, real
    places = (real.cumsum(1) - 1).clamp(min=0)
    written: list[torch.Tensor] = []
    alive = torch.ones(len(prompts), dtype=torch.bool)
    mask: list[torch.Tensor] = []
    while len(written) < room and bool(alive.any()):
        output = model(
            tokens,
            attention_mask=attended,
            position_ids=places,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.cache
        drawn = torch.multinomial(output.logits[:, -1].softmax(-1), 1)[:, 0]
        written.append(drawn)
        mask.append(alive)
        attended = torch.cat([attended, alive.long()[:, None]], 1)
        alive = alive & (drawn != end)
        tokens, places = drawn[:, None], places[:, -1:] + 1
    return torch.stack(written, 1), torch.stack(mask, 1)
