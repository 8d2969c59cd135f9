"""Packed rows with shared prompts give what the library's own forward gives for each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_language import CPU, OtherLM, plain, row_by_row, rows_of, stage_of, written
from tests.tiny_language import request as asked
from tests.tiny_language_policy import language_policy, text
from unirl.models.ar_stage import ARStage
from unirl.models.language import attention as module
from unirl.models.language.attention import PackedLayout, _similar
from unirl.train.lora import LoRA
from unirl.types.sample import Part
from unirl.types.segment import TextSegment

WINDOW = 3
MODELS: dict[str, OtherLM] = {
    "llama": OtherLM(),
    "llama, a key head for each query head": OtherLM(key_heads=4),
    "llama, one key head": OtherLM(key_heads=1),
    "qwen3": OtherLM(kind="qwen3"),
    "qwen2": OtherLM(kind="qwen2"),
    "smollm3, a layer without positions": OtherLM(kind="smollm3", settings={"no_rope_layers": [1, 0]}),
    "olmo2": OtherLM(kind="olmo2"),
    "granite, scaled logits": OtherLM(kind="granite", settings={"attention_multiplier": 0.2}),
    "mistral, a window shorter than the rows": OtherLM(kind="mistral", settings={"sliding_window": WINDOW}),
    "qwen3, a window in one layer of two": OtherLM(
        kind="qwen3",
        settings={"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"use_sliding_window": True},
    ),
    "gemma3, a window in one layer of two": OtherLM(
        kind="gemma3_text",
        settings={"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"query_pre_attn_scalar": 8},
    ),
}
PACKS: dict[str, tuple[list[list[int]], list[list[list[int]]]]] = {
    "one row": ([[3, 1, 4, 1, 5]], [[[9, 2, 6]]]),
    "siblings of unequal lengths": ([[3, 1, 4, 1, 5, 9, 2]], [[[6], [5, 3, 5, 8, 9, 7, 9], [3, 2]]]),
    "prompts of unequal lengths": ([[7], [3, 1, 4, 1, 5, 9]], [[[2, 6, 5]], [[3, 5, 8, 9, 7]]]),
    "responses of one token": ([[3, 1], [4]], [[[1], [5]], [[9]]]),
    "some of one token": ([[3, 1, 4, 1, 5], [9, 2], [8]], [[[6, 5, 3, 5], [8]], [[9, 7, 9, 3, 2, 3]], [[8], [4]]]),
}


def test_the_layout_of_the_docstring() -> None:
    """Columns a a a b b | c c d e e: who sees whom, through attention weights of equal keys."""
    layout = PackedLayout(torch.tensor([3, 2]), torch.tensor([2, 1, 2]), torch.tensor([0, 0, 1]))
    values = torch.eye(10)[None, None]
    equal = torch.zeros(1, 1, 10, 10)
    seen = layout.attend(0, equal, equal, values, scale=1.0, window=None)[0, 0] > 0
    a, c = [0, 1, 2], [5, 6]
    expected = {0: [0], 1: [0, 1], 2: a, 3: [3], 4: [3, 4], 5: [*a, 5], 6: [*a, *c], 7: [*a, 7], 8: [3, 4, 8]}
    expected[9] = [3, 4, 8, 9]
    assert {row: seen[row].nonzero()[:, 0].tolist() for row in range(10)} == expected
    near = layout.attend(0, equal, equal, values, scale=1.0, window=2)[0, 0] > 0
    assert [near[row].nonzero()[:, 0].tolist() for row in (2, 5, 6, 7, 8, 9)] == [
        [1, 2], [2, 5], [5, 6], [2, 7], [4, 8], [8, 9]
    ]  # fmt: skip
    assert layout.places.tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_of_packed_rows_are_those_of_each_row_by_itself(model: str, attention: str) -> None:
    stage = stage_of(MODELS[model])
    own = plain(stage.bundle, attention)
    for prompts, responses in PACKS.values():
        part = rows_of(prompts, responses, temperature=0.8)
        with torch.no_grad():
            found = stage.replay(part).log_probs
        torch.testing.assert_close(found, row_by_row(own, part, 0.8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["llama", "mistral, a window shorter than the rows"])
def test_they_are_those_of_a_padded_batch_whichever_side_is_padded(model: str, side: str) -> None:
    stage = stage_of(MODELS[model])
    prompts, responses = PACKS["some of one token"]
    rows = [(prompt, one) for prompt, siblings in zip(prompts, responses, strict=True) for one in siblings]
    longest = max(len(prompt) + len(one) for prompt, one in rows)
    tokens, mask = torch.full((len(rows), longest), 11), torch.zeros(len(rows), longest, dtype=torch.long)
    first = []
    for number, (prompt, one) in enumerate(rows):
        start = longest - len(prompt) - len(one) if side == "left" else 0
        tokens[number, start : start + len(prompt) + len(one)] = torch.tensor(prompt + one)
        mask[number, start : start + len(prompt) + len(one)] = 1
        first.append(start + len(prompt))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    scores = plain(stage.bundle)(input_ids=tokens, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
    expected = [
        scores[row, at - 1 + k, token]
        for row, ((_, one), at) in enumerate(zip(rows, first, strict=True))
        for k, token in enumerate(one)
    ]
    with torch.no_grad():
        found = stage.replay(rows_of(prompts, responses)).log_probs
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_decoding_a_token_at_a_time_is_the_prefill_of_the_same_tokens(model: str) -> None:
    """The log-probs that a rollout records, against its own replay and against a row by itself."""
    stage = stage_of(MODELS[model])
    part = written(stage, asked(group=3, temperature=1.3, stop_token_ids=tuple(range(0, 40, 3))))
    segment = part.segment
    assert isinstance(segment, TextSegment)
    assert len(segment.lengths.unique()) > 1
    with torch.no_grad():
        torch.testing.assert_close(segment.log_probs, stage.replay(part).log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(segment.log_probs, row_by_row(plain(stage.bundle), part, 1.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["qwen3", "mistral, a window shorter than the rows"])
def test_in_bfloat16_the_difference_stays_at_its_rounding(model: str) -> None:
    stage = stage_of(MODELS[model], torch.bfloat16)
    part = written(stage, asked(group=3))
    segment = part.segment
    assert isinstance(segment, TextSegment)
    with torch.no_grad():
        replayed = stage.replay(part).log_probs
    exact = row_by_row(plain(stage.bundle), part)
    assert replayed.dtype == segment.log_probs.dtype == torch.float32
    for found in (replayed, segment.log_probs):
        assert 1e-4 < float((found - exact).abs().mean()) < 0.05


# Gradients


def gradients(stage: ARStage, part: Part) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 2, int(part.segment.lengths.sum()))  # type: ignore[union-attr]
    parameters = {name: p for name, p in stage.bundle.transformer.named_parameters() if p.requires_grad}
    loss = (stage.replay(part).log_probs * weights).sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def alone(part: Part) -> list[Part]:
    return [part.select([row]) for row in range(len(part))]


@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(rank=2, alpha=4)}])
@pytest.mark.parametrize("model", ["llama", "qwen3", "mistral, a window shorter than the rows"])
def test_the_gradient_of_packed_rows_is_that_of_the_librarys_own_forwards(model: str, settings: dict[str, Any]) -> None:
    backend = language_policy(MODELS[model], **settings)
    part = rows_of(*PACKS["some of one token"])
    stage, module = backend.stage, backend.stage.bundle.transformer
    if settings:
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    found = gradients(stage, part)
    weights = torch.linspace(-1, 2, int(part.segment.lengths.sum()))  # type: ignore[union-attr]
    module.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    loss = (row_by_row(module, part) * weights).sum()
    expected = torch.autograd.grad(loss, list(parameters.values()))
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(rank=2, alpha=4)}])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_recomputed_blocks_give_the_same_gradient_bit_for_bit(model: str, settings: dict[str, Any]) -> None:
    part = rows_of(*PACKS["some of one token"])
    kept = gradients(language_policy(MODELS[model], **settings).stage, part)
    again = gradients(language_policy(MODELS[model], gradient_checkpointing=True, **settings).stage, part)
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_layers_that_drop_out_in_training_mode_do_not_where_blocks_are_recomputed() -> None:
    family = OtherLM(kind="opt", settings={"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5})
    stage = language_policy(family, gradient_checkpointing=True).stage
    part = written(stage, asked())
    exact = row_by_row(plain(stage.bundle), part)
    torch.testing.assert_close(text(part).log_probs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stage.replay(part).log_probs, exact, rtol=1e-4, atol=1e-4)


def test_recomputed_blocks_keep_less_for_the_backward() -> None:
    part = rows_of([[1, 2, 3] * 10], [[[4, 5, 6] * 10] * 4])
    sizes = {}
    for name in (False, True):
        stage = language_policy(MODELS["llama"], gradient_checkpointing=name).stage
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            stage.replay(part)
        sizes[name] = sum(kept)
    assert sizes[True] < sizes[False] / 4


# Rows of very different lengths


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([7], [[0]]),
        ([40] * 48, [list(range(48))]),
        ([700, 400, 351], [[0, 1, 2]]),
        ([40, 3000, 41, 1501], [[1, 3], [0, 2]]),
        ([10, 3000, 1000, 40], [[1], [2], [0, 3]]),
        ([700, 40], [[0, 1]]),
    ],
)
def test_a_group_has_rows_of_half_its_longest_or_more_where_padding_costs_more_than_a_group(
    lengths: list[int], groups: list[list[int]]
) -> None:
    assert [rows.tolist() for rows in _similar(torch.tensor(lengths, dtype=torch.long))] == groups


@pytest.mark.parametrize("model", ["llama", "mistral, a window shorter than the rows"])
def test_in_groups_log_probs_and_gradients_are_those_of_one_group(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(MODELS[model])
    for name, parameter in stage.bundle.transformer.named_parameters():
        parameter.requires_grad_("norm" not in name)
    prompts = [[7], list(range(1, 30)), [3, 1, 4, 1], list(range(20))]
    part = rows_of(prompts, [[[2, 6, 5]], [[3], list(range(9, 40))], [[8]], [[5, 4], [1, 2, 3]]])
    whole = stage.replay(part).log_probs
    expected = gradients(stage, part)
    monkeypatch.setattr(module, "_WORTH_A_GROUP", 0)
    assert len(_similar(torch.tensor([len(prompt) for prompt in prompts]))) == 3
    torch.testing.assert_close(stage.replay(part).log_probs, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole, row_by_row(plain(stage.bundle), part), rtol=1e-4, atol=1e-4)
    for name, value in gradients(stage, part).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    rolled = written(stage, asked(("ab", "12+3=" * 9)))
    torch.testing.assert_close(text(rolled).log_probs, stage.replay(rolled).log_probs, rtol=1e-4, atol=1e-4)


# What does not run packed


@pytest.mark.parametrize(
    "family",
    [
        OtherLM(kind="gemma2", settings={"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}),
        OtherLM(kind="gemma2", settings={"final_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}),
        OtherLM(kind="cohere", settings={"logit_scale": 0.0625}),
        OtherLM(kind="gpt_oss", settings={"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
    ids=["softcap in attention", "softcap of logits", "scaled logits", "sinks"],
)
def test_a_model_whose_own_forward_does_more_is_refused_at_load(family: OtherLM) -> None:
    with pytest.raises(ValueError, match=r"ForCausalLM does not run packed: its logits differ .* are not supported"):
        family.load(CPU, torch.float32)


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_a_model_whose_attention_does_not_take_a_layout_is_refused_at_load(kind: str) -> None:
    with pytest.raises(ValueError, match=r"ForCausalLM does not take packed attention"):
        OtherLM(kind=kind).load(CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_soft_cap_so_high_that_a_trial_would_not_show_it_is_refused(dtype: torch.dtype, cap: str) -> None:
    free = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 8}
    OtherLM(kind="gemma2", settings=free).load(CPU, dtype)
    with pytest.raises(ValueError, match=rf"gemma2 caps its scores or logits \({{'{cap}': 10000.0}}\)"):
        OtherLM(kind="gemma2", settings={**free, cap: 1e4}).load(CPU, dtype)


EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "family",
    [
        OtherLM(kind="phimoe", settings={**EXPERTS, "sliding_window": 100}),
        OtherLM(
            kind="qwen2_moe",
            settings={
                **EXPERTS,
                "shared_expert_intermediate_size": 32,
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
    ],
    ids=lambda family: family.kind,
)
def test_a_window_that_a_model_has_in_its_mask_alone_is_refused_however_short_the_rows_of_the_trial(
    family: OtherLM,
) -> None:
    with pytest.raises(ValueError, match="has a window of 100 tokens in its mask and does not tell its attention"):
        family.load(CPU, torch.float32)


def test_in_bfloat16_a_right_model_passes() -> None:
    for family in (OtherLM(), OtherLM(kind="qwen3"), MODELS["mistral, a window shorter than the rows"]):
        family.load(CPU, torch.bfloat16)


# Rows that would depend on others

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 8.0],
        "original_max_position_embeddings": 64,
    }
}


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_rows_of_longrope_end_where_one_would_change_the_frequencies_of_all(kind: str) -> None:
    own = {"original_max_position_embeddings": 64} if kind == "phi3" else {}
    stage = stage_of(OtherLM(kind=kind, settings={**LONGROPE, **own}))
    prompts = ("ab", "cd" * 20)
    with pytest.raises(
        ValueError, match=r"has 40 tokens: with sampling.max_new_tokens=25 more it does not fit .* of 64"
    ):
        written(stage, asked(prompts, max_new_tokens=25))
    part = written(stage, asked(prompts, max_new_tokens=24))
    exact = row_by_row(plain(stage.bundle), part)
    torch.testing.assert_close(text(part).log_probs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stage.replay(part).log_probs, exact, rtol=1e-4, atol=1e-4)
