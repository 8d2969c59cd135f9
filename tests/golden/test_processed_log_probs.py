"""Log-probs of the sampled distribution, against vLLM and transformers on a Llama of formula weights (file 50)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from tests.tiny_language import CPU, rows_of
from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle
from unirl.models.language.draw import draw, likeliest
from unirl.models.language.log_probs import Support, token_log_probs
from unirl.models.tiny_language import TinyLM
from unirl.types.sampling import ARSamplingParams

FILE = "50_processed_logprobs"
SAMPLED = [name for name in load(FILE) if name.startswith("T") and name != "T0.0_k0_p1.0"]
TIES = [name for name in load(FILE) if name.startswith("ties")]
LISTED = {
    "T0.0_k0_p1.0": "vLLM scores greedy texts at temperature 1; here they are for evaluations and have no log-prob"
}
# Ours are float32, theirs float64; logits of the model reach 5.
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 4e-6}


@dataclasses.dataclass(frozen=True)
class FormulaLM(TinyLM):
    """The Llama of the file."""

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        from transformers import LlamaConfig, LlamaForCausalLM

        told = json.loads((Path(__file__).parent / "data" / f"{FILE}.json").read_text())["conventions"]
        model: Any = LlamaForCausalLM(LlamaConfig(**told["model"]))
        for number, name in enumerate(told["parameter_order"]):
            parameter = model.get_parameter(name)
            i = torch.arange(parameter.numel(), dtype=torch.float64)
            v = torch.sin(0.7 * (i + 1) + 1.3 * number + 0.01 * i * number)
            scaled = 1 + 0.1 * v if "norm" in name else v * (1.5 if "embed" in name else 0.6)
            parameter.data = scaled.view(parameter.shape)
        return self.bundled(model.to(device, dtype), self._tokenizer())


def test_every_case_is_tested_or_listed() -> None:
    assert_covered(FILE, ["model_logits", *SAMPLED, *TIES], LISTED)


def asked(case: Case) -> ARSamplingParams:
    return ARSamplingParams(
        max_new_tokens=1, temperature=case.raw("temperature"), top_k=case.raw("top_k"), top_p=case.raw("top_p")
    )


@pytest.mark.parametrize("prompt", [1, 3, 7])
def test_the_packed_model_gives_their_log_probs_of_the_next_token(prompt: int) -> None:
    case = load(FILE)["model_logits"]
    tokens = [int(token) for token in case.raw("tokens")]
    family = FormulaLM()
    stage = ARStage(family, family.load(CPU, torch.float32), torch.float32)
    with torch.no_grad():
        found = stage.replay(rows_of([tokens[:prompt]], [[tokens[prompt:]]])).log_probs
    expected = case.output("raw_logprob_of_next_token")[prompt - 1 : len(tokens) - 1].float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_kept_tokens_and_the_drawn_ones_have_their_log_probs(name: str) -> None:
    case = load(FILE)[name]
    sampling, logits = asked(case), case.input("logits", torch.float32)
    expected = case.output("processed_logprobs", torch.float32)
    kept = likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    assert torch.equal(kept, expected > -torch.inf)
    for uniform in torch.linspace(0, 0.999, 40, dtype=torch.float64):
        drawn = draw(logits, uniform.expand(len(logits)), sampling)
        torch.testing.assert_close(drawn.log_probs, expected.gather(1, drawn.tokens[:, None])[:, 0], **CLOSE)
        assert (drawn.kept is not None) == sampling.truncated_support
        assert drawn.kept is None or torch.equal(drawn.kept, kept)


@pytest.mark.parametrize("name", SAMPLED)
def test_replayed_log_probs_over_the_recorded_support_and_their_gradient_are_theirs(name: str) -> None:
    """Where a scored token was not kept its log-prob is -inf, as theirs; the gradient is of those that were."""
    case = load(FILE)[name]
    targets = case.output("scored_tokens", torch.int64)
    sampling, logits = asked(case), case.input("logits", torch.float32)[: len(targets)].requires_grad_()
    kept = likeliest(logits.detach() / sampling.temperature, sampling.top_k, sampling.top_p)
    found, _ = token_log_probs(
        logits,
        lambda rows: rows,
        targets,
        temperature=sampling.temperature,
        vocabulary=logits.shape[1],
        support=Support(kept.nonzero()[:, 1], kept.sum(1)) if sampling.truncated_support else None,
    )
    torch.testing.assert_close(found, case.output("logprob_of_scored_token", torch.float32), **CLOSE)
    found[found > -torch.inf].sum().backward()
    assert logits.grad is not None
    expected = case.output("grad_logits_of_sum_over_kept_scored_tokens", torch.float32)
    torch.testing.assert_close(logits.grad, expected, **CLOSE)


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_an_exact_border_each_precision_keeps_what_theirs_keeps(name: str, dtype: torch.dtype) -> None:
    """Which of two equal tokens stays depends on rounding: the set is recorded, never computed again."""
    case = load(FILE)[name]
    kept = likeliest(case.input("probabilities").log().to(dtype), case.raw("top_k"), case.raw("top_p"))
    assert torch.equal(kept, case.output(f"kept_{str(dtype).removeprefix('torch.')}", torch.bool))
