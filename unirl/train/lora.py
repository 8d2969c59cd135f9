"""Low-rank adapters through peft, injected into the module in place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from unirl.types.seed import generator

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclasses.dataclass(frozen=True)
class LoRA:
    """rank, alpha: the update is `alpha / rank * B A`. targets: module name suffixes; None takes the family's."""

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ValueError(f"rank and alpha must be at least 1, got rank={self.rank}, alpha={self.alpha}")
        if self.targets is not None and not self.targets:
            raise ValueError("targets is empty; leave it null for the family's own")


def adapter_config(lora: LoRA, default_targets: tuple[str, ...]) -> LoraConfig:
    """The same in peft's words."""
    from peft import LoraConfig

    targets = lora.targets or default_targets
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets))


def inject(module: torch.nn.Module, lora: LoRA, default_targets: tuple[str, ...], seed: int) -> None:
    """Wrap the targeted Linear layers; the adapter is float32 and the only thing that trains.

    A target that matches no layer is an error: part of the model would silently stay untrained. B is 0, so the adapter
    starts as the identity. A is drawn (Kaiming) from the seed and its own name, whatever the device and the base dtype.
    """
    from peft import inject_adapter_in_model

    targets = lora.targets or default_targets
    names = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    unmatched = [target for target in targets if not any(_matches(name, target) for name in names)]
    if unmatched:
        raise ValueError(f"LoRA targets {unmatched} match no Linear layer; layers here end in {_endings(names)}")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(adapter_config(lora, default_targets), module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            # peft has drawn from the global generator and rounded to the dtype of the layer below.
            start = torch.zeros(parameter.shape)
            if "lora_A" in name:
                torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator(seed, "lora", name))
            parameter.data = start.to(parameter.device)


@contextmanager
def switched_off(module: torch.nn.Module) -> Iterator[None]:
    """The module without its adapters; they and their `requires_grad` come back whatever happens inside."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    assert layers, "the module has no adapter"
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    _enable(layers, False)
    try:
        yield
    finally:
        _enable(layers, True)
        for parameter in trainable:
            parameter.requires_grad_(True)


def _enable(layers: Sequence[BaseTunerLayer], enabled: bool) -> None:
    for layer in layers:
        layer.enable_adapters(enabled)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _endings(names: list[str]) -> list[str]:
    return sorted({".".join(name.split(".")[-2:]) if name[-1].isdigit() else name.split(".")[-1] for name in names})
