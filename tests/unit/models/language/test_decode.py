"""A step of decoding by hand gives what the library's own forward gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_language import CPU, OtherLM
from tests.unit.models.language.test_attention import MODELS
from unirl.models.base import Bundle
from unirl.models.language import decode
from unirl.models.language.attention import DecodeLayout, KeyValues
from unirl.train.lora import LoRA, inject

KNOWN = {
    **{name: family for name, family in MODELS.items() if name.startswith(("llama", "mistral", "qwen"))},
    "llama 3 rope": OtherLM(
        settings={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        }
    ),
    "llama, biases": OtherLM(settings={"attention_bias": True, "mlp_bias": True}),
}
TOKENS, COLUMNS = torch.tensor([[3], [1], [4]]), 6


def cached(bundle: Bundle, dtype: torch.dtype = torch.float32) -> KeyValues:
    """Keys and values of three rows, whose prompts have 5, 3 and 1 tokens, with room for one more."""
    config: Any = bundle.transformer.config
    draws = torch.Generator().manual_seed(0)
    shape = (3, config.num_key_value_heads, COLUMNS, config.hidden_size // config.num_attention_heads)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=draws).to(dtype) for _ in range(config.num_hidden_layers)]

    return KeyValues(drawn(), drawn(), torch.tensor([5, 3, 1]), start=COLUMNS - 1)


def by_library(bundle: Bundle, cache: KeyValues) -> torch.Tensor:
    model: Any = bundle.transformer.base_model
    output = model(
        input_ids=TOKENS,
        position_ids=cache.lengths[:, None],
        use_cache=False,
        layout=DecodeLayout(cache, 0),
    )
    return output.last_hidden_state


def by_hand(bundle: Bundle, cache: KeyValues) -> torch.Tensor:
    model: Any = bundle.transformer.base_model
    return decode.Decoder(model)(TOKENS[:, 0], cache.lengths, DecodeLayout(cache, 0))[:, None]


@torch.no_grad()
@pytest.mark.parametrize("name", KNOWN)
def test_hidden_states_and_the_cache_are_those_of_the_librarys_forward(name: str) -> None:
    bundle = KNOWN[name].load(CPU, torch.float32)
    assert decode.knows(bundle.transformer.base_model)
    own, others = cached(bundle), cached(bundle)
    torch.testing.assert_close(by_hand(bundle, own), by_library(bundle, others), rtol=1e-5, atol=1e-5)
    for left, right in zip(own.keys + own.values, others.keys + others.values, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_librarys_forward(kind: str, autocast: bool) -> None:
    """Weights in bfloat16, or float32 masters under autocast."""
    errors = torch.zeros(2)
    for seed in range(4):
        family = OtherLM(kind=kind, init_seed=seed)
        bundle, exact = (family.load(CPU, torch.float32 if autocast else torch.bfloat16) for _ in range(2))
        exact.transformer.float()
        right = by_hand(exact, cached(exact))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            dtype = torch.float32 if autocast else torch.bfloat16
            steps = [step(bundle, cached(bundle, dtype)).float() for step in (by_hand, by_library)]
        errors += torch.stack([(step - right).norm() / right.norm() for step in steps])
    assert errors[0] <= 1.1 * errors[1] < 0.2, errors


@torch.no_grad()
def test_under_autocast_scores_are_not_rounded_before_the_softmax() -> None:
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 1, 8, generator=draws) for heads in (4, 2, 2))
    cache = KeyValues(
        *([[torch.randn(3, 2, 64, 8, generator=draws)] for _ in range(2)]), lengths=torch.full((3,), 63), start=63
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", torch.bfloat16):
        own = DecodeLayout(cache, 0).attend(0, query, key, value, scale=3.0, window=None)
        right = attend(query.view(3, 2, 2, 8), cache.keys[0], cache.values[0], scale=3.0).view(query.shape)
    assert torch.equal(own, right)


@torch.no_grad()
def test_adapters_take_part() -> None:
    family = OtherLM(kind="qwen3")
    bundle = family.load(CPU, torch.float32)
    before = by_hand(bundle, cached(bundle))
    inject(bundle.transformer, LoRA(rank=2, alpha=4), family.lora_targets, 0)
    for name, weight in bundle.transformer.named_parameters():
        if "lora_B" in name:
            weight.normal_(generator=torch.Generator().manual_seed(1))
    after = by_hand(bundle, cached(bundle))
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, by_library(bundle, cached(bundle)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj"])
def test_what_hangs_on_a_linear_layer_takes_part(name: str) -> None:
    """As tensor parallel does: what such a layer is given, or gives, goes through a hook."""
    bundle = OtherLM(kind="qwen3").load(CPU, torch.float32)
    model: Any = bundle.transformer.base_model
    before = by_hand(bundle, cached(bundle))
    layer = model.layers[1].get_submodule(name)
    for register in (layer.register_forward_pre_hook, layer.register_forward_hook):
        hook = register(lambda module, given, *made: made[0] * 3 if made else (given[0] * 2,))
        after = by_hand(bundle, cached(bundle))
        assert (after - before).abs().max() > 0.1
        torch.testing.assert_close(after, by_library(bundle, cached(bundle)), rtol=1e-5, atol=1e-5)
        hook.remove()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in KNOWN])
def test_any_other_model_decodes_by_its_own_forward(name: str) -> None:
    assert not decode.knows(MODELS[name].load(CPU, torch.float32).transformer.base_model)


def test_a_model_that_is_not_built_as_its_class_says_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite scales what its layers add, which the steps of Llama do not."""
    scaled = OtherLM(kind="granite", settings={"residual_multiplier": 0.5})
    scaled.load(CPU, torch.float32)
    monkeypatch.setitem(decode._BUILDS, "GraniteModel", decode._BUILDS["LlamaModel"])
    with pytest.raises(ValueError, match=r"GraniteForCausalLM does not decode: its logits differ .* by \d"):
        scaled.load(CPU, torch.float32)
