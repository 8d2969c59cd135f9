"""The state of a backend: a nested dict in memory, named tensors and a few plain values in a checkpoint.

state["parameters"][NAME]         <->  parameters.NAME
state["optimizer"][NAME][ENTRY]   <->  optimizer.NAME.ENTRY    (none for a parameter that never got a gradient)
state["ema"][NAME]                <->  ema.NAME                (state["ema"] is None where there is no EMA)
state[COUNTER]                    <->  in every rank's own values, with the state of its global random streams
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

COUNTERS = ("steps", "ema_updates", "skipped_in_row", "version")


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a nested state by their names in a checkpoint."""
    named = {f"parameters.{name}": value for name, value in state["parameters"].items()}
    for name, entries in state["optimizer"].items():
        named.update({f"optimizer.{name}.{entry}": value for entry, value in entries.items()})
    named.update({f"ema.{name}": value for name, value in (state["ema"] or {}).items()})
    return named


def nested(named: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state of named tensors and the values that one rank has saved for itself."""
    state: dict[str, Any] = {"parameters": {}, "optimizer": {}, "ema": {}, **own}
    for path, value in named.items():
        kind, name = path.split(".", 1)
        if kind == "optimizer":
            name, entry = name.rsplit(".", 1)
            state["optimizer"].setdefault(name, {})[entry] = value
        else:
            state[kind][name] = value
    return {**state, "ema": state["ema"] or None}


def moments_like(
    saved: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Empty optimizer entries for those in `saved`: those of a parameter's shape are sharded as it is."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in saved.items():
        like = parameters[name].detach()
        moments[name] = {
            entry: torch.empty_like(like, dtype=value.dtype)
            if value.shape == like.shape
            else torch.empty(value.shape, dtype=value.dtype, device=like.device)
            for entry, value in entries.items()
        }
    return moments


def refuse_misfit(saved: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter], *, ema: bool) -> None:
    """ValueError where a nested state, of tensors with or without data, is not one of these parameters.

    ema: whether there is one to load into
    """
    names = saved["parameters"]
    if set(names) != set(parameters):
        raise ValueError(_name_difference(set(names), set(parameters)))
    for name, parameter in parameters.items():
        found, here = names[name], parameter
        if found.shape != here.shape:
            raise ValueError(f"{name} was saved with the shape {tuple(found.shape)}, here it has {tuple(here.shape)}")
        if found.dtype != here.dtype:
            raise ValueError(f"{name} was saved as {found.dtype}, here it is {here.dtype}")
    if saved["steps"] > 0 and not saved["optimizer"]:
        raise ValueError(f"the checkpoint has taken {saved['steps']} optimizer steps and holds no optimizer state")
    if ema != (saved["ema"] is not None):
        raise ValueError("the checkpoint and the recipe disagree on whether there is an EMA")
    strangers = set(saved["optimizer"]) - set(names) | set(saved["ema"] or names) ^ set(names)
    if strangers:
        raise ValueError(f"the checkpoint's optimizer state and EMA are not of its weights: {sorted(strangers)[:3]}")


def _name_difference(saved: set[str], present: set[str]) -> str:
    missing, unexpected = sorted(present - saved), sorted(saved - present)
    return (
        f"the checkpoint does not fit the trainable weights: {len(missing)} missing {missing[:3]}, "
        f"{len(unexpected)} unexpected {unexpected[:3]}"
    )
