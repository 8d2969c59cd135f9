"""A transformers model over several ranks that read the same rows, by the plans that the library ships for it."""

from __future__ import annotations

from typing import Any

import torch

from unirl.models.base import Bundle

# Which half of an adapter is split as its layer is; the other half is small and stays whole on every rank.
_ADAPTER_HALF = {"colwise": "lora_B", "colwise_gather_output": "lora_B", "rowwise": "lora_A"}
# Of norms between split layers. The library adds up what has been accumulated so far at every backward, so that with
# several micro-batches to a step the earlier ones would count again: they are left whole here, and added up once.
_PARTIAL = "replicated_with_grad_allreduce"


def refusal(config: Any, axis: str, size: int) -> str | None:
    """Why a model of this config cannot be split over `size` ranks; None where it can."""
    plans = {"tp": config.base_model_tp_plan, "ep": config.base_model_ep_plan}
    if not plans.get(axis):
        return "transformers ships no such plan for it"
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
    return frozenset(name for name, parameter in bundle.trained.named_parameters() if parameter.requires_grad) & partial


def _styles(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """The style of each parameter and module that `plan` names; of an adapted layer, that of the layer below it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    adapted = {
        replace_layer_number_by_wildcard(name)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    rules = dict(plan)
    for rule in adapted & plan.keys():
        style = rules.pop(rule)
        if style not in _ADAPTER_HALF:
            raise ValueError(
                f"LoRA cannot wrap {rule}, which the library splits as {style}: leave it out of the targets"
            )
        rules |= {f"{rule}.base_layer": style, f"{rule}.{_ADAPTER_HALF[style]}.default": style}
    styles: dict[str, str] = model._expand_parallel_plan(rules)  # noqa: SLF001 - as from_pretrained expands it
    # A tied head has its weight from the embedding.
    there = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    return {name: style for name, style in styles.items() if name in there}
