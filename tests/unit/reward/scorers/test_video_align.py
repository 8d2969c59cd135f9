"""VideoAlign on random weights by the published names: the score three ways, which frames are seen, what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from tests.unit.reward.samples import cause
from tests.unit.reward.scorers.tiny_qwen2_vl import VIDEO, published, tiny_config, write_base
from unirl.models.random_weights.parts import redraw
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.video_align import _END, _INSTRUCTION, VideoAlign, frame_rows, resized

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # read by peft

ROWS = 263  # of the tokenizer; the three tokens come after
PROMPT = "a cat jumps, ein Kätzchen 猫 {text_prompt} 😀"
PUBLISHED = {
    "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121,
}  # fmt: skip
ABOUT = {
    "data_config": {
        "fps": 2.0,
        "max_frame_pixels": 120000,
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
        "meta_data": None,
    },
    "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special"},
    "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False},
    "inference_config": PUBLISHED,
}


def noise(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def clip(video: np.ndarray, prompt: str = PROMPT, fps: float = 8.0) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt=prompt, video=video, fps=fps)


def wrapped(seed: int) -> Any:
    """The model with its head as peft wraps it: all linear layers of the language model have an adapter."""
    model: Any = transformers.Qwen2VLForConditionalGeneration(tiny_config(ROWS + 3)).eval()
    model.rm_head = torch.nn.Linear(32, 1, bias=False)
    kinds = ("lm_head", "rm_head", "embed_tokens", "visual")
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = [name for name in names if not any(kind in name for kind in kinds)]
    whole: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, r=4, lora_alpha=8, lora_dropout=0.05))
    redraw([whole], seed=seed)
    return whole.eval()


def write_published(folder: Path, model: Any, about: dict[str, Any] = ABOUT) -> Path:
    (folder / "checkpoint-11352").mkdir(exist_ok=True, parents=True)
    (folder / "model_config.json").write_text(json.dumps(about))
    names = {name: name.removeprefix("base_model.model.") for name in model.state_dict()}
    state = {f"base_model.model.{published(names[name])}": value for name, value in model.state_dict().items()}
    torch.save(state, folder / "checkpoint-11352/model.pth")
    return folder


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    base: Path
    folder: Path
    model: Any
    scorer: VideoAlign

    @torch.no_grad()
    def outputs(self, video: np.ndarray, prompt: str, dtype: torch.dtype, **forward: Any) -> list[float]:
        """VQ, MQ, TA of frames in the size in which they are seen, as the authors compute them: adapter apart."""
        model, (patches, grid) = self.model.to(dtype), cut(video)
        inner = model.base_model.model.model
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]})
        marks = "<|video_pad|>" * (int(grid.prod()) // 4)
        text = f"{_INSTRUCTION}{prompt}{_END}"
        row = f"<|im_start|>user\n<|vision_start|>{marks}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer(row, add_special_tokens=False, return_tensors="pt")["input_ids"]
        seen = inner.visual(patches.to(dtype), grid_thw=grid).pooler_output
        embeddings = inner.get_input_embeddings()(tokens)
        embeddings = embeddings.masked_scatter((tokens == VIDEO)[..., None], seen)
        hidden = inner.language_model(inputs_embeds=embeddings, use_cache=False, **forward).last_hidden_state
        return model.base_model.model.rm_head(hidden[tokens >= ROWS])[:, 0].tolist()


def cut(frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches `(N, 3 * 2 * 14 * 14)` of pairs of frames, and their grid, in the layout of the published processor."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    levels = ((frames / 255 - mean) / std).transpose(0, 3, 1, 2)
    grid = (len(frames) // 2, frames.shape[1] // 14, frames.shape[2] // 14)
    blocks = levels.reshape(grid[0], 2, 3, grid[1] // 2, 2, 14, grid[2] // 2, 2, 14)
    rows = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14)
    return torch.from_numpy(rows), torch.tensor([grid])


def normalised(outputs: list[float]) -> dict[str, float]:
    axes = {
        axis: (value - PUBLISHED[f"{axis}_mean"]) / PUBLISHED[f"{axis}_std"]
        for axis, value in zip(("VQ", "MQ", "TA"), outputs, strict=True)
    }
    return {**axes, "overall": axes["VQ"] + axes["MQ"] + axes["TA"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    base, model = write_base(tmp_path_factory.mktemp("base")), wrapped(0)
    folder = write_published(tmp_path_factory.mktemp("video_reward"), model)
    scorer = VideoAlign(checkpoint=str(folder), base=str(base), dtype="float32", device="cpu")
    return Checkpoint(base, folder, model, scorer)


VIDEO_OF_TWO_SECONDS = noise(16, 308, 364)  # in the size in which it is seen: 112 112 pixels


def test_the_instruction_is_the_authors_to_the_letter():
    text = f"{_INSTRUCTION}{{text_prompt}}{_END}"
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "805b956a4ace2b95"
    assert [text.count(line) for line in ("Quality:**  \n", "is acceptable.  \n", "lowest possible. \n")] == [2, 1, 1]


def test_weights_have_the_published_names(checkpoint):
    names = torch.load(checkpoint.folder / "checkpoint-11352/model.pth", weights_only=True).keys()
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {f"{stem}.base_layer.weight", f"{stem}.lora_A.default.weight", f"{stem}.lora_B.default.weight"} <= names
    assert {"base_model.model.rm_head.weight", "base_model.model.visual.merger.mlp.0.weight"} <= names


@pytest.mark.parametrize("output", ["overall", "VQ", "MQ", "TA"])
def test_the_score_is_that_of_the_unmerged_model_in_float32_and_in_float64(checkpoint, output):
    scorer = dataclasses.replace(checkpoint.scorer, output=output)
    (score,) = scorer.score([clip(VIDEO_OF_TWO_SECONDS)])
    seen = VIDEO_OF_TWO_SECONDS[[0, 5, 10, 15]]
    for dtype in (torch.float32, torch.float64):
        assert score == pytest.approx(normalised(checkpoint.outputs(seen, PROMPT, dtype))[output], abs=1e-4)


def test_an_output_of_0_is_the_published_mean_and_spread_below_the_mean(checkpoint):
    scores = [checkpoint.scorer._score([0.0, 0.0, 0.0], checkpoint.scorer._loaded.about)]
    for axis in ("VQ", "MQ", "TA"):
        scorer = dataclasses.replace(checkpoint.scorer, output=axis)
        scores.append(scorer._score([0.0, 0.0, 0.0], checkpoint.scorer._loaded.about))
    # -3.6757 / 2.2476, -1.1646 / 1.3811, -2.8105 / 2.5121 by hand
    assert scores == pytest.approx([-3.597415, -1.635389, -0.843241, -1.118785], abs=2e-6)


def test_positions_are_plain_also_where_a_video_stands(checkpoint):
    seen = VIDEO_OF_TWO_SECONDS[[0, 5, 10, 15]]
    _, grid = cut(seen)
    inner, count = checkpoint.model.base_model.model.model, int(grid.prod()) // 4
    (plain,) = checkpoint.scorer.score([clip(VIDEO_OF_TWO_SECONDS)])
    length = len(transformers.AutoTokenizer.from_pretrained(checkpoint.base)(f"{_INSTRUCTION}{PROMPT}{_END}").input_ids)
    # M-RoPE would give the frames three axes, and the text behind them other places.
    kinds = torch.tensor([[0] * 7 + [2] * count + [0] * (length * 2)])
    tokens = torch.where(kinds == 2, VIDEO, 9)
    axes, _ = inner.get_rope_index(tokens, kinds, video_grid_thw=grid)
    assert not torch.equal(axes[1], axes[2])
    row = checkpoint.scorer._loaded.reader.read([resized(seen, 120000)], f"{_INSTRUCTION}{PROMPT}{_END}")
    with torch.no_grad():
        assert row.tokens.count(5) == count
        other = checkpoint.scorer._loaded.reader.model(
            input_ids=torch.tensor([row.tokens]),
            position_ids=axes[:, :, : len(row.tokens)],
            use_cache=False,
            **row.patches,
        ).last_hidden_state[0, row.places]
    head = checkpoint.scorer._loaded.reader.head
    assert abs(plain - normalised(head(other)[:, 0].tolist())["overall"]) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_score_does_not_depend_on_the_batch(checkpoint, batch_size):
    videos = [VIDEO_OF_TWO_SECONDS, noise(2, 40, 60), np.full((5, 64, 64, 3), 128, np.uint8), noise(3, 1, 1)]
    samples = [clip(video, "a" * 10 * row) for row, video in enumerate(videos)]
    alone = [checkpoint.scorer.score([sample])[0] for sample in samples]
    scorer = dataclasses.replace(checkpoint.scorer, batch_size=batch_size)
    assert scorer.score(samples) == pytest.approx(alone, abs=1e-4)
    assert len({round(score, 3) for score in alone}) == 4


def test_frames_in_another_order_and_other_prompts_score_differently(checkpoint):
    there, back = clip(VIDEO_OF_TWO_SECONDS), clip(VIDEO_OF_TWO_SECONDS[::-1])
    dog = clip(VIDEO_OF_TWO_SECONDS, "a dog")
    scores = checkpoint.scorer.score([there, back, dog])
    assert len({round(score, 4) for score in scores}) == 3


@pytest.mark.parametrize(
    ("count", "fps", "rows"),
    [
        (16, 8.0, [0, 5, 10, 15]),
        (81, 16.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # 10.125 frames are 10
        (49, 8.0, [0, 4, 9, 13, 17, 22, 26, 31, 35, 39, 44, 48]),
        (5, 24.0, [0, 1, 3, 4]),
        (3, 24.0, [0, 2]),
        (2, 24.0, [0, 1]),
        (4, 1.0, [0, 1, 2, 3]),  # 8 frames are wanted, and there are 4
    ],
)
def test_frames_that_are_seen(count, fps, rows):
    assert frame_rows(count, fps, 2.0) == rows


def test_no_more_frames_are_seen_than_the_published_768():
    assert len(frame_rows(10000, 8.0, 2.0)) == 768


def test_frames_are_scaled_to_multiples_of_28_within_the_pixels_and_stay_flat():
    assert resized(noise(2, 720, 1280), 200704).shape == (2, 336, 588, 3)
    assert resized(noise(2, 64, 64), 200704).shape == (2, 336, 336, 3)
    same = noise(2, 308, 364)
    np.testing.assert_array_equal(resized(same, 120000), same)
    assert np.unique(resized(np.full((2, 50, 70, 3), 77, np.uint8), 200704)).tolist() == [77]


def test_frames_are_scaled_as_pillow_does_up_to_rounding():
    from PIL import Image

    slopes = np.add.outer(np.arange(480) * 0.2, np.arange(640) * 0.15)[None, :, :, None]
    frames = (slopes + np.array([0.0, 20.0, 40.0])).repeat(2, 0).astype(np.uint8)
    ours = resized(frames, 120000)
    size = (ours.shape[2], ours.shape[1])
    theirs = np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in frames])
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


def test_what_cannot_be_read_is_invalid_and_costs_the_others_nothing(checkpoint):
    samples = [
        clip(VIDEO_OF_TWO_SECONDS, "a <|MQ_reward|> cat"),
        clip(VIDEO_OF_TWO_SECONDS, "a cat " * 1000),
        clip(noise(1, 64, 64)),
        ScorerInput(id="r0.p0/0", prompt="a cat", image=noise(1, 64, 64)[0]),
        clip(noise(4, 64, 64), "a cat"),
    ]
    *bad, good = checkpoint.scorer.score(samples)
    assert good == pytest.approx(checkpoint.scorer.score(samples[-1:])[0], abs=1e-4)
    whys = ["leave <|image_pad|> and <|VQ_reward|> and", "the video and the prompt are", "1 frame", "holds no video"]
    for score, why in zip(bad, whys, strict=True):
        assert why in cause(score)


def test_a_checkpoint_without_adapter_has_the_same_scores(checkpoint, tmp_path):
    from unirl.reward.weights import merged

    state = torch.load(checkpoint.folder / "checkpoint-11352/model.pth", weights_only=True)
    plain = merged(state, 2.0, "model.pth")
    assert not [name for name in plain if "lora" in name or "base_layer" in name or "base_model" in name]
    (tmp_path / "checkpoint-11352").mkdir()
    (tmp_path / "model_config.json").write_text(json.dumps(ABOUT))
    torch.save(plain, tmp_path / "checkpoint-11352/model.pth")
    other = dataclasses.replace(checkpoint.scorer, checkpoint=str(tmp_path))
    assert other.score([clip(VIDEO_OF_TWO_SECONDS)]) == checkpoint.scorer.score([clip(VIDEO_OF_TWO_SECONDS)])
    assert other.version() == checkpoint.scorer.version()


def test_the_version_follows_weights_and_output(checkpoint, tmp_path):
    other = dataclasses.replace(checkpoint.scorer, checkpoint=str(write_published(tmp_path, wrapped(1))))
    motion = dataclasses.replace(checkpoint.scorer, output="MQ")
    assert len({scorer.version() for scorer in (checkpoint.scorer, other, motion)}) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.rm_head.weight", "rm_head does not hold the weights"),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight", "1 are missing"),
        ("base_model.model.model.layers.1.mlp.up_proj.base_layer.weight", "2 unknown"),
        ("base_model.model.model.norm.weight", "1 are missing, unknown or of another shape"),
    ],
)
def test_a_checkpoint_that_lacks_a_weight_is_refused(checkpoint, tmp_path, name, message):
    write_published(tmp_path, checkpoint.model)
    state = torch.load(tmp_path / "checkpoint-11352/model.pth", weights_only=True)
    del state[name]
    torch.save(state, tmp_path / "checkpoint-11352/model.pth")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(checkpoint.scorer, checkpoint=str(tmp_path)).prepare()


def test_a_checkpoint_that_describes_something_else_is_refused(checkpoint, tmp_path):
    for about, message in [
        ({**ABOUT, "data_config": {**ABOUT["data_config"], "prompt_template_type": "simple"}}, "known are"),
        ({name: value for name, value in ABOUT.items() if name != "inference_config"}, "inference_config"),
        ([], "does not describe a VideoReward"),
    ]:
        (tmp_path / "checkpoint-11352").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-11352/model.pth").touch()
        (tmp_path / "model_config.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(checkpoint.scorer, checkpoint=str(tmp_path)).prepare()


def test_wrong_settings_are_refused_before_anything_loads(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds no model_config\.json"):
        VideoAlign(checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="this family is Qwen2VLForConditionalGeneration"):
        VideoAlign(base="random:qwen3_vl")
    with pytest.raises(ValueError, match="output must be overall, VQ, MQ or TA, got 'vq'"):
        VideoAlign(output="vq")  # type: ignore[arg-type]
