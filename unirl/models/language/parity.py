"""At load: does a packed forward give what the model's own forward gives? A model may do more than its layers show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.attention import PackedLayout

# Of the norm of the logits. Rounding stays far below, a soft cap or a sink that is left out far above.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
_PROMPTS, _RESPONSES, _PARENTS = (3, 5), (2, 4, 3), (0, 1, 1)


def refuse_other_forwards(family: LanguageFamily, bundle: Bundle, install: Callable[[], None]) -> None:
    """Install the packed attention; ValueError where logits of packed rows are not those of the rows by themselves."""
    model: Any = bundle.transformer
    count = sum(_PROMPTS) + sum(_RESPONSES)
    tokens = (torch.arange(count) * 7919 + 11) % family.vocabulary(bundle)
    pieces = tokens.split([*_PROMPTS, *_RESPONSES])
    prompts, responses = pieces[: len(_PROMPTS)], pieces[len(_PROMPTS) :]
    device = bundle.device
    with torch.no_grad():
        own = []
        for parent, response in zip(_PARENTS, responses, strict=True):
            row = torch.cat([prompts[parent], response])[None].to(device)
            own.append(model(input_ids=row, use_cache=False).logits[0, -len(response) :].float())
        install()
        layout = PackedLayout(torch.tensor(_PROMPTS), torch.tensor(_RESPONSES), torch.tensor(_PARENTS))
        starts = [0] * len(_PROMPTS) + [_PROMPTS[parent] for parent in _PARENTS]
        places = [start + torch.arange(len(piece)) for start, piece in zip(starts, pieces, strict=True)]
        positions = torch.cat(places)
        hidden = family.hidden_states(
            bundle, tokens[None].to(device), positions[None, :, None].to(device), layout.to(device)
        )
        packed = family.logits(bundle, hidden[0, -sum(_RESPONSES) :]).float()
    expected = torch.cat(own)
    difference = float((packed - expected).norm() / expected.norm())
    if not difference <= _TOLERANCE[str(model.dtype).removeprefix("torch.")]:
        raise ValueError(
            f"{type(model).__name__} does not run packed: its logits differ from those of its own forward by "
            f"{difference:.1e} of their norm. Models whose attention has more than a causal mask and a window (soft "
            "caps, sinks, linear attention) or that change their logits after the head are not supported"
        )
