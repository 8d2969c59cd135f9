from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.byte_language import CHATML, CHATML_END, MARKED, STRICT, STRIPPING, write_checkpoint
from tests.tiny_language import CPU
from unirl.models.base import Bundle
from unirl.models.language.causal_lm import CausalLM
from unirl.models.language.chat import up_to_end_tokens
from unirl.models.language.trained import TrainedTokens
from unirl.models.tiny_language import TinyLM
from unirl.types.conversation import Conversation, Message, Role
from unirl.types.media import Media


def said(*turns: tuple[Role, str]) -> Conversation:
    return tuple(Message(role, (text,)) for role, text in turns)


TWO_TURNS = said(("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "é?"), ("assistant", "3\n"))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A CausalLM and its bundle, by template."""
    known: dict[str | None, tuple[CausalLM, Bundle]] = {}

    def of(written: str | None, **settings: Any) -> tuple[CausalLM, Bundle]:
        if written not in known:
            folder = write_checkpoint(tmp_path_factory.mktemp("model"), written, begin=False, end=CHATML_END)
            family = CausalLM(str(folder))
            known[written] = family, family.load(CPU, torch.float32)
        family, bundle = known[written]
        return CausalLM(family.checkpoint, **settings), bundle

    return of


def learnt(bundle: Bundle, found: TrainedTokens) -> list[str]:
    """The text of each unbroken stretch of trained tokens."""
    stretches: list[list[int]] = []
    for place, (token, trained) in enumerate(zip(found.tokens, found.trained, strict=True)):
        if trained and (place == 0 or not found.trained[place - 1]):
            stretches.append([])
        if trained:
            stretches[-1].append(token)
    return [bundle.processors["tokenizer"].decode(tokens) for tokens in stretches]


def test_the_turns_of_the_assistant_with_their_end_tokens_are_learnt_and_nothing_else(loaded: Any) -> None:
    family, bundle = loaded(CHATML)
    found = family.conversation(bundle, TWO_TURNS, "all")
    assert learnt(bundle, found) == ["2<|im_end|>", "3\n<|im_end|>"]
    whole = bundle.processors["tokenizer"].decode(found.tokens)
    assert whole == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n3\n<|im_end|>\n"
    )


def test_what_stands_before_the_first_trained_token_is_the_prompt_of_a_rollout(loaded: Any) -> None:
    for written, settings in ((CHATML, {"system": "Be kind."}), (CHATML, {"template": "plain"}), (None, {})):
        family, bundle = loaded(written, **settings)
        # The response opens with a line break, which would melt into the one before it.
        found = family.conversation(bundle, said(("user", "hello"), ("assistant", "\nhi")), "all")
        prompt = family.tokenize(bundle, Media(texts=["hello"])).tokens.tolist()
        assert found.tokens[: found.prompt] == prompt
        assert learnt(bundle, found) == ["\nhi<|im_end|>"]


def test_the_last_turn_alone_can_be_learnt(loaded: Any) -> None:
    family, bundle = loaded(CHATML)
    every, last = (family.conversation(bundle, TWO_TURNS, turns) for turns in ("all", "last"))
    assert last.tokens == every.tokens
    assert learnt(bundle, last) == ["3\n<|im_end|>"]


def test_turns_of_the_user_after_the_last_answer_are_no_part_of_it(loaded: Any) -> None:
    family, bundle = loaded(CHATML)
    short, long = said(("user", "a"), ("assistant", "b")), said(("user", "a"), ("assistant", "b"), ("user", "c"))
    assert family.conversation(bundle, long, "all") == family.conversation(bundle, short, "all")


def test_the_system_turn_of_a_conversation_comes_before_that_of_the_settings(loaded: Any) -> None:
    family, bundle = loaded(CHATML, system="Be kind.")
    with_own = bundle.processors["tokenizer"].decode(family.conversation(bundle, TWO_TURNS, "all").tokens)
    without = bundle.processors["tokenizer"].decode(family.conversation(bundle, TWO_TURNS[1:], "all").tokens)
    assert "Be brief." in with_own
    assert "Be kind." not in with_own
    assert without.startswith("<|im_start|>system\nBe kind.<|im_end|>\n")


def test_a_template_that_strips_earlier_reasoning_is_refused_unless_the_last_turn_alone_is_learnt(loaded: Any) -> None:
    family, bundle = loaded(STRIPPING)
    thinking = said(
        ("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d")
    )
    with pytest.raises(ValueError, match=r"renders turn 2 differently by itself.*data\.limit\.turns=last"):
        family.conversation(bundle, thinking, "all")
    last = family.conversation(bundle, thinking, "last")
    assert learnt(bundle, last) == ["<think>y</think>d<|im_end|>"]
    assert "<think>x" not in bundle.processors["tokenizer"].decode(last.tokens)
    plain = said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert learnt(bundle, family.conversation(bundle, plain, "all")) == ["b<|im_end|>", "d<|im_end|>"]


# The same marks, twice in a turn.
TWICE = MARKED.replace("{{ '<|im_end|>' }}{% endg", "{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endg")


@pytest.mark.parametrize("written", [MARKED, TWICE])
@pytest.mark.parametrize("trailing", [(), said(("user", "e"))])
def test_where_a_template_rewrites_turns_its_own_marks_decide(
    loaded: Any, written: str, trailing: Conversation
) -> None:
    family, bundle = loaded(written)
    thinking = said(
        ("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d")
    )
    every, last = (family.conversation(bundle, (*thinking, *trailing), turns) for turns in ("all", "last"))
    assert learnt(bundle, every) == ["b<|im_end|>", "<think>y</think>d<|im_end|>"]
    assert learnt(bundle, last) == ["<think>y</think>d<|im_end|>"]
    assert last.tokens == every.tokens
    assert bundle.processors["tokenizer"].decode(every.tokens).endswith("</think>d<|im_end|>\n")


# A rollout starts inside of the reasoning, as under DeepSeek-R1.
OPENED = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")


def test_an_answer_may_start_with_the_reasoning_that_its_template_opens(loaded: Any) -> None:
    family, bundle = loaded(OPENED)
    found = family.conversation(bundle, said(("user", "a"), ("assistant", "<think>\nr</think>b")), "all")
    assert learnt(bundle, found) == ["r</think>b<|im_end|>"]
    assert found.tokens[: found.prompt] == family.tokenize(bundle, Media(texts=["a"])).tokens.tolist()


@pytest.mark.parametrize(
    ("written", "answer"), [(OPENED, "b"), (OPENED.replace("m.content", "m.content.split('>')[-1]"), "<think>\nr>b")]
)
@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_turn_without_what_its_template_opens_it_with_is_refused(
    loaded: Any, written: str, answer: str, turns: str
) -> None:
    family, bundle = loaded(written)
    told = r"opens a turn of the assistant with '<think>\\n' and renders turn 2 without it.*let its answers start with"
    with pytest.raises(ValueError, match=told) as refused:
        family.conversation(bundle, said(("user", "a"), ("assistant", answer)), turns)
    assert "turns=last" not in str(refused.value)


def test_a_template_that_drops_what_the_assistant_said_is_refused(loaded: Any) -> None:
    family, bundle = loaded(CHATML.replace("m.content", "m.content.split('</think>')[-1]"))
    with pytest.raises(ValueError, match="leaves out a part of the assistant's turn '<think>x</think>b'"):
        family.conversation(bundle, said(("user", "a"), ("assistant", "<think>x</think>b")), "all")


def called(**fields: Any) -> Conversation:
    return (Message("user", ("a",)), Message("assistant", (), fields))


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content"])
def test_a_template_that_does_not_show_a_call_or_the_reasoning_is_refused(loaded: Any, field: str) -> None:
    family, bundle = loaded(CHATML)
    with pytest.raises(ValueError, match=f"the chat template leaves out {field} of the assistant's turn 2: it would"):
        family.conversation(bundle, called(**{field: "add(1)"}), "all")
    family, bundle = loaded(CHATML.replace("m.content", f"(m.{field} or '') + m.content"))
    assert learnt(bundle, family.conversation(bundle, called(**{field: "add(1)"}), "all")) == ["add(1)<|im_end|>"]


def test_a_template_that_insists_on_a_call_shows_it(loaded: Any) -> None:
    asked = "(m.tool_calls or m.content or raise_exception('a turn says something'))"
    family, bundle = loaded(CHATML.replace("m.content", asked))
    assert learnt(bundle, family.conversation(bundle, called(tool_calls="f()"), "all")) == ["f()<|im_end|>"]


def test_without_a_template_what_is_beside_the_text_is_refused(loaded: Any) -> None:
    small = TinyLM(layers=1, width=16, heads=2)
    for family, bundle in (loaded(None), (small, small.load(CPU, torch.float32))):
        with pytest.raises(ValueError, match=r"a turn is its text alone, and \['tool_calls'\] would be left out"):
            family.conversation(bundle, called(tool_calls=[{"function": {"name": "f"}}]), "all")


def test_what_a_template_refuses_is_told_with_its_reason(loaded: Any) -> None:
    family, bundle = loaded(STRICT)
    assert learnt(bundle, family.conversation(bundle, said(("user", "a"), ("assistant", "b")), "all")) == ["b</s>"]
    with pytest.raises(ValueError, match=r"the chat template refuses the conversation \(turns must alternate\)"):
        family.conversation(bundle, said(("user", "a"), ("user", "b"), ("assistant", "c")), "all")


def test_without_a_template_a_conversation_is_a_prompt_and_its_response(loaded: Any) -> None:
    family, bundle = loaded(None)
    found = family.conversation(bundle, said(("user", "xy"), ("assistant", "cd")), "all")
    assert bundle.processors["tokenizer"].decode(found.tokens) == "xycd<|im_end|>"
    assert found.trained == [False, False, True, True, True]
    for conversation in (TWO_TURNS, said(("system", "a"), ("user", "b"), ("assistant", "c"))):
        with pytest.raises(ValueError, match="a conversation is a prompt and its response, got the turns"):
            family.conversation(bundle, conversation, "all")


def test_fields_beside_the_content_reach_the_template(loaded: Any) -> None:
    family, bundle = loaded(CHATML.replace("m.content", "(m.name or '') + (m.content or '')"))
    called = (Message("user", ("a",)), Message("assistant", (), {"name": "add(1)"}), Message("tool", ("2",)))
    found = family.conversation(bundle, (*called, Message("assistant", ("two",))), "all")
    assert learnt(bundle, found) == ["add(1)<|im_end|>", "two<|im_end|>"]


def test_a_conversation_whose_prompt_no_rollout_would_take_is_refused(loaded: Any) -> None:
    pair = said(("user", "hello"), ("assistant", "hi"))
    for written, tokens in ((None, 5), (CHATML, 24)):
        family, bundle = loaded(written, max_prompt_tokens=tokens)
        assert family.conversation(bundle, pair, "all").prompt == tokens
        family, bundle = loaded(written, max_prompt_tokens=tokens - 1)
        with pytest.raises(ValueError, match=f"'hello' has {tokens} tokens, more than max_prompt_tokens={tokens - 1}"):
            family.conversation(bundle, pair, "all")


def test_pictures_are_refused_by_a_model_that_does_not_see_them(loaded: Any) -> None:
    family, bundle = loaded(CHATML)
    with pytest.raises(ValueError, match="has pictures, which a CausalLM does not see"):
        family.conversation(bundle, (Message("user", ("what?", Path("a.png"))), *said(("assistant", "b"))), "all")


def test_the_small_model_learns_the_response_and_its_end() -> None:
    family = TinyLM(layers=1, width=16, heads=2, characters="ab:")
    bundle = family.load(CPU, torch.float32)
    found = family.conversation(bundle, said(("user", "ab:"), ("assistant", "ba")), "all")
    assert (found.tokens, found.trained) == ([0, 1, 2, 1, 0, 3], [False, False, False, True, True, True])
    assert found.tokens[: found.prompt] == family.tokenize(bundle, Media(texts=["ab:"])).tokens.tolist()
    refused = partial(family.conversation, bundle, turns="all")
    with pytest.raises(ValueError, match=r"the conversation 'ab:c' must be of the characters 'ab:', it has \['c'\]"):
        refused(said(("user", "ab:"), ("assistant", "c")))
    with pytest.raises(ValueError, match="the prompt is empty: a response needs a character to start from"):
        refused(said(("user", ""), ("assistant", "a")))


def test_only_what_follows_the_last_end_token_of_a_stretch_is_left_out() -> None:
    tokens, ends = [1, 9, 2, 9, 3, 1, 4, 5, 9], frozenset({9})
    trained = [False, True, True, True, True, False, True, True, False]
    assert up_to_end_tokens(tokens, trained, ends) == [False, True, True, True, False, False, True, True, False]
    assert up_to_end_tokens(tokens, trained, frozenset()) == trained


def test_trained_tokens_know_their_prompt_and_their_length_and_refuse_what_cannot_be_learnt() -> None:
    found = TrainedTokens([1, 2, 3, 4], [False, True, True, False])
    assert (found.prompt, found.length) == (1, 3)
    with pytest.raises(ValueError, match="no token of the conversation is the assistant's"):
        TrainedTokens([1, 2], [False, False])
    with pytest.raises(ValueError, match="opens with the assistant"):
        TrainedTokens([1, 2], [True, False])
    with pytest.raises(ValueError, match="2 tokens and 1 flags"):
        TrainedTokens([1, 2], [True])
