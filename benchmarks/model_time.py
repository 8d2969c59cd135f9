"""How much of a step is the model's own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def model_seconds(*modules: torch.nn.Module) -> Iterator[list[float]]:
    """CPU seconds in the forwards of `modules` and in every backward, summed into the one element of the list."""
    spent, started = [0.0], [0.0]

    def before(module: torch.nn.Module, inputs: object) -> None:
        started[0] = time.process_time()

    def after(module: torch.nn.Module, inputs: object, output: object) -> None:
        spent[0] += time.process_time() - started[0]

    backward = torch.Tensor.backward

    def timed_backward(*args: object, **kwargs: object) -> None:
        start, inside = time.process_time(), spent[0]
        backward(*args, **kwargs)  # type: ignore[arg-type]
        spent[0] = inside + time.process_time() - start  # a forward that is computed again is a part of it

    hooks = [
        hook
        for module in modules
        for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]
    torch.Tensor.backward = timed_backward  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
