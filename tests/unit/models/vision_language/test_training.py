"""What trains of a model that sees: the text model, or all of it; what is written; a run of GRPO."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import metrics, state
from tests.unit.models.vision_language.tiny import (
    CPU,
    NAMES,
    backend,
    loaded,
    own_inputs,
    own_model,
    segment,
    uneven,
    written,
)
from unirl import cli
from unirl.models.ar_stage import ARStage
from unirl.models.language.vision_language import VisionLanguage
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.lora import LoRA


def trained_names(policy: FSDPBackend[Any, ARStage]) -> list[str]:
    return [name for name, own in policy.stage.bundle.trained.named_parameters() if own.requires_grad]


def updated(policy: FSDPBackend[Any, ARStage]) -> FSDPBackend[Any, ARStage]:
    """After one step towards its own responses."""
    part = written(policy.stage, uneven())
    (-policy.stage.replay(part).log_probs.sum()).backward()
    policy.step()
    return policy


def shown(stage: ARStage) -> torch.Tensor:
    """The log-probs of fixed words after both prompts."""
    part = written(ARStage(stage.family, stage.bundle, torch.float32), uneven())
    with torch.no_grad():
        return stage.replay(part).log_probs


def test_lora_wraps_the_text_model_alone(checkpoint: Path) -> None:
    names = trained_names(backend(checkpoint, lora=LoRA(rank=2, alpha=4)))
    targets = len(VisionLanguage.lora_targets)
    layers = sum(".q_proj.lora_A" in name for name in names)
    assert len(names) == 2 * targets * layers
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_lora_wraps_the_tower_where_all_is_trained(checkpoint: Path) -> None:
    lora = LoRA(rank=2, alpha=4, targets=("q_proj", "qkv"))
    names = trained_names(backend(checkpoint, trained="all", lora=lora))
    assert {name.split(".")[1] for name in names} == {"language_model", "visual"}
    with pytest.raises(ValueError, match=r"\['qkv'\] match no Linear layer"):
        backend(checkpoint, lora=lora)


def test_the_tower_stays_as_it_is_unless_all_is_trained(checkpoint: Path) -> None:
    for trained, moves in (("text", False), ("all", True)):
        policy = backend(checkpoint, trained=trained)
        stage = policy.stage
        tower = (
            stage.bundle.frozen["visual"]
            if trained == "text"
            else stage.bundle.transformer.get_submodule("model.visual")
        )
        before = {name: value.clone() for name, value in tower.state_dict().items()}
        head = stage.bundle.transformer.get_submodule("lm_head").state_dict()["weight"].clone()
        updated(policy)
        changed = [name for name, value in tower.state_dict().items() if not torch.equal(value, before[name])]
        assert bool(changed) is moves
        assert not torch.equal(stage.bundle.transformer.get_submodule("lm_head").state_dict()["weight"], head)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_the_ratio_is_one_before_any_update_and_not_after_it(checkpoint: Path, lora: LoRA | None) -> None:
    policy = backend(checkpoint, lora=lora)
    part = written(policy.stage, uneven())
    with torch.no_grad():
        torch.testing.assert_close(policy.stage.replay(part).log_probs, segment(part).log_probs, atol=2e-5, rtol=0)
    updated(policy)
    with torch.no_grad():
        assert (policy.stage.replay(part).log_probs - segment(part).log_probs).abs().max() > 1e-3


def test_recomputed_blocks_give_the_same_gradients(checkpoint: Path) -> None:
    found = []
    for recompute in (False, True):
        policy = backend(checkpoint, trained="all", gradient_checkpointing=recompute)
        policy.stage.replay(written(policy.stage, uneven())).log_probs.sum().backward()
        found.append([own.grad for own in policy.stage.bundle.trained.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("trained", ["text", "all"])
def test_a_saved_model_is_transformers_and_ours(checkpoint: Path, tmp_path: Path, trained: str) -> None:
    policy = updated(backend(checkpoint, trained=trained))
    stage, folder = policy.stage, tmp_path / "saved"
    policy.export(folder, weights="live")
    expected = shown(stage)
    torch.testing.assert_close(shown(loaded(folder).stage), expected, atol=0, rtol=0)
    part = written(stage, uneven(), group=1)
    prompts, first = stage.family.tokenize(stage.bundle, uneven()), segment(part).tokens[: segment(part).lengths[0]]
    logits = own_model(folder)(**own_inputs(prompts, 0, first)).logits[0, -len(first) - 1 : -1].log_softmax(-1)
    own = logits.gather(1, first[:, None])[:, 0]
    torch.testing.assert_close(stage.replay(part.select([0])).log_probs, own, atol=2e-5, rtol=0)
    names = {name for name, _ in stage.bundle.transformer.named_modules()}
    assert ("model.visual" in names) is (trained == "all")


def test_a_saved_model_keeps_what_reads_videos_and_the_limits_of_pictures(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "video_preprocessor_config.json").write_text(json.dumps({"video": True}))
    patch = json.loads((checkpoint / "preprocessor_config.json").read_text())["patch_size"]
    family = VisionLanguage(str(checkpoint), max_pixels=(6 * patch) ** 2)
    family.save(family.load(CPU, torch.float32), tmp_path / "saved")
    (checkpoint / "video_preprocessor_config.json").unlink()
    assert json.loads((tmp_path / "saved" / "video_preprocessor_config.json").read_text()) == {"video": True}
    images = json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())
    assert images["size"] == {"shortest_edge": (4 * patch) ** 2, "longest_edge": (6 * patch) ** 2}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_an_exported_adapter_is_peft_s(checkpoint: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = updated(backend(checkpoint, lora=LoRA(rank=2, alpha=4)))
    policy.export(tmp_path / "adapter", weights="live")
    own = PeftModel.from_pretrained(own_model(checkpoint), str(tmp_path / "adapter"))
    part = written(policy.stage, uneven(), group=1)
    prompts = policy.stage.family.tokenize(policy.stage.bundle, uneven())
    first = segment(part).tokens[: segment(part).lengths[0]]
    logits = own(**own_inputs(prompts, 0, first)).logits[0, -len(first) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, first[:, None])[:, 0]
    torch.testing.assert_close(policy.stage.replay(part.select([0])).log_probs, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_recipe_trains_from_a_cache_that_is_empty(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = [f"run.output={tmp_path}", "run.name=run", "run.seed=0", "logging.trackers=[]"]
    assert cli.main(["train", f"ar/tiny_{name}", *settings]) == 0
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    for line in lines[1:]:
        assert (line["reward/invalid"], line["train/skipped"]) == (0, 0)
        assert line["train/grad_norm"] > 0
    seconds = {name: value for name, value in state(tmp_path)["parameters"].items() if "lora_B" in name}
    assert all(value.any() for value in seconds.values())
