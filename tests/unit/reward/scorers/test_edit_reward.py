"""EditReward on random weights by the published names: the score three ways, both heads, both pictures, refusals."""

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

from tests.unit.reward.samples import cause
from tests.unit.reward.scorers.state_file import assert_refused, write_state
from tests.unit.reward.scorers.vision import noise
from unirl.models.random_weights.parts import qwen_tokenizer, redraw
from unirl.models.random_weights.qwen_image import qwen2_5_vl_config
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.edit_reward import _END, _INSTRUCTIONS, EditReward

IMAGE, ROWS = 5, 263  # the placeholder, and the id of the token that is added: the first after the tokenizer's
SOURCE, EDITED = noise(60, 90), noise(70, 60, seed=1)
PROMPT = "put a hat on the cat, ein Hut 猫 {text_prompt} 😀"


def config_of(vocabulary: int) -> Any:
    config: Any = qwen2_5_vl_config()
    config.text_config.vocab_size, config.text_config.max_position_embeddings = vocabulary, 4096
    return config


def edit(edited: np.ndarray = EDITED, prompt: str = PROMPT, source: np.ndarray | None = SOURCE) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt=prompt, image=edited, source=source)


def write_published(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """model.safetensors by the names of transformers 4.57, in a language model's file."""
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config_of(ROWS + 1))
    heads = [
        torch.nn.Sequential(
            *(torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(1024, 16)),
            *(torch.nn.ReLU(), torch.nn.Linear(16, 2)),
        )
        for _ in range(2)
    ]
    redraw([model, *heads], seed=seed)
    state = dict(model.state_dict())
    for number, head in enumerate(heads):
        state |= {f"rm_heads.head_{number}.{name}": value for name, value in head.state_dict().items()}
    write_state(folder / "model.safetensors", state)
    return state


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    base: Path
    folder: Path
    model: Any
    state: dict[str, torch.Tensor]
    scorer: EditReward

    @torch.no_grad()
    def outputs(self, kind: str, dtype: torch.dtype, *pictures: np.ndarray) -> torch.Tensor:
        """`(2,)`: pictures scaled first, the text model on embeddings, as the authors call it, the head written out."""
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

        sizes = [smart_resize(*one.shape[:2], factor=28, min_pixels=200704, max_pixels=200704) for one in pictures]
        scaled = [
            Image.fromarray(one).resize((width, height), 3)
            for one, (height, width) in zip(pictures, sizes, strict=True)
        ]
        cut: Any = Qwen2VLImageProcessorPil()(images=scaled, return_tensors="pt")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
        counts = [int(grid.prod()) // 4 for grid in cut["image_grid_thw"]]
        marks = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
        text = f"{_INSTRUCTIONS[kind]}{PROMPT}{_END}"
        row = f"<|im_start|>user\n{marks}{text}<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer(row, add_special_tokens=False, return_tensors="pt")["input_ids"]
        model = self.model.to(dtype)
        seen = model.visual(cut["pixel_values"].to(dtype), grid_thw=cut["image_grid_thw"]).pooler_output
        embeddings = model.get_input_embeddings()(tokens)
        embeddings = embeddings.masked_scatter((tokens == IMAGE)[..., None], seen)
        states = model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[tokens == ROWS]
        name = f"rm_heads.head_{list(_INSTRUCTIONS).index(kind)}"
        for layer in (0, 3, 5):
            weight, bias = (self.state[f"{name}.{layer}.{part}"].to(dtype) for part in ("weight", "bias"))
            states = states @ weight.T + bias
            states = states if layer == 5 else states.relu()
        return states[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("edit_reward")
    transformers.Qwen2_5_VLForConditionalGeneration(config_of(300)).save_pretrained(base)
    qwen_tokenizer().save_pretrained(base)
    Qwen2VLImageProcessorPil().save_pretrained(base)
    state = write_published(folder)
    model: Any = transformers.Qwen2_5_VLModel(config_of(ROWS + 1)).eval()
    model.load_state_dict({name: state[f"model.{name}"] for name in model.state_dict()})
    scorer = EditReward(checkpoint=str(folder), base=str(base), dtype="float32", device="cpu")
    return Checkpoint(base, folder, model, state, scorer)


@pytest.mark.parametrize(("kind", "digest"), [("following", "b096bbdc3e06e6d2"), ("quality", "762d2b67703efe9b")])
def test_the_instructions_are_the_authors_to_the_letter(kind, digest):
    text = f"{_INSTRUCTIONS[kind]}{{text_prompt}}{_END}"
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == digest
    assert "**Inputs Provided:**  \n" in text


def test_weights_have_the_published_names(checkpoint):
    names = load_file(checkpoint.folder / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"model", "lm_head", "rm_heads"}
    assert {"model.language_model.embed_tokens.weight", "model.visual.merger.mlp.0.weight"} <= names
    assert {"rm_heads.head_0.0.weight", "rm_heads.head_1.5.bias"} <= names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_score_is_the_mean_of_both_heads_first_outputs(checkpoint, dtype):
    outputs = {kind: checkpoint.outputs(kind, dtype, SOURCE, EDITED).tolist() for kind in _INSTRUCTIONS}
    for kind, (mean, spread) in outputs.items():
        (score,) = dataclasses.replace(checkpoint.scorer, output=kind).score([edit()])
        assert score == pytest.approx(mean, abs=1e-4)
        assert abs(mean - spread) > 1e-2
    (score,) = checkpoint.scorer.score([edit()])
    assert score == pytest.approx((outputs["following"][0] + outputs["quality"][0]) / 2, abs=1e-4)


def test_the_source_comes_first(checkpoint):
    there, back = checkpoint.scorer.score([edit(), edit(SOURCE, source=EDITED)])
    swapped = [checkpoint.outputs(kind, torch.float32, EDITED, SOURCE)[0].item() for kind in _INSTRUCTIONS]
    assert back == pytest.approx(sum(swapped) / 2, abs=1e-4)
    assert abs(there - back) > 1e-4


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_score_does_not_depend_on_the_batch(checkpoint, batch_size):
    edited = [EDITED, noise(200, 40, seed=2), np.full((64, 64, 3), 128, np.uint8), noise(1, 1)]
    samples = [edit(picture, "a" * 10 * row) for row, picture in enumerate(edited)]
    alone = [checkpoint.scorer.score([sample])[0] for sample in samples]
    scorer = dataclasses.replace(checkpoint.scorer, batch_size=batch_size)
    assert scorer.score(samples) == pytest.approx(alone, abs=1e-4)
    assert len({round(score, 4) for score in alone}) == 4


def test_what_cannot_be_read_is_invalid_and_costs_the_others_nothing(checkpoint):
    samples = [
        edit(prompt="a <|Reward|> cat"),
        edit(prompt="a cat " * 500),
        edit(source=None),
        edit(noise(1, 300)),
        edit(prompt="a hat"),
    ]
    *bad, good = checkpoint.scorer.score(samples)
    assert good == pytest.approx(checkpoint.scorer.score(samples[-1:])[0], abs=1e-4)
    whys = ["and <|Reward|> out", "the pictures and the prompt are", "without one source picture", "aspect ratio"]
    for score, why in zip(bad, whys, strict=True):
        assert why in cause(score)


def test_the_version_follows_weights_and_output_and_weights_of_another_shape_are_refused(checkpoint, tmp_path):
    state = write_published(tmp_path, seed=1)
    other = dataclasses.replace(checkpoint.scorer, checkpoint=str(tmp_path))
    quality = dataclasses.replace(checkpoint.scorer, output="quality")
    assert len({scorer.version() for scorer in (checkpoint.scorer, other, quality)}) == 3
    embedding = "language_model.embed_tokens.weight"
    changes = {
        "rm_heads.head_1.5.weight": (torch.zeros(4, 16), r"rm_heads\.head_1: 1 weights have another shape"),
        "rm_heads.head_2.5.weight": (torch.zeros(2, 16), r"rm_heads\.head_2"),
        f"model.{embedding}": (torch.zeros(300, 32), embedding),
    }
    assert_refused(other, tmp_path / "model.safetensors", state, changes)


def test_wrong_settings_are_refused_before_anything_loads(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        EditReward(checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="this family is Qwen2_5_VLForConditionalGeneration"):
        EditReward(base="random:qwen3_vl")
    with pytest.raises(ValueError, match="output must be mean, following or quality, got 'overall'"):
        EditReward(output="overall")  # type: ignore[arg-type]
