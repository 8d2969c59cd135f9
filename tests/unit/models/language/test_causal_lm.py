"""How a prompt becomes tokens, and what a checkpoint of transformers becomes here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.byte_language import BEGIN, TURN_END, write_checkpoint
from tests.tiny_language import CPU
from unirl.models.base import Bundle
from unirl.models.language.causal_lm import CausalLM
from unirl.models.tiny_language import TinyLM
from unirl.types.media import Media


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a chat template and without a begin token."""
    return str(write_checkpoint(tmp_path_factory.mktemp("base"), template=None, begin=False))


def asked(family: CausalLM, *texts: str) -> tuple[list[list[int]], list[str]]:
    """The tokens of each prompt, and what they say with special tokens."""
    bundle = family.load(CPU, torch.float32)
    prompts = family.tokenize(bundle, Media(texts=list(texts)))
    rows = [row.tolist() for row in prompts.tokens.split(prompts.lengths.tolist())]
    return rows, [bundle.processors["tokenizer"].decode(row) for row in rows]


def test_the_chat_template_is_taken_where_there_is_one_with_one_begin_token(chat: str) -> None:
    family = CausalLM(checkpoint=chat)
    rows, texts = asked(family, "hi", "日本語 🙂")
    expected = [f"{BEGIN}[user]{text}{TURN_END}[assistant]" for text in ("hi", "日本語 🙂")]
    assert texts == expected
    begin = family.load(CPU, torch.float32).processors["tokenizer"].bos_token_id
    assert [row.count(begin) for row in rows] == [1, 1]
    assert [row.index(begin) for row in rows] == [0, 0]


def test_it_is_what_the_librarys_own_template_call_gives(chat: str) -> None:
    rows, _ = asked(CausalLM(checkpoint=chat, system="Be brief."), "abc abd", "  spaces\n")
    tokenizer: Any = AutoTokenizer.from_pretrained(chat)
    for text, row in zip(("abc abd", "  spaces\n"), rows, strict=True):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert row == own["input_ids"]


def test_the_system_message_and_the_templates_own_arguments_are_taken(chat: str) -> None:
    _, texts = asked(CausalLM(checkpoint=chat, system="Be brief.", template_arguments={"shout": True}), "hi")
    assert texts == [f"{BEGIN}[system]Be brief.{TURN_END}[user]hi{TURN_END}![assistant]"]


def test_plain_prompts_stand_as_they_are_with_the_begin_token_of_the_tokenizer(chat: str, base: str) -> None:
    assert asked(CausalLM(checkpoint=chat, template="plain"), "hi", "é")[1] == [f"{BEGIN}hi", f"{BEGIN}é"]
    assert asked(CausalLM(checkpoint=base), "hi", " é\n")[1] == ["hi", " é\n"]


def test_special_tokens_written_in_a_prompt_are_read_as_such_once(chat: str) -> None:
    rows, _ = asked(CausalLM(checkpoint=chat, template="plain"), f"a{TURN_END}b")
    assert len(rows[0]) == 4


def test_chat_without_a_template_is_an_error_of_the_library_with_its_advice(base: str) -> None:
    with pytest.raises(ValueError, match="chat_template"):
        asked(CausalLM(checkpoint=base, template="chat"), "hi")


def test_a_prompt_without_tokens_is_refused(base: str, chat: str) -> None:
    with pytest.raises(ValueError, match=r"the prompt '' has no tokens: a response needs one to start from"):
        asked(CausalLM(checkpoint=base), "")
    assert asked(CausalLM(checkpoint=chat, template="plain"), "")[1] == [BEGIN]


def test_a_prompt_longer_than_its_limit_is_refused_with_both_numbers(base: str) -> None:
    family = CausalLM(checkpoint=base, max_prompt_tokens=77)
    asked(family, "x" * 77)
    with pytest.raises(ValueError, match=r"the prompt 'x{60}\.\.\.' has 500 tokens, more than max_prompt_tokens=77"):
        asked(family, "x" * 500)


def test_the_limit_counts_the_tokens_that_the_model_sees_template_and_all(chat: str) -> None:
    row = asked(CausalLM(checkpoint=chat), "hi")[0][0]
    asked(CausalLM(checkpoint=chat, max_prompt_tokens=len(row)), "hi")
    with pytest.raises(ValueError, match=f"has {len(row)} tokens, more than max_prompt_tokens={len(row) - 1}"):
        asked(CausalLM(checkpoint=chat, max_prompt_tokens=len(row) - 1), "hi")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"template": "plain", "system": "x"}, "belong to a chat template, and template is plain"),
        ({"template": "plain", "template_arguments": {"shout": True}}, "belong to a chat template"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1 or null, got 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CausalLM(checkpoint="any", **settings)


# The model


def test_what_is_saved_loads_in_transformers_with_the_same_logits_and_its_own_attention(
    chat: str, tmp_path: Path
) -> None:
    family = CausalLM(checkpoint=chat)
    bundle = family.load(CPU, torch.float32)
    with torch.no_grad():
        for parameter in bundle.transformer.parameters():
            parameter.mul_(1.1)
    family.save(bundle, tmp_path / "saved")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, bundle.transformer.state_dict()[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template is not None
    again = CausalLM(checkpoint=str(tmp_path / "saved"))
    assert again.end_tokens(again.load(CPU, torch.float32)) == family.end_tokens(bundle)
    assert "unirl" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_tiny_model_that_was_saved_loads_with_its_weights(tmp_path: Path) -> None:
    family = TinyLM(layers=1, width=32, heads=2, init_seed=5)
    bundle: Bundle = family.load(CPU, torch.float32)
    (tmp_path / "saved").mkdir()
    family.save(bundle, tmp_path / "saved")
    again = TinyLM(layers=1, width=32, heads=2, checkpoint=tmp_path / "saved").load(CPU, torch.float32)
    saved = bundle.transformer.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in again.transformer.state_dict().items())


def test_a_tiny_model_refuses_characters_that_it_does_not_have() -> None:
    family = TinyLM(layers=1, width=32, heads=2)
    bundle = family.load(CPU, torch.float32)
    with pytest.raises(ValueError, match=r"the prompt 'Hé' must be of the characters .*, it has \['H', 'é'\]"):
        family.tokenize(bundle, Media(texts=["Hé"]))
