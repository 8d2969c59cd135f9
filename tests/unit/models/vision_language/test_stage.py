"""Rollout and replay with pictures in the prompts, against transformers' own models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.unit.models.vision_language.tiny import (
    CPU,
    IMAGE,
    SAMPLING,
    Loaded,
    own_inputs,
    responses,
    segment,
    uneven,
    written,
)
from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle
from unirl.models.language.vision_language import VisionLanguage
from unirl.types.condition import PromptTokens
from unirl.types.sample import Part


def prompt_of(model: Loaded, row: int, group: int = 2) -> tuple[PromptTokens, int]:
    """The prompts, and which of them response `row` answers."""
    return model.prompts(), row // group


def log_probs_by_hand(model: Loaded, part: Part, row: int, *, shift: int = 0) -> torch.Tensor:
    """A forward of transformers' model for every token of response `row`: what stands before it, and nothing else."""
    prompts, prompt = prompt_of(model, row)
    tokens, found = responses(part)[row], []
    for place, token in enumerate(tokens):
        logits = model.own(**own_inputs(prompts, prompt, tokens[:place])).logits[0, -1 - shift]
        found.append(logits.log_softmax(-1)[token])
    return torch.stack(found)


def test_greedy_responses_are_those_of_generate(model: Loaded) -> None:
    sampling = dataclasses.replace(SAMPLING, temperature=0.0, max_new_tokens=12)
    part = written(model.stage, uneven(), group=1, sampling=sampling)
    prompts = model.prompts()
    rows = [own_inputs(prompts, row) for row in range(2)]
    longest = int(prompts.lengths.max())
    padded = {
        name: torch.cat([torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0)) for row in rows])
        for name in ("input_ids", "mm_token_type_ids")
    }
    mask = (torch.arange(longest) >= longest - prompts.lengths[:, None]).long()
    pictures = {name: rows[0][name] for name in ("pixel_values", "image_grid_thw")}
    generated = model.own.generate(
        **padded, **pictures, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=2
    )
    for ours, theirs in zip(responses(part), generated[:, longest:], strict=True):
        assert ours.tolist() == theirs[: len(ours)].tolist()


@torch.no_grad()
def test_log_probs_are_those_of_a_loop_over_tokens_and_no_shift_of_them(model: Loaded) -> None:
    part = written(model.stage, uneven())
    replayed = model.stage.replay(part).log_probs.split(segment(part).lengths.tolist())
    assert len(segment(part).log_probs) == int(segment(part).lengths.sum())
    for row, (ours, recorded) in enumerate(
        zip(replayed, segment(part).log_probs.split(segment(part).lengths.tolist()), strict=True)
    ):
        expected = log_probs_by_hand(model, part, row)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(recorded, expected, atol=2e-5, rtol=0)
        assert (ours - log_probs_by_hand(model, part, row, shift=1)).abs().max() > 0.1


