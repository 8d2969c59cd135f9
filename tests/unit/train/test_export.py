"""Exports load where the ecosystem loads them, and do there what the trained policy does here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import PeftModel
from safetensors.torch import load_file

from tests.unit.models.rollouts import CPU, PROMPTS
from unirl.models.base import Bundle, DiffusionFamily
from unirl.models.diffusion.sd3 import SD3
from unirl.models.random_weights.sd3 import write as write_sd3
from unirl.models.tiny import TinySD3
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.export import write_export
from unirl.train.lora import LoRA


@dataclasses.dataclass(frozen=True)
class FailsToSave(TinySD3):
    """Its disk is full after the first file."""

    def save(self, bundle: Bundle, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> SD3:
    folder = write_sd3(tmp_path_factory.mktemp("sd3") / "pipeline")
    return SD3(checkpoint=str(folder), max_sequence_length=48)


def trained(family: DiffusionFamily, lora: LoRA | None, **settings: Any) -> FSDPBackend:
    """A backend with an EMA whose trainable weights have moved."""
    config = DiffusionBackendConfig(lora=lora, ema=EMA(), **settings)
    backend = FSDPBackend(family, config, device=CPU, seed=0, total_steps=1, with_reference=False)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backend.stage.bundle.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    return backend


def images(pipeline: Any) -> torch.Tensor:
    """What diffusers draws with it."""
    pipeline.set_progress_bar_config(disable=True)
    draws = torch.Generator().manual_seed(2)
    arguments = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 48, "output_type": "pt"}
    return pipeline(PROMPTS, generator=draws, **arguments).images


def velocity(transformer: torch.nn.Module) -> torch.Tensor:
    """Of two fixed points of the SD3 transformer."""
    _freeze(transformer)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(2, 4, 16, 16, generator=draws),
            timestep=torch.tensor([300.0, 900.0]),
            encoder_hidden_states=torch.randn(2, 20, 32, generator=draws),
            pooled_projections=torch.randn(2, 24, generator=draws),
            return_dict=False,
        )[0]


def _freeze(transformer: torch.nn.Module) -> None:
    """torch multiplies by a weight that wants a gradient in another order, even under no_grad."""
    transformer.requires_grad_(False)


def pipeline_at(folder: Path | str) -> Any:
    """Loaded as any user of diffusers would."""
    return StableDiffusion3Pipeline.from_pretrained(folder)


def pipeline_of(bundle: Bundle) -> Any:
    return bundle.processors["pipeline"]


def test_a_full_export_is_the_trained_pipeline(sd3: SD3, tmp_path: Path) -> None:
    backend = trained(sd3, None)
    backend.export(tmp_path / "live", weights="live")
    backend.export(tmp_path / "ema", weights="ema")
    expected, untouched = images(pipeline_of(backend.stage.bundle)), images(pipeline_at(sd3.checkpoint))
    assert (expected - untouched).abs().max() > 0.1
    torch.testing.assert_close(images(pipeline_at(tmp_path / "live")), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(images(pipeline_at(tmp_path / "ema")), untouched, rtol=0, atol=1e-5)
    again = dataclasses.replace(sd3, checkpoint=str(tmp_path / "live")).load(CPU, torch.float32)
    assert torch.equal(velocity(again.transformer), velocity(backend.stage.bundle.transformer))
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8), LoRA(rank=8, alpha=4), LoRA(rank=4, alpha=4)])
def test_an_adapter_loads_into_peft_and_diffusers_and_does_the_same_there(sd3: SD3, tmp_path: Path, lora: LoRA) -> None:
    backend = trained(sd3, lora)
    bundle = backend.stage.bundle
    backend.export(tmp_path / "adapter", weights="live")
    expected = velocity(bundle.transformer)
    base = pipeline_at(sd3.checkpoint)
    assert (velocity(base.transformer) - expected).abs().max() > 0.1
    assert torch.equal(velocity(PeftModel.from_pretrained(base.transformer, tmp_path / "adapter")), expected)
    pipeline = pipeline_at(sd3.checkpoint)
    pipeline.load_lora_weights(tmp_path / "adapter")
    torch.testing.assert_close(velocity(pipeline.transformer), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(images(pipeline), images(pipeline_of(bundle)), rtol=0, atol=1e-5)


def test_the_scale_travels_into_both_files(sd3: SD3, tmp_path: Path) -> None:
    backend = trained(sd3, LoRA(rank=64, alpha=128))
    for parameter in backend.stage.bundle.transformer.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(1.0)
    backend.export(tmp_path / "adapter", weights="live")
    name = "transformer_blocks.0.attn2.to_q"
    merged = {
        "peft": PeftModel.from_pretrained(sd3.load(CPU, torch.float32).transformer, tmp_path / "adapter"),
        "diffusers": pipeline_at(sd3.checkpoint),
    }
    merged["peft"] = merged["peft"].merge_and_unload()
    merged["diffusers"].load_lora_weights(tmp_path / "adapter")
    merged["diffusers"].fuse_lora()
    merged["diffusers"].unload_lora_weights()
    before = sd3.load(CPU, torch.float32).transformer.get_parameter(f"{name}.weight")
    for transformer in (merged["peft"], merged["diffusers"].transformer):
        moved = transformer.get_parameter(f"{name}.weight") - before
        torch.testing.assert_close(moved, torch.full_like(moved, 128.0), rtol=0, atol=1e-4)


def test_the_adapter_holds_two_float32_matrices_of_every_wrapped_layer(sd3: SD3, tmp_path: Path) -> None:
    backend = trained(sd3, LoRA(rank=4, alpha=8), compute_dtype="bfloat16")
    backend.export(tmp_path / "adapter", weights="live")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
    ]
    live = {n: p for n, p in backend.stage.bundle.transformer.named_parameters() if p.requires_grad}
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(live) == 2 * 19
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for name, parameter in live.items():
        assert torch.equal(saved[f"base_model.model.{name.replace('.default', '')}"], parameter)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (4, 8, set(sd3.lora_targets))
    assert config["base_model_name_or_path"] == sd3.checkpoint


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_merging_changes_the_output_by_the_rounding_of_the_weights(
    sd3: SD3, tmp_path: Path, dtype: torch.dtype, bound: float
) -> None:
    trained(sd3, LoRA(rank=4, alpha=8)).export(tmp_path / "adapter", weights="live")

    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        base = sd3.load(CPU, dtype).transformer
        apart = velocity(PeftModel.from_pretrained(base, tmp_path / "adapter"))
        loaded = PeftModel.from_pretrained(sd3.load(CPU, dtype).transformer, tmp_path / "adapter")
        difference = relative(velocity(loaded.merge_and_unload()), apart)
    assert difference < bound


def test_an_adapter_of_a_family_without_a_pipeline_is_a_peft_adapter(tmp_path: Path) -> None:
    family = TinySD3(head_dim=8, embedding_dim=16)
    backend = trained(family, LoRA(rank=2, alpha=4))
    backend.export(tmp_path / "adapter", weights="live")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    transformer = backend.stage.bundle.transformer
    _freeze(transformer)
    arguments = torch.randn(2, 1, 8, 8), torch.tensor([300.0, 900.0]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    loaded = PeftModel.from_pretrained(family.load(CPU, torch.float32).transformer, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(*arguments), transformer(*arguments))


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    backend = trained(TinySD3(head_dim=8, embedding_dim=16), None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(ValueError, match=f"{name} exists already: export to a new or an empty folder"):
            backend.export(tmp_path / name, weights="live")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "nested"):
        backend.export(folder, weights="live")
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "folder", "new"]


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    backend = trained(FailsToSave(head_dim=8, embedding_dim=16), None)
    with pytest.raises(OSError, match="no space"):
        write_export(backend.stage, None, tmp_path / "export")
    assert not list(tmp_path.iterdir())
