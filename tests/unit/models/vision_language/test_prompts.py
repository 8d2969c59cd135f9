"""Prompts with pictures: placeholders, what the tower is given, positions, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor

from tests.unit.models.vision_language.tiny import CPU, IMAGE, Loaded, own_inputs, pictures, uneven
from unirl.models.language.vision_language import VisionLanguage
from unirl.models.pictures import picture_processor, source_pictures
from unirl.types.media import Media


def test_a_prompt_is_what_the_processor_of_transformers_makes_of_it(model: Loaded) -> None:
    published = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[model.own.config.model_type]
    parts = model.bundle.processors
    processor = picture_processor(published, parts["image_processor"], parts["tokenizer"])
    media, prompts = uneven(), model.prompts()
    assert prompts.pictures is not None
    rows = prompts.tokens.split(prompts.lengths.tolist())
    for row, text, sources, own in zip(
        rows, media.required_texts, source_pictures(media), prompts.pictures, strict=True
    ):
        content = [*({"type": "image"} for _ in sources), {"type": "text", "text": text}]
        rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        expected = processor(text=[rendered], images=sources or None, return_tensors="pt")
        assert torch.equal(row, expected["input_ids"][0])
        assert sorted(own) == (["image_grid_thw", "pixel_values"] if sources else [])
        assert all(torch.equal(value, expected[name]) for name, value in own.items())


def test_there_is_a_placeholder_for_every_feature(model: Loaded) -> None:
    prompts = model.prompts()
    assert prompts.pictures is not None
    grids = prompts.pictures[0]["image_grid_thw"]
    assert len({tuple(grid) for grid in grids.tolist()}) == 2
    counts = [int((row == IMAGE).sum()) for row in prompts.tokens.split(prompts.lengths.tolist())]
    assert counts == [int(grids.prod(-1).sum()) // 4, 0]


def test_positions_of_a_picture_are_its_grid_and_text_goes_on_after_its_longer_side(model: Loaded) -> None:
    words = [20, 3, *[IMAGE] * 8, 4, 30]
    picture = {"pixel_values": torch.zeros(32, 1), "image_grid_thw": torch.tensor([[1, 4, 8]])}
    prompts = dataclasses.replace(
        model.prompts(), tokens=torch.tensor(words + words[:2]), lengths=torch.tensor([12, 2]), pictures=[picture, {}]
    )
    positions, following = model.family.positions(model.bundle, prompts)
    time = [0, 1, *[2] * 8, 6, 7, 0, 1]
    height = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7, 0, 1]
    width = [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 0, 1]
    assert positions.T.tolist() == [time, height, width]
    assert following.tolist() == [8, 2]


def test_positions_are_those_that_generate_gives_a_left_padded_batch(model: Loaded) -> None:
    prompts = model.prompts()
    rows = [own_inputs(prompts, row) for row in range(2)]
    longest = int(prompts.lengths.max())

    def padded(name: str) -> torch.Tensor:
        return torch.cat([torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0)) for row in rows])

    mask = torch.arange(longest) >= longest - prompts.lengths[:, None]
    places, deltas = model.own.model.get_rope_index(
        padded("input_ids"),
        padded("mm_token_type_ids"),
        image_grid_thw=rows[0]["image_grid_thw"],
        attention_mask=mask.long(),
    )
    positions, following = model.family.positions(model.bundle, prompts)
    assert torch.equal(positions.T, places[:, mask])
    assert torch.equal(following, prompts.lengths + deltas[:, 0])
    assert following[0] < prompts.lengths[0]


@pytest.mark.parametrize("change", [2, -1])
def test_placeholders_that_do_not_fit_the_pictures_are_an_error(model: Loaded, change: int) -> None:
    prompts = model.prompts()
    first, second = prompts.tokens.split(prompts.lengths.tolist())
    at = int((first == IMAGE).nonzero()[0])
    other = torch.cat([first[:at], first[at].repeat(1 + change) if change > 0 else first[:0], first[at + 1 :]])
    wrong = dataclasses.replace(
        prompts, tokens=torch.cat([other, second]), lengths=torch.tensor([len(other), len(second)])
    )
    found = int((first == IMAGE).sum())
    with pytest.raises(ValueError, match=rf"has {found + change} placeholders .* are {found} features.*exactly once"):
        model.family.positions(model.bundle, wrong)


def test_a_placeholder_in_the_text_is_refused(model: Loaded) -> None:
    media = Media(texts=["the <|image_pad|> token"], sources=[pictures((60, 60))])
    with pytest.raises(ValueError, match=r"with 1 pictures and has 2 placeholders.*leave <\|image_pad\|> out"):
        model.family.tokenize(model.bundle, media)


def test_a_prompt_is_never_cut_and_its_pictures_count(model: Loaded) -> None:
    length = int(model.prompts().lengths[0])
    exact = dataclasses.replace(model.family, max_prompt_tokens=length)
    assert torch.equal(exact.tokenize(model.bundle, uneven()).tokens, model.prompts().tokens)
    short = dataclasses.replace(model.family, max_prompt_tokens=length - 1)
    with pytest.raises(ValueError, match=rf"'What differs\?' has {length} tokens, more than max_prompt_tokens"):
        short.tokenize(model.bundle, uneven())


def test_siblings_share_their_pictures_and_a_move_leaves_these_where_they_are(model: Loaded) -> None:
    prompts = model.prompts().select([0, 0, 1])
    assert prompts.pictures is not None
    assert prompts.pictures[0]["pixel_values"] is prompts.pictures[1]["pixel_values"]
    assert prompts.to("cpu").pictures is prompts.pictures


def test_the_system_message_stands_before_the_pictures(model: Loaded) -> None:
    family = dataclasses.replace(model.family, system="Be brief.")
    text = model.bundle.processors["tokenizer"].decode(family.tokenize(model.bundle, uneven()).tokens)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>")


def test_pixel_limits_are_those_of_the_settings(checkpoint: Path, model: Loaded) -> None:
    patch = model.own.config.vision_config.patch_size
    family = VisionLanguage(str(checkpoint), min_pixels=(2 * patch) ** 2, max_pixels=(4 * patch) ** 2)
    prompts = family.tokenize(family.load(CPU, torch.float32), uneven())
    assert prompts.pictures is not None
    areas = prompts.pictures[0]["image_grid_thw"].prod(-1)
    assert int(areas.min()) >= 4
    assert int(areas.max()) <= 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_pixels": 0}, "max_pixels must be at least 1 or null, got 0"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels=9 is more than max_pixels=4"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ({"trained": "tower"}, "trained must be text or all, got 'tower'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VisionLanguage("Qwen/Qwen3-VL-8B-Instruct", **settings)  # pyright: ignore[reportArgumentType]


def test_a_limit_that_contradicts_the_checkpoint_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"pictures of \d+ to 1 pixels: set min_pixels and max_pixels both"):
        VisionLanguage(str(checkpoint), max_pixels=1).load(CPU, torch.float32)


def test_another_model_is_refused_before_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    family = VisionLanguage(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    said = "holds a Qwen3ForCausalLM, this family is Qwen2_5_VLForConditionalGeneration or Qwen3VLFor"
    with pytest.raises(ValueError, match=said):
        VisionLanguage(str(folder))
    with pytest.raises(ValueError, match=said):
        family.load(CPU, torch.float32)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="holds a qwen3, this family is"):
        VisionLanguage(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config.json: it is not a transformers model"):
        VisionLanguage(str(folder))


def test_a_processor_that_cuts_other_patches_than_the_model_reads_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "patch_size": 12}))
    with pytest.raises(ValueError, match=r"patches of \(12, 2, 2\) \(side, frames, merged\), its model reads"):
        VisionLanguage(str(folder)).load(CPU, torch.float32)


def test_a_checkpoint_without_a_chat_template_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        VisionLanguage(str(folder)).load(CPU, torch.float32)


def test_the_chat_template_of_the_processor_is_taken_where_there_is_one(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    family = VisionLanguage(str(folder))
    bundle = family.load(CPU, torch.float32)
    tokens = family.tokenize(bundle, Media(texts=["hello"])).tokens
    assert bundle.processors["tokenizer"].decode(tokens) == "hello!"
