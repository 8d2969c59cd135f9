"""Log-probs and entropy in chunks: the plain softmax, without its matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.models.language import log_probs as module
from unirl.models.language.log_probs import Support, token_log_probs

TOKENS, WIDTH, VOCABULARY = 37, 8, 50


def inputs(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=draws, requires_grad=True)
    head = torch.randn(vocabulary, WIDTH, generator=draws, requires_grad=True)
    return hidden, head, torch.randint(vocabulary, (tokens,), generator=draws)


def supports(targets: torch.Tensor, size: int = 5) -> tuple[Support, torch.Tensor]:
    """Of each token its target and up to `size` others; and as `(T, V)` bool."""
    draws = torch.Generator().manual_seed(1)
    kept = torch.zeros(len(targets), VOCABULARY, dtype=torch.bool)
    for row, target in enumerate(targets.tolist()):
        kept[row, torch.randperm(VOCABULARY, generator=draws)[: row % size]] = True
        kept[row, target] = True
    return Support(kept.nonzero()[:, 1], kept.sum(1)), kept


@pytest.fixture(params=[1, 7, 37, 10_000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens in a chunk."""
    monkeypatch.setattr(module, "_LARGEST_CHUNK", request.param * VOCABULARY)
    return request.param


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_in_chunks_of_any_size_it_is_the_plain_softmax_with_its_gradient(
    chunk: int, temperature: float, restricted: bool, frozen: bool
) -> None:
    hidden, head, targets = inputs()
    head.requires_grad_(not frozen)
    support, kept = supports(targets)
    logits = (hidden @ head.T) / temperature
    if restricted:
        logits = logits.masked_fill(~kept, -torch.inf)
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    found, found_entropy = token_log_probs(
        hidden,
        lambda rows: rows @ head.T,
        targets,
        temperature=temperature,
        vocabulary=VOCABULARY,
        support=support if restricted else None,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found_entropy, entropy.detach(), rtol=1e-4, atol=5e-5)
    assert not found_entropy.requires_grad
    weights = torch.linspace(-1, 2, TOKENS)
    trained = [hidden] if frozen else [hidden, head]
    own = torch.autograd.grad((found * weights).sum(), trained)
    plain = torch.autograd.grad((expected * weights).sum(), trained)
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_numbers() -> None:
    """Logits 2 1 0 at T = 0.5; 0.5 0.3 0.15 0.05 where two were kept; entropy of fair and of certain tokens."""
    head = torch.eye(4)

    def scored(row: torch.Tensor, target: int, temperature: float, support: Support | None) -> list[float]:
        scores, entropy = token_log_probs(
            row[None],
            lambda rows: rows @ head[: len(row), : len(row)],
            torch.tensor([target]),
            temperature=temperature,
            vocabulary=len(row),
            support=support,
        )
        return [scores.item(), entropy.item()]

    assert scored(torch.tensor([2.0, 1.0, 0.0]), 0, 0.5, None)[0] == pytest.approx(-0.1429316, abs=1e-6)
    two = Support(torch.tensor([0, 1]), torch.tensor([2]))
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert scored(row, 1, 1.0, two)[0] == pytest.approx(-0.9808293, abs=1e-6)
    assert scored(torch.zeros(4), 2, 1.0, None) == pytest.approx([-math.log(4), math.log(4)])
    assert scored(torch.zeros(4), 1, 1.0, two) == pytest.approx([-math.log(2), math.log(2)])
    one = Support(torch.tensor([1]), torch.tensor([1]))
    assert scored(torch.zeros(4), 1, 1.0, one) == [0.0, 0.0]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("restricted", [False, True])
def test_under_autocast_only_the_logits_are_rounded_and_the_entropy_is_theirs(restricted: bool, frozen: bool) -> None:
    """Peaked logits: 16 bits of them, multiplied with probabilities, would be off by more than the entropy."""
    hidden, head, targets = inputs()
    head.requires_grad_(not frozen)
    support, kept = supports(targets)
    with torch.autocast("cpu", torch.bfloat16):
        logits = (3 * hidden @ head.T).float().detach()
        _, found = token_log_probs(
            hidden,
            lambda rows: 3 * rows @ head.T,
            targets,
            temperature=1.0,
            vocabulary=VOCABULARY,
            support=support if restricted else None,
        )
    if restricted:
        logits = logits.masked_fill(~kept, -torch.inf)
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("graph", [True, False])
def test_no_token_at_all_gives_nothing(graph: bool) -> None:
    """A micro-batch whose tokens are all masked."""
    hidden, head, targets = inputs()
    with torch.set_grad_enabled(graph):
        for support in (None, Support(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))):
            found = token_log_probs(
                hidden[:0],
                lambda rows: rows @ head.T,
                targets[:0],
                temperature=1.0,
                vocabulary=VOCABULARY,
                support=support,
            )
            assert [column.shape for column in found] == [(0,), (0,)]


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returns, and of all that are kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else [out]
        self.elements = max([self.elements, *(r.numel() for r in results if isinstance(r, torch.Tensor))])
        return out


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_a_matrix_of_all_tokens_and_the_vocabulary_never_exists_forwards_or_backwards(
    monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """640 tokens x 1,000 words in chunks of 64 tokens: nothing is larger than 64,000, and less is kept."""
    monkeypatch.setattr(module, "_LARGEST_CHUNK", 64 * 1000)
    hidden, head, targets = inputs(640, 1000)
    head.requires_grad_(not frozen)
    kept: list[int] = []
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
            found, _ = token_log_probs(hidden, lambda rows: rows @ head.T, targets, temperature=1.0, vocabulary=1000)
        found.sum().backward()
    assert largest.elements == 64_000
    assert max(kept) <= max(hidden.numel(), head.numel())
    assert hidden.grad is not None
    plain = (hidden @ head.T).log_softmax(-1).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain, hidden)[0], rtol=1e-4, atol=1e-5)


def test_logits_in_bfloat16_are_scored_in_float32() -> None:
    hidden, head, targets = inputs()
    rows, weights = hidden.detach().bfloat16(), head.detach().bfloat16()
    found, _ = token_log_probs(rows, lambda own: own @ weights.T, targets, temperature=1.0, vocabulary=VOCABULARY)
    expected = (rows @ weights.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
