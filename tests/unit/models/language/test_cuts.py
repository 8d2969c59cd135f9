"""Where a prompt ends and its response begins, in tokens: what SFT reads is what a rollout writes from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.byte_language import BEGIN, END
from tests.byte_language import tokenizer as byte_tokenizer
from unirl.models.language.chat import plain_prompt, plain_tokens
from unirl.types.conversation import Message


def bytes_of(*, regex: bool = False, trimmed: bool = False) -> Any:
    """Bytes, with tokens of two line breaks and of a blank with a digit. regex: cut into words as under GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    merges = [("Ġ", "4"), ("Ċ", "Ċ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "Ġ4", "ĊĊ", END])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def blanks_first(scheme: str) -> Any:
    """As under SentencePiece: a blank before the start of a text; "1234" is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    merges = [("▁", "1"), ("▁1", "2"), ("3", "4"), ("▁12", "34")]
    joined = ["".join(pair) for pair in merges]
    words = ["<unk>", BEGIN, END, "▁", *"0123456789", *joined]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BEGIN, eos_token=END, unk_token="<unk>")


def closing() -> Any:
    """Bytes, with a begin token before each text and an end token behind it; "ab" is one token."""
    from tokenizers import processors

    made = byte_tokenizer(None)
    special = [(name, made.convert_tokens_to_ids(name)) for name in (BEGIN, END)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A {END}", None, special)
    return made


TOKENIZERS = {
    "words": bytes_of(regex=True),
    "trimmed": bytes_of(trimmed=True),
    "blank": blanks_first("always"),
    "first": blanks_first("first"),
    "closing": closing(),
}


@pytest.mark.parametrize(
    ("name", "prompt", "response", "asked", "learnt"),
    [
        # Of "?\n\nF" GPT-2's words are "?", "\n" and "\n": it looks ahead at the response.
        ("words", "2?\n\n", "Four", ["2", "?", "ĊĊ"], ["F", "o", "u", "r", END]),
        ("words", "2?\n", "\nF", ["2", "?", "Ċ"], ["Ċ", "F", END]),
        ("words", "2?", " 4", ["2", "?"], ["Ġ4", END]),
        ("trimmed", "2= ", "4", ["2", "=", "Ġ"], ["4", END]),
        ("blank", "12", "34", [BEGIN, "▁12"], ["34", END]),
        ("first", "12", "34", [BEGIN, "▁12"], ["34", END]),
        ("first", "12", "5", [BEGIN, "▁12"], ["5", END]),
        ("first", "2 ", "12", [BEGIN, "▁", "2", "▁"], ["1", "2", END]),
        ("blank", "12", " 12", [BEGIN, "▁12"], ["▁12", END]),
        ("closing", "xx", "yy", [BEGIN, "x", "x"], ["y", "y", END]),
        ("closing", "xa", "by", [BEGIN, "x", "a"], ["b", "y", END]),
        ("closing", "x", f"y{END}", [BEGIN, "x"], ["y", END]),
        ("closing", f"x{END}", "", [BEGIN, "x", END], [END]),
        ("closing", "", "y", [BEGIN], ["y", END]),
    ],
)
def test_the_prompt_is_what_a_rollout_reads_and_its_response_ends_once(
    name: str, prompt: str, response: str, asked: list[str], learnt: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    messages = (Message("user", (prompt,)), Message("assistant", (response,)))
    found = plain_tokens(tokenizer, messages, tokenizer.eos_token_id)
    assert tokenizer.convert_ids_to_tokens(plain_prompt(tokenizer, prompt)) == asked
    assert tokenizer.convert_ids_to_tokens(found.tokens) == [*asked, *learnt]
    assert found.trained == [False] * len(asked) + [True] * len(learnt)
    written = tokenizer.decode(found.tokens, skip_special_tokens=True)
    assert written == f"{prompt}{response}".replace(END, "")


def test_a_response_that_no_tokens_spell_behind_its_prompt_is_refused_with_what_helps() -> None:
    """Words that are told apart by blanks alone: of "12" and "34" a model makes "12 34"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "12": 1, "34": 2, END: 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"no tokens for '34' behind a prompt that ends in '12'.*end the prompt"):
        plain_tokens(tokenizer, (Message("user", ("12",)), Message("assistant", ("34",))), 3)
    apart = plain_tokens(tokenizer, (Message("user", ("12 ",)), Message("assistant", ("34",))), 3)
    assert (apart.tokens, apart.trained) == ([1, 2, 3], [False, True, True])
