"""Five linear layers without activation that are one given affine map, as LAION's and ImageReward's heads are."""

from __future__ import annotations

import torch

# Under these numbers; between them stood dropout.
_SIZES = {0: 32, 2: 24, 4: 12, 6: 8, 7: 1}


def head_state(weight: torch.Tensor, bias: float, prefix: str) -> dict[str, torch.Tensor]:
    """Random layers whose product is `x @ weight + bias`, for `weight` `(D,)`; the first is solved for.

    `{prefix}0.weight` ..., float32
    """
    draws = torch.Generator().manual_seed(0)
    widths = [len(weight), *_SIZES.values()]
    state: dict[str, torch.Tensor] = {}
    rest, constant = torch.eye(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for row, wide, narrow in reversed(list(zip(_SIZES, widths[:-1], widths[1:], strict=True))):
        layer = torch.randn(narrow, wide, generator=draws, dtype=torch.float64) / wide**0.5
        offset = torch.randn(narrow, generator=draws, dtype=torch.float64)
        if row == 0:
            direction = rest[0] / rest[0].square().sum()
            layer = torch.outer(direction, weight.double())
            offset = direction * (bias - constant)
        constant = constant + (rest @ offset)[0]
        rest = rest @ layer
        state |= {f"{prefix}{row}.weight": layer.float(), f"{prefix}{row}.bias": offset.float()}
    return state
