from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.unit.reward.samples import entry
from tests.unit.reward.scorers.open_clip import OpenClip
from tests.unit.reward.scorers.tiny_clip import picture, samples, save_clip
from unirl.models.random_weights.parts import clip_tokenizer
from unirl.reward.scorers.hps import HPSv2, clip_names, padded_pixels

CPU = torch.device("cpu")
MEAN, STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])


def save_hps(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Both releases and the folder of their architecture, as settings of the scorer."""
    save_clip(folder / "clip", hidden_act="gelu")
    for release, name in enumerate(("HPS_v2_compressed.pt", "HPS_v2.1_compressed.pt")):
        torch.save({"state_dict": OpenClip(seed + release).state_dict()}, folder / name)
    return {"checkpoint": str(folder), "clip": str(folder / "clip")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    return save_hps(tmp_path_factory.mktemp("hps"))


@pytest.fixture(scope="module")
def scorer(folders) -> HPSv2:
    return HPSv2(**folders)


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of open_clip's ViT-H-14."""
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "token_embedding.weight": (49408, 1024),
        "positional_embedding": (77, 1024),
        "text_projection": (1024, 1024),
        "visual.class_embedding": (1280,),
        "visual.positional_embedding": (257, 1280),
        "visual.proj": (1280, 1024),
        "visual.conv1.weight": (1280, 3, 14, 14),
    }
    norms = {"ln_final": 1024, "visual.ln_pre": 1280, "visual.ln_post": 1280}
    for tower, width, layers in (("visual.transformer", 1280, 32), ("transformer", 1024, 24)):
        for block in (f"{tower}.resblocks.{layer}" for layer in range(layers)):
            norms |= {f"{block}.ln_1": width, f"{block}.ln_2": width}
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            for part, out, into in (("attn.out_proj", 1, 1), ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)):
                shapes |= {
                    f"{block}.{part}.weight": (out * width, into * width),
                    f"{block}.{part}.bias": (out * width,),
                }
    return shapes | {f"{name}.{kind}": (width,) for name, width in norms.items() for kind in ("weight", "bias")}


def levels(values: torch.Tensor) -> np.ndarray:
    """`(1, 3, side, side)` as the model takes it -> `(side, side, 3)` in 0..255."""
    return (values[0].permute(1, 2, 0).double().numpy() * STD + MEAN) * 255


def test_the_score_is_the_cosine_of_open_clips_own_arithmetic_in_float64(scorer):
    model, tokenizer = OpenClip(seed=1).double(), clip_tokenizer()
    for sample in samples():
        image = model.visual(padded_pixels(sample.picture, 32, CPU, antialias=True).double())
        text = model.encode_text(tokenizer([sample.prompt], return_tensors="pt").input_ids)
        expected = torch.nn.functional.cosine_similarity(image, text).item()
        assert scorer.score([sample]) == [pytest.approx(expected, abs=2e-6)]


def test_every_weight_of_open_clip_has_its_place_in_clip_model(scorer):
    renamed = clip_names(OpenClip(seed=1).state_dict())
    own = scorer._loaded.model.state_dict()
    assert renamed.keys() == own.keys()
    assert all(torch.equal(renamed[name], own[name]) for name in own)


def test_the_published_names_and_shapes_are_those_of_clip_model_at_its_published_size():
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision | {"patch_size": 14}, projection_dim=1024)
    with torch.device("meta"):
        model = transformers.CLIPModel(config)
        renamed = clip_names({name: torch.empty(shape) for name, shape in published_shapes().items()})
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in renamed.items()} == shapes
    assert sum(value.numel() for value in renamed.values()) == 986_109_441


def test_scores_do_not_depend_on_the_batch(scorer, folders):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=2e-6)
    assert HPSv2(**folders, batch_size=3).score(samples()) == pytest.approx(singly, abs=2e-6)


def test_the_releases_are_two_models(scorer, folders):
    old = HPSv2(**folders, release="v2.0")
    assert old.score(samples()) != pytest.approx(scorer.score(samples()), abs=1e-3)
    assert old.version() != scorer.version()


