"""SmolLM2-135M: the weights out of the package, the words of transformers, and what reinforcement teaches it.

`make test-slow` installs the package; see docs/language.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.data.prompts import PromptRow, as_roots
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.ar_stage import ARStage
from unirl.models.language.causal_lm import CausalLM
from unirl.models.language.chat import plain_prompt, plain_tokens
from unirl.models.language.packaged import PACKAGES, from_package
from unirl.observability.metrics import read
from unirl.types.conversation import Message
from unirl.types.sample import Sample
from unirl.types.sampling import ARSamplingParams

pytestmark = pytest.mark.slow

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Hi!")


def test_the_unpacked_weights_are_those_of_the_package_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = PACKAGES[HUB_ID]
    spec = importlib.util.find_spec(package.module)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(from_package(HUB_ID))
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert from_package(HUB_ID) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "the second call finds the first one's work"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    given: Any = AutoModelForCausalLM.from_pretrained(Path(spec.origin).parent, gguf_file=package.file, dtype="float32")
    unpacked: Any = AutoModelForCausalLM.from_pretrained(folder)
    expected = given.state_dict()
    assert {name: tensor.dtype for name, tensor in unpacked.state_dict().items()} == dict.fromkeys(
        expected, torch.float32
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in unpacked.state_dict().items())


def test_greedy_answers_are_those_of_transformers_token_by_token_and_name_paris() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family = CausalLM(checkpoint=HUB_ID)
    pipeline = ARPipeline(ARStage(family, family.load(torch.device("cpu"), torch.float32), torch.float32))
    request = Sample((as_roots([PromptRow(question) for question in QUESTIONS], 0),))
    part = pipeline(request.fork(1, ARSamplingParams(max_new_tokens=24, temperature=0.0)), version=0).frontier
    assert part.media is not None
    assert part.media.texts is not None
    assert "Paris" in part.media.texts[0]

    model: Any = AutoModelForCausalLM.from_pretrained(from_package(HUB_ID))
    tokenizer: Any = AutoTokenizer.from_pretrained(from_package(HUB_ID))
    segment: Any = part.segment
    for question, tokens in zip(QUESTIONS, segment.tokens.split(segment.lengths.tolist()), strict=True):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokens.tolist() == written.tolist()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_most_questions_never_trained_on_are_answered_right_and_in_one_word(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unirl.cli", "train", "ar/smollm2_words", f"run.output={tmp_path}"]
    subprocess.run([*command, f"run.seed={seed}"], check=True, timeout=1700, stderr=subprocess.DEVNULL)
    evaluations = [line for line in read(tmp_path / "smollm2_words" / "metrics.jsonl") if "eval/reward" in line]
    before, after = evaluations[0], evaluations[-1]
    # A success is a text that is the right word and nothing else.
    assert before["eval/pass@1"] < 0.05
    assert after["eval/pass@1"] > 0.6
    assert after["eval/reward"] - before["eval/reward"] > 1.1


@pytest.mark.parametrize(
    ("prompt", "response", "last"),
    [("Question: 2+2?\n\n", "Four", ["?", "ĊĊ"]), ("Q: 2+2?\n\nA:  ", "4", [":", "ĠĠ"])],
)
def test_the_prompt_of_supervision_is_that_of_a_rollout_where_words_look_ahead(
    prompt: str, response: str, last: list[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(from_package(HUB_ID))
    messages = (Message("user", (prompt,)), Message("assistant", (response,)))
    found = plain_tokens(tokenizer, messages, tokenizer.eos_token_id)
    assert found.tokens[: found.prompt] == plain_prompt(tokenizer, prompt)
    assert tokenizer.convert_ids_to_tokens(found.tokens[: found.prompt])[-2:] == last
    assert tokenizer.decode(found.tokens) == f"{prompt}{response}<|im_end|>"
