"""Published weights of scorers: nothing missing, nothing left over, no pickled code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from unirl.models.pretrained import check_hub_id, resolve


def load_whole(kind: type[Any], checkpoint: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The saved model of class `kind`, in eval mode. ValueError where weights are missing: they would be random."""
    model, found = kind.from_pretrained(resolve(checkpoint), dtype=dtype, output_loading_info=True)
    _refuse(checkpoint, found["missing_keys"], ())
    return model.to(device).eval()


def fill(model: torch.nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Load `state` into `model`. ValueError, naming `source`, unless it has every weight in its shape and no other."""
    own = model.state_dict()
    _refuse(source, own.keys() - state.keys(), state.keys() - own.keys())
    other = sorted(name for name in own if own[name].shape != state[name].shape)
    if other:
        name = other[0]
        raise ValueError(
            f"{source}: {len(other)} weights have another shape, first {name} with {tuple(state[name].shape)}, "
            f"not {tuple(own[name].shape)}: take the weights that belong to this architecture"
        )
    model.load_state_dict(state)


def merged(state: Mapping[str, torch.Tensor], scale: float, source: str) -> dict[str, torch.Tensor]:
    """The weights of a model that peft has wrapped, as those of the model: `W + scale * B A`, in float32."""
    rest = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    for base in [name for name in rest if name.endswith(".base_layer.weight")]:
        stem = base.removesuffix(".base_layer.weight")
        down, up = (f"{stem}.lora_{part}.default.weight" for part in "AB")
        _refuse(source, {down, up} - rest.keys(), ())
        added = rest.pop(up).float() @ rest.pop(down).float()
        whole = rest.pop(base)
        rest[f"{stem}.weight"] = (whole.float() + scale * added).to(whole.dtype)
    _refuse(source, (), [name for name in rest if ".lora_" in name])
    return {name.replace(".base_layer.", "."): value for name, value in rest.items()}


def affine(state: Mapping[str, torch.Tensor], prefix: str, source: str) -> torch.nn.Linear:
    """A stack of linear layers without activation as the one layer `(D,) -> (1,)` that it is, multiplied in float64.

    The layers are `{prefix}{i}.weight` and `.bias`, in the order of `i`; what lies between them is dropout.
    """
    rows = sorted(
        int(found[1]) for name in state if (found := re.fullmatch(rf"{re.escape(prefix)}(\d+)\.weight", name))
    )
    if not rows or len(state[f"{prefix}{rows[-1]}.weight"]) != 1:
        raise ValueError(
            f"{source} holds no layers {prefix}0.weight ... that end in one number: it has {sorted(state)[:9]}"
        )
    first = state[f"{prefix}{rows[0]}.weight"]
    weight = torch.eye(first.shape[1], dtype=torch.float64, device=first.device)
    bias = torch.zeros(first.shape[1], dtype=torch.float64, device=first.device)
    for row in rows:
        layer = state[f"{prefix}{row}.weight"].double()
        weight, bias = layer @ weight, layer @ bias + state[f"{prefix}{row}.bias"].double()
    head = torch.nn.Linear(weight.shape[1], 1, device=first.device)
    head.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return head.eval()


def check_file(checkpoint: str, name: str) -> None:
    """ValueError where `checkpoint` is a folder without the file `name`; a hub id is taken at its word."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        check_hub_id(checkpoint)
    elif not (folder / name).is_file():
        raise ValueError(f"checkpoint {checkpoint} holds no {name}: give the folder that does, or a hub id")


def file_of(checkpoint: str, name: str) -> Path:
    """The file `name` of a folder or of a hub id, which is downloaded at the first use."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint) / name
    return Path(huggingface_hub.hf_hub_download(checkpoint, name))


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch, on the CPU; of what holds them under `state_dict`, these."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return saved.get("state_dict", saved)


def _refuse(source: str, missing: Any, unknown: Any) -> None:
    if missing or unknown:
        raise ValueError(
            f"{source} does not hold the weights of this scorer: {len(missing)} are missing, {sorted(missing)[:3]}, "
            f"and {len(unknown)} unknown, {sorted(unknown)[:3]}"
        )