def test_the_version_names_the_variant_of_the_resize(scorer, folders, tmp_path):
    aliased = dataclasses.replace(scorer, antialias=False)
    assert scorer.version().endswith("/tensor-bicubic-pad-antialiased")
    assert aliased.version().endswith("/tensor-bicubic-pad-aliased")
    assert aliased.score([entry(picture(), "a")]) != pytest.approx(scorer.score([entry(picture(), "a")]), abs=1e-4)
    assert HPSv2(**save_hps(tmp_path, seed=7)).version().split("/")[1] != scorer.version().split("/")[1]


@pytest.mark.parametrize("antialias", [True, False])
def test_a_picture_keeps_its_aspect_and_is_padded_with_black_on_the_short_sides(antialias):
    wide = levels(padded_pixels(np.full((300, 400, 3), 200, np.uint8), 224, CPU, antialias=antialias))
    assert wide.shape == (224, 224, 3)
    assert wide[:28] == pytest.approx(0, abs=1e-3)
    assert wide[28:196] == pytest.approx(200, abs=1e-3)
    assert wide[196:] == pytest.approx(0, abs=1e-3)
    tall = levels(padded_pixels(np.full((101, 40, 3), 200, np.uint8), 50, CPU, antialias=antialias))
    assert [tall[25, column].mean().round() for column in (14, 15, 34, 35)] == [0, 200, 200, 0]


def test_with_antialias_the_resize_is_pils_and_without_it_is_another_one():
    large = picture(512, 512)
    pil = np.asarray(Image.fromarray(large).resize((224, 224), Image.Resampling.BICUBIC)).astype(float)
    smooth, aliased = (levels(padded_pixels(large, 224, CPU, antialias=each)) for each in (True, False))
    assert np.abs(smooth.clip(0, 255) - pil).max() < 1.5
    assert np.abs(aliased.clip(0, 255) - pil).mean() > 5


def test_a_picture_of_the_right_size_goes_in_as_it_is():
    assert levels(padded_pixels(picture(32, 32), 32, CPU, antialias=True)) == pytest.approx(picture(32, 32), abs=1e-3)


def test_entities_of_html_are_read_as_open_clip_reads_them(scorer):
    scores = scorer.score([entry(picture(), prompt) for prompt in ("salt & pepper", "salt &amp;amp; pepper", "salt")])
    assert scores[0] == pytest.approx(scores[1], abs=2e-6)
    assert scores[0] != pytest.approx(scores[2], abs=1e-3)


def test_a_prompt_is_cut_after_77_tokens_and_counted(folders):
    scorer, long = HPSv2(**folders), "a" * 90
    scores = scorer.score([entry(picture(), long), entry(picture(), long[:75])])
    assert scores[0] == pytest.approx(scores[1], abs=2e-6)
    assert scorer._loaded.prompts.cut == 1


def test_another_activation_is_refused(folders, tmp_path):
    save_clip(tmp_path)
    with pytest.raises(ValueError, match="activation must be gelu"):
        HPSv2(checkpoint=folders["checkpoint"], clip=str(tmp_path)).prepare()


def test_weights_that_do_not_fit_are_refused(folders, tmp_path):
    torch.save({"state_dict": {"visual.proj": torch.zeros(3, 3)}}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match="does not hold the weights of this scorer: 77 are missing"):
        HPSv2(checkpoint=str(tmp_path), clip=folders["clip"]).prepare()
    state = OpenClip().state_dict() | {"visual.proj": torch.zeros(3, 16)}
    torch.save({"state_dict": state}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match=r"first visual_projection\.weight with \(16, 3\), not \(16, 16\)"):
        HPSv2(checkpoint=str(tmp_path), clip=folders["clip"]).prepare()


def test_a_folder_without_the_release_is_refused_before_anything_loads(tmp_path, folders):
    with pytest.raises(ValueError, match=r"holds no HPS_v2\.1_compressed\.pt"):
        HPSv2(checkpoint=str(tmp_path), clip=folders["clip"])
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        HPSv2(checkpoint=str(tmp_path / "HPS_v2.1_compressed.pt"), clip=folders["clip"])
