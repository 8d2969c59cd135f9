"""Models over several ranks that have the same rows, by the plans that diffusers ships for its transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import ContextParallelInput

    from unirl.models.base import Bundle

# Which half of an adapter is split as its layer is.
_ADAPTER_HALF = {"colwise": "lora_B", "colwise_gather_output": "lora_B", "rowwise": "lora_A"}


def over_sequence(transformer: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """Each rank carries its part of the tokens through the blocks, and sees those of all in attention (Ulysses).

    What comes out is whole on every rank; the gradient that a rank has of a weight is that of its own tokens. This is
    what the model's own `enable_parallelism` does, which knows no CPU.
    """
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    size = mesh.size()
    for model in _with_plan(transformer, "_cp_plan"):
        heads, plan = model.config["num_attention_heads"], model._cp_plan  # noqa: SLF001 - the library's name of it
        if heads % size:
            raise ValueError(
                f"the {heads} attention heads of {type(model).__name__} do not divide into sp={size} parts"
            )
        grid = mesh._unflatten(0, (1, size), ("ring", "ulysses"))  # noqa: SLF001 - its only name so far
        config = ContextParallelConfig(ulysses_degree=size, mesh=grid)
        parallel = ParallelConfig(context_parallel_config=config)
        parallel.setup(mesh.get_local_rank(), size, next(model.parameters()).device, mesh=grid)
        for processor in model.attn_processors.values():
            processor._parallel_config = parallel  # noqa: SLF001 - where the library's attention looks
        if "encoder_hidden_states_mask" in inspect.signature(model.forward).parameters:
            _pad_texts(model, size)
        for name, inputs in plan.items():
            if isinstance(inputs, dict):
                _refuse_uneven(_named(model, name), inputs, size)
        apply_context_parallel(model, config, plan)


def over_tensors(bundle: Bundle, mesh: torch.distributed.DeviceMesh) -> frozenset[str]:
    """Each rank holds a part of the weights of attention and feed-forward, adapters included. See `Family.split`.

    What the model's own `enable_parallelism` does, which refuses adapters.
    """
    from diffusers.hooks.tensor_parallel import apply_tensor_parallel
    from diffusers.models._modeling_parallel import TensorParallelConfig

    model: Any = bundle.transformer
    heads, size, plan = model.config["num_attention_heads"], mesh.size(), model._tp_plan  # noqa: SLF001 - its own name
    if heads % size:
        raise ValueError(f"the {heads} attention heads of {type(model).__name__} do not divide into tp={size} parts")
    fused = [rule for rule, style in plan.items() if not isinstance(style, str)]
    assert not fused, f"no file could put {fused} together again: their parts are not in the order of the whole weight"
    partial = _between(model, plan)
    config = TensorParallelConfig(mesh=mesh)
    config.setup(mesh.get_local_rank(), size, bundle.device, mesh)
    apply_tensor_parallel(model, config, with_adapters(model, plan))
    return frozenset(bundle.trainable) & partial


def with_adapters(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """`plan`, in which an adapted layer stands for the layer below it and for the half of the adapter like it.

    The other half is small, and stays whole on every rank.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    rules: dict[str, str] = {}
    for rule, style in plan.items():
        if not any(_pattern(rule).fullmatch(name) for name in adapted):
            rules[rule] = style
        elif style in _ADAPTER_HALF:
            rules |= {f"{rule}.base_layer": style, f"{rule}.{_ADAPTER_HALF[style]}.default": style}
        else:
            raise ValueError(
                f"LoRA cannot wrap {rule}, which the library splits as {style}: leave it out of the targets"
            )
    return rules


def _with_plan(transformer: torch.nn.Module, plan: str) -> list[Any]:
    """The models in `transformer` (two experts are two) whose class has such a plan."""
    return [module for module in transformer.modules() if vars(type(module)).get(plan)]


def _named(model: torch.nn.Module, rule: str) -> list[torch.nn.Module]:
    """The modules of a rule of a plan."""
    return [module for name, module in model.named_modules() if _pattern(rule).fullmatch(name)]


def _pattern(rule: str) -> re.Pattern[str]:
    """Of the names that a rule stands for: * is any number."""
    return re.compile(re.escape(rule).replace(r"\*", r"\d+"))


def _between(model: torch.nn.Module, plan: Mapping[str, Any]) -> set[str]:
    """Weights beside split layers, such as the norms of queries and keys: a rank uses them on its own heads alone."""
    split = [name for name, _ in model.named_modules() if any(_pattern(rule).fullmatch(name) for rule in plan)]
    beside = {name.rpartition(".")[0] for name in split}
    return {
        name
        for name, _ in model.named_parameters()
        if any(name.startswith(f"{parent}.") for parent in beside)
        and not any(name.startswith(f"{layer}.") for layer in split)
    }


def _pad_texts(model: torch.nn.Module, size: int) -> None:
    """Masked tokens behind the texts, until their number divides: prompts have any length."""

    def pad(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, mask = kwargs["encoder_hidden_states"], kwargs["encoder_hidden_states_mask"]
        more = -tokens.shape[1] % size
        return args, kwargs | {
            "encoder_hidden_states": torch.nn.functional.pad(tokens, (0, 0, 0, more)),
            "encoder_hidden_states_mask": torch.nn.functional.pad(mask, (0, more)),
        }

    model.register_forward_pre_hook(pad, with_kwargs=True)


def _refuse_uneven(modules: list[torch.nn.Module], inputs: Mapping[str | int, ContextParallelInput], size: int) -> None:
    """ValueError from a forward of `modules` whose tokens do not divide; the library asserts."""

    def refuse(given: Mapping[str, Any]) -> None:
        for name, cut in inputs.items():
            tensor = given.get(name) if isinstance(name, str) else None
            if isinstance(tensor, torch.Tensor) and tensor.ndim == cut.expected_dims:
                count = tensor.shape[cut.split_dim]
                if count % size:
                    raise ValueError(
                        f"{count} tokens of {name} do not divide into sp={size} parts: choose another size of what is "
                        "made, or another sp"
                    )

    for module in modules:
        signature = inspect.signature(module.forward)
        module.register_forward_pre_hook(
            lambda _, args, kwargs, signature=signature: refuse(signature.bind(*args, **kwargs).arguments),
            with_kwargs=True,
        )
