"""HPSv3 on random weights by the published names: the score three ways, plain positions, what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.unit.reward.samples import cause, entry
from tests.unit.reward.scorers.state_file import assert_refused, write_state
from tests.unit.reward.scorers.tiny_qwen2_vl import IMAGE, published, tiny_config, write_base
from tests.unit.reward.scorers.vision import noise
from unirl.models.random_weights.parts import redraw
from unirl.reward.scorers.hps_v3 import _END, _INSTRUCTION, HPSv3

ROWS = 263  # the id of the token that is added: the first after the tokenizer's
PICTURE = noise(60, 90)
PROMPT = "a cat, ein Kätzchen 猫 {text_prompt} 😀"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """base: a Qwen2-VL; folder: that holds HPSv3.safetensors; model: with these weights; state: all of them."""

    base: Path
    folder: Path
    model: Any
    state: dict[str, torch.Tensor]
    scorer: HPSv3

    def inputs(self, picture: np.ndarray, prompt: str) -> dict[str, torch.Tensor]:
        """As the authors make them: scaled first, then the whole message with what follows the token."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

        height, width = smart_resize(*picture.shape[:2], factor=28, min_pixels=200704, max_pixels=200704)
        image = _pil(picture).resize((width, height), 3)
        cut: Any = Qwen2VLImageProcessorPil()(images=[image], return_tensors="pt")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
        tokenizer.add_tokens([transformers.AddedToken("<|Reward|>", special=True, normalized=False)])
        marks = "<|image_pad|>" * (int(cut["image_grid_thw"].prod()) // 4)
        text = f"{_INSTRUCTION}{prompt}{_END}"
        row = f"<|im_start|>user\n<|vision_start|>{marks}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
        return {"input_ids": tokenizer(row, add_special_tokens=False, return_tensors="pt")["input_ids"], **cut}

    @torch.no_grad()
    def outputs(self, picture: np.ndarray, prompt: str, dtype: torch.dtype, **forward: Any) -> torch.Tensor:
        """`(2,)`: the text model on embeddings, as the authors call it, and the head written out."""
        inputs = self.inputs(picture, prompt)
        model, tokens = self.model.to(dtype), inputs["input_ids"]
        seen = model.visual(inputs["pixel_values"].to(dtype), grid_thw=inputs["image_grid_thw"]).pooler_output
        embeddings = model.get_input_embeddings()(tokens)
        embeddings = embeddings.masked_scatter((tokens == IMAGE)[..., None], seen)
        hidden = model.language_model(inputs_embeds=embeddings, use_cache=False, **forward).last_hidden_state
        states = hidden[tokens == ROWS]
        for layer in (0, 3, 5):
            weight, bias = (self.state[f"rm_head.{layer}.{part}"].to(dtype) for part in ("weight", "bias"))
            states = states @ weight.T + bias
            states = states if layer == 5 else states.relu()
        return states[0].float()


def _pil(picture: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(picture)


def write_published(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """HPSv3.safetensors, with an embedding more than the tokenizer of the base has, in a language model's file."""
    model: Any = transformers.Qwen2VLForConditionalGeneration(tiny_config(ROWS + 1))
    head = torch.nn.Sequential(
        *(torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(1024, 16)),
        *(torch.nn.ReLU(), torch.nn.Linear(16, 2)),
    )
    redraw([model, head], seed=seed)
    state = {published(name): value for name, value in model.state_dict().items()}
    state |= {f"rm_head.{name}": value for name, value in head.state_dict().items()}
    write_state(folder / "HPSv3.safetensors", state)
    return state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    base, folder = write_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("hpsv3")
    state = write_published(folder)
    model: Any = transformers.Qwen2VLModel(tiny_config(ROWS + 1)).eval()
    names = {name: published(f"model.{name}") for name in model.state_dict()}
    model.load_state_dict({name: state[old] for name, old in names.items()})
    scorer = HPSv3(checkpoint=str(folder), base=str(base), dtype="float32", device="cpu")
    return Checkpoint(base, folder, model, state, scorer)


def test_the_instruction_is_the_authors_to_the_letter():
    text = f"{_INSTRUCTION}{{text_prompt}}{_END}"
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "282aace16e1b1823"
    assert "**Visual Quality:**  \n" in text


def test_weights_have_the_published_names(checkpoint):
    names = load_file(checkpoint.folder / "HPSv3.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"visual", "model", "lm_head", "rm_head"}
    assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "rm_head.5.bias"} <= names


def test_the_score_is_the_first_output_at_the_token_in_float32_and_in_float64(checkpoint):
    (score,) = checkpoint.scorer.score([entry(PICTURE, PROMPT)])
    mean, spread = checkpoint.outputs(PICTURE, PROMPT, torch.float32).tolist()
    exact = checkpoint.outputs(PICTURE, PROMPT, torch.float64)[0].item()
    assert score == pytest.approx(mean, abs=1e-4)
    assert score == pytest.approx(exact, abs=1e-4)
    assert abs(mean - spread) > 1e-2


def test_positions_are_plain_also_where_a_picture_stands(checkpoint):
    inputs = checkpoint.inputs(PICTURE, PROMPT)
    kinds = (inputs["input_ids"] == IMAGE).int()
    axes, _ = checkpoint.model.get_rope_index(inputs["input_ids"], kinds, image_grid_thw=inputs["image_grid_thw"])
    (score,) = checkpoint.scorer.score([entry(PICTURE, PROMPT)])
    other = checkpoint.outputs(PICTURE, PROMPT, torch.float32, position_ids=axes)[0].item()
    assert abs(score - other) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_score_does_not_depend_on_the_batch(checkpoint, batch_size):
    pictures = [PICTURE, noise(200, 40, seed=1), np.full((64, 64, 3), 128, np.uint8), noise(1, 1), noise(3, 5)]
    samples = [entry(picture, "a" * 10 * row) for row, picture in enumerate(pictures)]
    alone = [checkpoint.scorer.score([sample])[0] for sample in samples]
    scorer = dataclasses.replace(checkpoint.scorer, batch_size=batch_size)
    assert scorer.score(samples) == pytest.approx(alone, abs=1e-4)
    assert len({round(score, 4) for score in alone}) == 5


def test_the_head_is_of_float32_where_the_model_is_of_bfloat16(checkpoint):
    half = dataclasses.replace(checkpoint.scorer, dtype="bfloat16")
    loaded = half.load(torch.device("cpu"), torch.bfloat16)
    assert {weight.dtype for weight in loaded.head.parameters()} == {torch.float32}
    assert loaded.model.dtype == torch.bfloat16
    assert half.score([entry(PICTURE, "a cat")]) == pytest.approx(
        checkpoint.scorer.score([entry(PICTURE, "a cat")]), abs=0.1
    )


def test_swapped_prompts_score_differently(checkpoint):
    cat, dog = checkpoint.scorer.score([entry(PICTURE, "a cat"), entry(PICTURE, "a dog")])
    assert abs(cat - dog) > 1e-4


def test_what_cannot_be_read_is_invalid_and_costs_the_others_nothing(checkpoint):
    samples = [
        entry(PICTURE, "a <|Reward|> cat"),
        entry(PICTURE, "a <|image_pad|> cat"),
        entry(PICTURE, "a cat " * 1000),
        entry(noise(1, 300), "a cat"),
        entry(PICTURE, "a cat"),
    ]
    *bad, good = checkpoint.scorer.score(samples)
    assert good == pytest.approx(checkpoint.scorer.score(samples[-1:])[0], abs=1e-4)
    whys = ["leave <|image_pad|> and <|Reward|> out", "leave <|image_pad|>", "the model reads 8192", "aspect ratio"]
    for score, why in zip(bad, whys, strict=True):
        assert why in cause(score)


def test_the_version_follows_the_weights_and_weights_of_another_shape_are_refused(checkpoint, tmp_path):
    state = write_published(tmp_path, seed=1)
    other = dataclasses.replace(checkpoint.scorer, checkpoint=str(tmp_path))
    same = dataclasses.replace(checkpoint.scorer)
    assert checkpoint.scorer.version() == same.version() != other.version()
    changes = {
        "rm_head.5.weight": (torch.zeros(4, 16), "rm_head: 1 weights have another shape, first 5.weight"),
        "model.embed_tokens.weight": (torch.zeros(300, 32), "language_model.embed_tokens.weight"),
        "model.norm.bias": (torch.zeros(32), "language_model.norm.bias"),
    }
    assert_refused(other, tmp_path / "HPSv3.safetensors", state, changes)


def test_a_folder_without_the_weights_and_another_base_are_refused_before_anything_loads(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds no HPSv3\.safetensors"):
        HPSv3(checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="this family is Qwen2VLForConditionalGeneration"):
        HPSv3(base="random:qwen3_vl")
