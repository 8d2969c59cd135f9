from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.supervised_language import PAIRS, encoded
from tests.tiny_language import SMALL
from tests.tiny_language_policy import language_policy, text, with_text
from tests.tiny_policy import START, last_gradient, relative_difference
from unirl.algorithms.token_sft import TokenSFT
from unirl.train.held_out import HeldOutLoss
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, TokenGeometry
from unirl.types.condition import PromptTokens
from unirl.types.sample import Part


def rows(part: Part) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each row, -100 where there is no loss, as transformers takes them."""
    segment, prompts = text(part), part.conditions
    assert isinstance(prompts, PromptTokens)
    found = []
    for prompt, response, mask in zip(
        prompts.tokens.split(prompts.lengths.tolist()),
        segment.tokens.split(segment.lengths.tolist()),
        segment.loss_mask.split(segment.lengths.tolist()),
        strict=True,
    ):
        labels = torch.where(mask, response, -100).tolist()
        found.append((torch.cat([prompt, response]).tolist(), [-100] * len(prompt) + labels))
    return found


def with_a_hole(part: Part) -> Part:
    """The third response has two tokens in its middle that are not learnt, as a turn of the user would be."""
    mask = text(part).loss_mask.clone()
    start = int(text(part).lengths[:2].sum())
    mask[start + 2 : start + 4] = False
    return with_text(part, loss_mask=mask)


def theirs(folder: Path) -> Any:
    """transformers' own model of the same weights, with its own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def trained(part: Part, *, algorithm: TokenSFT | None = None, **geometry: Any) -> tuple[float, torch.Tensor]:
    """The loss and the gradient of one step on `part`."""
    backend = language_policy(SMALL)
    stack = TrainStack(backend, algorithm or TokenSFT(), TokenGeometry(**geometry))
    return stack.train(Batch.of(part, 0, ranks=1), START)["train/loss"].value, last_gradient(backend)


def test_loss_and_gradient_are_those_of_transformers_on_the_padded_batch(tmp_path: Path) -> None:
    backend = language_policy(SMALL)
    part = with_a_hole(encoded(backend))
    backend.export(tmp_path / "model", weights="live")
    model, pairs = theirs(tmp_path / "model"), rows(part)
    longest = max(len(tokens) for tokens, _ in pairs)
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in pairs])
    labels = torch.tensor([own + [-100] * (longest - len(own)) for _, own in pairs])
    seen = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in pairs])
    expected = model(input_ids=padded, attention_mask=seen, labels=labels).loss
    expected.backward()
    loss, gradient = trained(part)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    own = dict(model.named_parameters())
    wanted = torch.cat([own[name].grad.flatten() for name in sorted(own)])
    assert len(wanted) == len(gradient)
    assert relative_difference(gradient, wanted) < 1e-5


def test_a_packed_batch_has_the_loss_and_gradient_of_its_rows_one_by_one() -> None:
    part = with_a_hole(encoded(language_policy(SMALL)))
    whole = trained(part)
    geometries: list[dict[str, Any]] = [{"micro_batch_size": 1}, {"token_budget": 20}, {"token_budget": 1}]
    for geometry in geometries:
        loss, gradient = trained(part, **geometry)
        assert loss == pytest.approx(whole[0], abs=1e-6)
        assert relative_difference(gradient, whole[1]) < 1e-6


def test_other_aggregations_are_weighted_means_of_the_rows(tmp_path: Path) -> None:
    backend = language_policy(SMALL)
    part = encoded(backend)
    backend.export(tmp_path / "model", weights="live")
    model, pairs = theirs(tmp_path / "model"), rows(part)
    alone = torch.stack(
        [
            model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss.detach()
            for tokens, labels in pairs
        ]
    )
    lengths = text(part).lengths
    by_sequence = TokenSFT(aggregation="seq-mean-token-mean")
    by_horizon = TokenSFT(aggregation="seq-mean-token-sum-norm", horizon=10)
    assert trained(part)[0] == pytest.approx(float((alone * lengths).sum() / lengths.sum()), abs=1e-6)
    assert trained(part, algorithm=by_sequence)[0] == pytest.approx(float(alone.mean()), abs=1e-6)
    assert trained(part, algorithm=by_horizon)[0] == pytest.approx(float((alone * lengths).mean() / 10), abs=1e-6)


def test_the_held_out_loss_is_the_training_loss_without_a_step() -> None:
    backend = language_policy(SMALL)
    part = with_a_hole(encoded(backend))
    expected, _ = trained(part)
    before = {name: value.clone() for name, value in backend.state()["parameters"].items()}
    for geometry, count in ((TokenGeometry(), 64), (TokenGeometry(), 2), (TokenGeometry(token_budget=15), 3)):
        measured = HeldOutLoss(backend, geometry, rows=count, weights="live").measure(part)
        assert measured is not None
        assert measured["loss"].value == pytest.approx(expected, abs=1e-6)
        assert measured["loss"].weight == float(text(part).loss_mask.sum())
    assert all(torch.equal(before[name], value) for name, value in backend.state()["parameters"].items())


def test_equal_prompts_of_different_records_are_kept_apart() -> None:
    assert PAIRS[0][0] == PAIRS[3][0]
    together = trained(encoded(language_policy(SMALL), PAIRS[0], PAIRS[3]))[0]
    alone = [trained(encoded(language_policy(SMALL), pair))[0] for pair in (PAIRS[0], PAIRS[3])]
    assert together == pytest.approx((2 * alone[0] + 4 * alone[1]) / 6, abs=1e-6)
