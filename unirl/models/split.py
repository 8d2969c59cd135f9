"""A transformer of diffusers over several ranks that hold the same rows, by the plans that the library ships for it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import ContextParallelInput

    from unirl.models.base import Facts


def refusal(facts: Facts, axis: str, device_type: str) -> str | None:
    """Why the model cannot be split over the ranks of `axis`; None where it can."""
    if not {"sp": facts.context_parallel, "tp": facts.tensor_parallel}.get(axis, False):
        return "diffusers ships no such plan for it"
    if axis == "tp" and device_type != "cuda":
        return f"diffusers runs its tensor parallel plans on CUDA, here the device is {device_type}"
    return None


def over_sequence(transformer: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """Each rank carries its part of the tokens through the blocks, and sees those of all in attention (Ulysses).

    What comes out is whole on every rank; the gradient that a rank has of a weight is that of its own tokens. This is
    what the model's own `enable_parallelism` does, which knows no CPU.
    """
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    size = mesh.size()
    for model in _with_plan(transformer, "_cp_plan"):
        heads = model.config["num_attention_heads"]
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
        for name, inputs in model._cp_plan.items():  # noqa: SLF001 - the library's name of its plan
            if isinstance(inputs, dict):
                _refuse_uneven(_named(model, name), inputs, size)
        apply_context_parallel(model, config, model._cp_plan)  # noqa: SLF001


def over_tensors(transformer: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """Each rank holds a part of the weights of attention and feed-forward. This is the model's `enable_parallelism`."""
    from diffusers.models._modeling_parallel import TensorParallelConfig

    for model in _with_plan(transformer, "_tp_plan"):
        model.enable_parallelism(config=TensorParallelConfig(mesh=mesh))


def _with_plan(transformer: torch.nn.Module, plan: str) -> list[Any]:
    """The models in `transformer` (two experts are two) whose class has such a plan."""
    return [module for module in transformer.modules() if vars(type(module)).get(plan)]


def _named(model: torch.nn.Module, name: str) -> list[torch.nn.Module]:
    """The modules of a name of a plan, in which * is any number."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return [module for own, module in model.named_modules() if pattern.fullmatch(own)]


def _pad_texts(model: torch.nn.Module, size: int) -> None:
    """Masked tokens behind the texts, until their number divides: prompts have any length."""

    def pad(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
