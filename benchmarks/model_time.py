"""How much of a step is the model's own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unirl.models.language.decode import Decoder


@contextmanager
def model_seconds(*modules: torch.nn.Module) -> Iterator[list[float]]:
    """CPU seconds in the forwards of `modules`, decoding steps and every backward, summed into the one element.

    A module that another one of `modules` calls must not be among them.
    """
    spent, started = [0.0], [0.0]

    def before(module: torch.nn.Module, inputs: object) -> None:
        started[0] = time.process_time()

    def after(module: torch.nn.Module, inputs: object, output: object) -> None:
        spent[0] += time.process_time() - started[0]

    backward, decoded = torch.Tensor.backward, Decoder.__call__

    def timed_decoding(*args: Any) -> torch.Tensor:
        start = time.process_time()
        hidden = decoded(*args)
        spent[0] += time.process_time() - start
        return hidden

    def timed_backward(*args: object, **kwargs: object) -> None:
        start, inside = time.process_time(), spent[0]
        backward(*args, **kwargs)  # type: ignore[arg-type]
        spent[0] = inside + time.process_time() - start  # a forward that is computed again is a part of it

    hooks = [
        hook
        for module in modules
        for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]
    torch.Tensor.backward, Decoder.__call__ = timed_backward, timed_decoding  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        torch.Tensor.backward, Decoder.__call__ = backward, decoded  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
