"""Conversations with pictures, for supervised training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL.Image import fromarray

from tests.integration.runs import metrics
from tests.unit.models.vision_language.tiny import IMAGE, NAMES, Loaded, backend, own_inputs, pictures, segment
from unirl import cli
from unirl.models.base import Bundle
from unirl.rollout.supervised_text import ConversationEncoder, TokenLimit
from unirl.types.condition import PromptTokens
from unirl.types.conversation import Message
from unirl.types.media import Media, to_uint8
from unirl.types.sample import Part


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two pictures of different sizes."""
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, pixels in zip(paths, pictures((40, 90), (120, 60)), strict=True):
        fromarray(to_uint8(pixels[None])[0].numpy()).save(path)
    return paths


def texts(bundle: Bundle, tokens: list[int]) -> str:
    return bundle.processors["tokenizer"].decode(tokens)


def test_it_is_the_prompt_of_a_rollout_and_then_the_response(model: Loaded, files: list[Path]) -> None:
    asked = Message("user", (*files, "What differs?"))
    row = model.family.conversation(model.bundle, (asked, Message("assistant", ("Nothing",))), "all")
    rounded = [[(to_uint8(own[None]).permute(0, 3, 1, 2)[0] / 255) for own in pictures((40, 90), (120, 60))]]
    prompt = model.family.tokenize(model.bundle, Media(texts=["What differs?"], sources=rounded))
    assert row.tokens[: row.prompt] == prompt.tokens.tolist()
    assert texts(model.bundle, row.tokens[row.prompt : row.length]) == "Nothing<|im_end|>"
    assert row.pictures is not None
    assert prompt.pictures is not None
    assert all(torch.equal(value, prompt.pictures[0][name]) for name, value in row.pictures.items())


def test_pictures_stand_where_the_message_has_them(model: Loaded, files: list[Path]) -> None:
    asked = Message("user", ("Before ", files[1], " and after"))
    row = model.family.conversation(model.bundle, (asked, Message("assistant", ("Yes",))), "all")
    assert row.pictures is not None
    run = "<|image_pad|>" * (int(row.pictures["image_grid_thw"].prod()) // 4)
    shown = f"Before <|vision_start|>{run}<|vision_end|> and after"
    assert texts(model.bundle, row.tokens).count(shown) == 1
    assert row.tokens.count(IMAGE) == run.count("<|image_pad|>")


def test_a_picture_behind_what_is_trained_is_refused_unless_the_last_turn_alone_is(
    model: Loaded, files: list[Path]
) -> None:
    messages = (
        Message("user", (files[0], "And this?")),
        Message("assistant", ("One",)),
        Message("user", (files[1], "And that?")),
        Message("assistant", ("Two",)),
    )
    with pytest.raises(ValueError, match=r"stands behind the first turn that is trained.*data\.limit\.turns=last"):
        model.family.conversation(model.bundle, messages, "all")
    row = model.family.conversation(model.bundle, messages, "last")
    assert texts(model.bundle, row.tokens[row.prompt : row.length]) == "Two<|im_end|>"
    assert row.pictures is not None
    assert len(row.pictures["image_grid_thw"]) == 2


@torch.no_grad()
def test_log_probs_of_the_trained_tokens_are_those_of_the_models_own_forward(
    checkpoint: Path, model: Loaded, files: list[Path]
) -> None:
    conversations = [
        (Message("user", (*files, "What differs?")), Message("assistant", ("Nothing",))),
        (
            Message("user", ("Say a word",)),
            Message("assistant", ("No",)),
            Message("user", ("Another",)),
            Message("assistant", ("Never",)),
        ),
    ]
    given = Part(ids=["r0.p0", "r0.p1"], metadata=[{}, {}], media=Media(conversations=conversations))
    policy = backend(checkpoint)
    part = ConversationEncoder(policy, TokenLimit()).encode(given)
    prompts = part.conditions
    assert isinstance(prompts, PromptTokens)
    found = policy.stage.replay(part).log_probs.split(segment(part).lengths.tolist())
    masks = segment(part).loss_mask.split(segment(part).lengths.tolist())
    responses = segment(part).tokens.split(segment(part).lengths.tolist())
    assert [int(mask.sum()) for mask in masks] == [len("Nothing") + 1, len("No") + 1 + len("Never") + 1]
    for row, (ours, mask, tokens) in enumerate(zip(found, masks, responses, strict=True)):
        logits = model.own(**own_inputs(prompts, row, tokens)).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(ours[mask], expected[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_to_tell_pictures_apart(
    name: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def row(file: Path, said: str) -> str:
        content = [{"type": "image", "image": file.name}, {"type": "text", "text": "Which?"}]
        return json.dumps({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": said}]})

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([row(files[0], "first"), row(files[1], "other")]))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "# @package _global_\n"
        "defaults: [/base@_global_: text_sft, /model: qwen3_vl, _self_]\n"
        f"run: {{name: run, steps: 40, seed: 0, output: {tmp_path}}}\n"
        f"model: {{checkpoint: 'random:{name}', max_pixels: 9216}}\n"
        f"data: {{records: {{_target_: unirl.data.conversations.JsonConversations, path: {rows}}}, batch_size: 2}}\n"
        "train: {backend: {optimizer: {lr: 1e-2}}}\n"
        "logging: {trackers: []}\n"
    )
    assert cli.main(["train", str(recipe)]) == 0
    losses = [line["train/loss"] for line in metrics(tmp_path) if "train/loss" in line]
    # Who sees nothing is left with a choice of two words, six tokens each.
    assert losses[-1] < 0.1 * math.log(2) / 6 < losses[0]
