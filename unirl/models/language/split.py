"""A transformers model over several ranks that read the same rows, by the plans that the library ships for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unirl.models.split import with_adapters

if TYPE_CHECKING:
    from unirl.models.base import Bundle

# Of norms between split layers. The library adds up what has been accumulated so far at every backward, so that with
# several micro-batches to a step the earlier ones would count again: they are left whole here, and added up once.
_PARTIAL = "replicated_with_grad_allreduce"


def refusal(config: Any, axis: str, size: int) -> str | None:
    """Why a model of this config cannot be split over `size` ranks; None where it can."""
    plans = {"tp": config.base_model_tp_plan, "ep": config.base_model_ep_plan}
    if not plans.get(axis):
        return "transformers ships no such plan for it"
    if not any(rule.startswith("layers.") for rule in plans[axis]):
        return f"the plan that transformers ships for it leaves its layers whole, {plans[axis]}"
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    odd = {name: count for name, count in heads.items() if count % size}
    return f"{size} does not divide its heads, {odd}" if axis == "tp" and odd else None


def split(bundle: Bundle, axis: str, mesh: torch.distributed.DeviceMesh) -> frozenset[str]:
    """Split the loaded model, adapters included. See `Family.split`."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model: Any = bundle.transformer
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    styles = _styles(model, model.tp_plan if axis == "tp" else model.ep_plan)
    partial = {name for name, style in styles.items() if style == _PARTIAL}
    styles = {name: style for name, style in styles.items() if style != _PARTIAL}
    if axis == "tp":
        apply_tensor_parallelism(model, mesh, styles)
    else:
        apply_expert_parallelism(model, mesh, mesh, styles, ep_implementation="all_reduce")
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return frozenset(bundle.trainable) & partial


def _styles(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """The style of each parameter and module that `plan` names."""
    styles: dict[str, str] = model._expand_parallel_plan(with_adapters(model, plan))  # noqa: SLF001 - as it is loaded
    # A tied head has its weight from the embedding.
    there = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    return {name: style for name, style in styles.items() if name in there}
