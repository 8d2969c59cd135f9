"""A value as its tensors and the rest: what a transport moves fast, and what it pickles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unirl.types.batch import Rows


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where tensor number `index` stands."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Rows of class `kind` whose fields are laid out."""

    kind: type[Rows]
    values: dict[str, Any]


def laid_out(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """The layout of `value` and the tensors in it, among Rows, dicts, lists and tuples. A tensor met twice is one."""
    tensors: dict[int, torch.Tensor] = {}
    slots: dict[int, _Slot] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.setdefault(id(item), item)
            return slots.setdefault(id(item), _Slot(len(slots)))
        if isinstance(item, Rows):
            return _Fields(
                type(item), {field.name: visit(item.__dict__[field.name]) for field in dataclasses.fields(item)}
            )
        return _each(item, visit)

    return visit(value), list(tensors.values())


def put_together(layout: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `laid_out` took apart."""
    if isinstance(layout, _Slot):
        return tensors[layout.index]
    if isinstance(layout, _Fields):
        return layout.kind(**{name: put_together(value, tensors) for name, value in layout.values.items()})
    return _each(layout, lambda item: put_together(item, tensors))


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in `value`, each counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in laid_out(value)[1])


def _each(item: Any, change: Callable[[Any], Any]) -> Any:
    if type(item) in (list, tuple):
        return type(item)(change(inner) for inner in item)
    if type(item) is dict:
        return {key: change(inner) for key, inner in item.items()}
    return item