@torch.no_grad()
def test_a_packed_replay_is_that_of_each_row_by_itself_whatever_the_order(model: Loaded) -> None:
    part = written(model.stage, uneven())
    whole = model.stage.replay(part).log_probs.split(segment(part).lengths.tolist())
    for row in range(len(part)):
        torch.testing.assert_close(model.stage.replay(part.select([row])).log_probs, whole[row], atol=2e-5, rtol=0)
    order = [3, 0, 2, 1]
    turned = model.stage.replay(part.select(order)).log_probs
    torch.testing.assert_close(turned, torch.cat([whole[row] for row in order]), atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_response_does_not_depend_on_what_is_written_beside_it(model: Loaded) -> None:
    part = written(model.stage, uneven())
    alone = written(model.stage, uneven().select([0]))
    for ours, theirs in zip(responses(part)[:2], responses(alone), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_a_response_sees_its_pictures(model: Loaded) -> None:
    part = written(model.stage, uneven())
    assert isinstance(part.conditions, PromptTokens)
    assert part.conditions.pictures is not None
    darker = [
        {name: value * 0.5 if name == "pixel_values" else value for name, value in own.items()}
        for own in part.conditions.pictures
    ]
    other = dataclasses.replace(part, conditions=dataclasses.replace(part.conditions, pictures=darker))
    seen, darkened = model.stage.replay(part).log_probs, model.stage.replay(other).log_probs
    first = int(segment(part).lengths[:2].sum())
    assert (seen[:first] - darkened[:first]).abs().max() > 1e-3
    torch.testing.assert_close(seen[first:], darkened[first:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_placeholder_that_the_model_writes_itself_is_a_word(model: Loaded) -> None:
    part = written(model.stage, uneven(), group=1)
    tokens = segment(part).tokens.clone()
    tokens[0] = IMAGE
    part = dataclasses.replace(part, segment=dataclasses.replace(segment(part), tokens=tokens))
    ours = model.stage.replay(part).log_probs.split(segment(part).lengths.tolist())[0]
    inputs, response = own_inputs(model.prompts(), 0), responses(part)[0]
    _, following = model.family.positions(model.bundle, model.prompts())
    output, expected = model.own(**inputs, use_cache=True), []
    for step, token in enumerate(response):
        expected.append(output.logits[0, -1].log_softmax(-1)[token])
        place = (following[0] + step).expand(3, 1, 1)
        output = model.own(input_ids=token[None, None], position_ids=place, cache=output.cache)
    torch.testing.assert_close(ours, torch.stack(expected), atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_tower_sees_a_picture_once_for_all_siblings(model: Loaded) -> None:
    patches = []
    tower = model.bundle.frozen["visual"]
    hook = tower.register_forward_pre_hook(lambda _, inputs: patches.append(len(inputs[0])))
    part = written(model.stage, uneven(), group=4)
    model.stage.replay(part)
    hook.remove()
    prompts = model.prompts()
    assert prompts.pictures is not None
    assert patches == [len(prompts.pictures[0]["pixel_values"])] * 2


@torch.no_grad()
def test_prompts_without_any_picture_need_no_tower(model: Loaded) -> None:
    part = written(model.stage, uneven().select([1]), group=1)
    expected = model.own(**own_inputs(model.prompts(), 1, responses(part)[0])).logits[0].log_softmax(-1)
    length, tokens = int(segment(part).lengths[0]), responses(part)[0]
    own = expected[-length - 1 : -1].gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(model.stage.replay(part).log_probs, own, atol=2e-5, rtol=0)


def test_gradients_are_those_of_the_models_own_forward(model: Loaded) -> None:
    part = written(model.stage, uneven())
    parameters = dict(model.bundle.transformer.named_parameters())
    names = [name for name in parameters if not name.endswith("lm_head.weight")]
    for name in names:
        parameters[name].requires_grad_(True)
    found = torch.autograd.grad(model.stage.replay(part).log_probs.sum(), [parameters[name] for name in names])
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    theirs = dict(model.own.named_parameters())
    total = torch.zeros(())
    for row, tokens in enumerate(responses(part)):
        prompts, prompt = prompt_of(model, row)
        logits = model.own(**own_inputs(prompts, prompt, tokens)).logits[0, -len(tokens) - 1 : -1]
        total = total + logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    expected = torch.autograd.grad(total, [theirs[name] for name in names])
    for name, ours, own in zip(names, found, expected, strict=True):
        torch.testing.assert_close(ours, own, atol=2e-4, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_half_precision_writes_and_replays_alike(model: Loaded, frozen: torch.dtype) -> None:
    bundle = model.family.load(CPU, torch.float32, frozen_dtype=frozen)
    assert next(bundle.frozen["visual"].parameters()).dtype == frozen
    part = written(ARStage(model.family, bundle, torch.bfloat16), uneven())
    replayed = ARStage(model.family, bundle, torch.bfloat16).replay(part).log_probs
    assert (replayed - segment(part).log_probs).abs().mean() < 0.05


class FlatPositions(VisionLanguage):
    """Pictures as if they were words."""

    def positions(self, bundle: Bundle, prompts: PromptTokens) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.arange(length) for length in prompts.lengths.tolist()]
        return torch.cat(rows)[:, None].expand(-1, 3), prompts.lengths


class Blind(VisionLanguage):
    """Placeholders as if they were words."""

    def hidden_states(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return super().hidden_states(*arguments, **{**named, "pictures": None})


@pytest.mark.parametrize("wrong", [FlatPositions, Blind])
def test_a_forward_that_is_not_the_models_own_is_refused_at_load(model: Loaded, wrong: type[VisionLanguage]) -> None:
    with pytest.raises(ValueError, match="does not run packed: its logits differ"):
        wrong(str(model.folder)).load(CPU, torch.float32)
