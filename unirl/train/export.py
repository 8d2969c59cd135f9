"""Trained weights as what the ecosystem loads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from unirl.models.policy import Trainable
from unirl.train.lora import LoRA, adapter_config


def write_export(stage: Trainable, lora: LoRA | None, folder: Path) -> None:
    """Write the present weights of `stage` to `folder`, which must be new or empty; it is complete or not there.

    Without `lora` the family's own folder (`family.save`). With it a peft adapter, which
    `PeftModel.from_pretrained(transformer, folder)` loads, and where the family is a diffusers pipeline that loads
    adapters also `pytorch_lora_weights.safetensors`, which `pipeline.load_lora_weights(folder)` loads.
    """
    refuse_taken(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        whole = Path(beside, folder.name)
        whole.mkdir()
        if lora is None:
            stage.family.save(stage.bundle, whole)
        else:
            _write_adapter(stage, lora, whole)
        whole.rename(folder)


def refuse_taken(folder: Path) -> None:
    """ValueError for a folder that an export would write into or over."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: export to a new or an empty folder")


def _write_adapter(stage: Trainable, lora: LoRA, folder: Path) -> None:
    from diffusers.loaders.lora_base import LoraBaseMixin
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import PreTrainedModel

    module, processors = stage.bundle.trained, stage.bundle.processors
    weights = {name: value.detach().cpu() for name, value in get_peft_model_state_dict(module).items()}
    config = adapter_config(lora, stage.family.lora_targets)
    config.inference_mode, config.exclude_modules = True, stage.family.adapter_excludes()
    if isinstance(module, PreTrainedModel):
        config.base_model_name_or_path, config.task_type = module.name_or_path, "CAUSAL_LM"
    if "pipeline" in processors:
        pipeline, loads_adapters = processors["pipeline"], isinstance(processors["pipeline"], LoraBaseMixin)
        config.base_model_name_or_path = pipeline.name_or_path
        if loads_adapters:
            for file, layers in stage.family.adapter_files(_scaled(weights, lora)).items():
                pipeline.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=file)
    config.save_pretrained(str(folder))
    named = {f"base_model.model.{name}": value for name, value in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _scaled(weights: dict[str, torch.Tensor], lora: LoRA) -> dict[str, torch.Tensor]:
    """alpha / rank multiplied into B. The file says nothing of alpha, and its readers then take alpha = rank."""
    return {name: value * (lora.alpha / lora.rank) if "lora_B" in name else value for name, value in weights.items()}
