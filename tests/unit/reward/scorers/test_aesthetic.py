from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.unit.reward.samples import entry
from tests.unit.reward.scorers.affine_heads import head_state
from tests.unit.reward.scorers.tiny_clip import WIDTH, picture, samples, save_clip
from unirl.reward.scorers.aesthetic import LaionAesthetic
from unirl.reward.weights import affine

# Of the published weights: the bias, the norm of the map, its first component.
BIAS, NORM, FIRST = 5.236645844819847, 17.99562477643365, -0.69159


def save_aesthetic(folder: Path, seed: int = 0) -> dict[str, Any]:
    """A random map with the published bias and norm, behind a random CLIP."""
    weight = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    torch.save(head_state(NORM * weight / weight.norm(), BIAS, "layers."), folder / "aesthetic-model.pth")
    return {"checkpoint": save_clip(folder / "clip"), "head": str(folder)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    return save_aesthetic(tmp_path_factory.mktemp("aesthetic"))


@pytest.fixture(scope="module")
def scorer(folders) -> LaionAesthetic:
    return LaionAesthetic(**folders)


def test_golden_map_of_five_layers_as_one():
    weight = torch.cat([torch.tensor([FIRST]), torch.full((767,), ((NORM**2 - FIRST**2) / 767) ** 0.5)])
    head = affine(head_state(weight, BIAS, "layers."), "layers.", "a test")
    assert head(torch.zeros(768)).item() == pytest.approx(5.2366457, abs=2e-6)
    assert head(torch.eye(768)[0]).item() == pytest.approx(4.5450521, abs=1e-5)
    assert head.weight.norm().item() == pytest.approx(NORM, rel=1e-6)


def test_the_score_is_that_of_the_five_layers_one_after_the_other_in_float64(scorer, folders):
    model: Any = transformers.CLIPModel.from_pretrained(folders["checkpoint"]).double()
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folders["checkpoint"])
    state = torch.load(Path(folders["head"]) / "aesthetic-model.pth", weights_only=True)
    for sample in samples()[:4]:
        pixels = processor([Image.fromarray(sample.picture)], return_tensors="pt").pixel_values.double()
        features = model.get_image_features(pixels).pooler_output
        x = features / features.norm()
        for row in (0, 2, 4, 6, 7):
            x = x @ state[f"layers.{row}.weight"].double().T + state[f"layers.{row}.bias"].double()
        assert scorer.score([sample]) == [pytest.approx(x.item(), abs=1e-4)]


def test_the_prompt_does_not_count(scorer):
    assert len(set(scorer.score([entry(picture(), prompt) for prompt in ("a fox", "", "a" * 500)]))) == 1
    assert scorer.score([entry(picture(seed=1))]) != scorer.score([entry(picture(seed=2))])


def test_scores_do_not_depend_on_the_batch(scorer, folders):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=1e-4)
    assert LaionAesthetic(**folders, batch_size=3).score(samples()) == pytest.approx(singly, abs=1e-4)


def test_the_version_follows_the_head_as_well(scorer, folders, tmp_path):
    other = save_aesthetic(tmp_path, seed=1) | {"checkpoint": folders["checkpoint"]}
    assert LaionAesthetic(**other).version() != scorer.version()


def test_a_file_of_other_weights_is_refused(folders, tmp_path):
    torch.save({"fc.weight": torch.zeros(1, 16)}, tmp_path / "aesthetic-model.pth")
    with pytest.raises(ValueError, match=r"holds no layers layers\.0\.weight .* it has \['fc\.weight'\]"):
        LaionAesthetic(checkpoint=folders["checkpoint"], head=str(tmp_path)).prepare()


def test_a_folder_without_the_head_is_refused_before_anything_loads(folders, tmp_path):
    with pytest.raises(ValueError, match=r"holds no aesthetic-model\.pth"):
        LaionAesthetic(checkpoint=folders["checkpoint"], head=str(tmp_path))
