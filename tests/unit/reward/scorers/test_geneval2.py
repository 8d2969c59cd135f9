"""GenEval 2 and VQAScore: the probabilities of answers are those that transformers' own model gives, three ways."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.reward.samples import cause, entry, generated, service
from tests.unit.reward.scorers.vision import NAMES, Own, noise, write_model
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.geneval2 import GenEval2, answer_forms, geometric_mean
from unirl.reward.scorers.vqa_score import VQAScore

QUESTIONS = [
    ["How many cats are in the image?", "two"],
    ["Is the cat on the left of the very large red box?", "Yes"],
    ["Are there any cats in the image?", "Yes"],
]
PICTURE = noise(60, 90)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    own: Own
    geneval2: GenEval2
    vqa_score: VQAScore


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param)
    settings: Any = {"checkpoint": str(folder), "dtype": "float32", "device": "cpu"}
    return Checkpoint(Own(folder), GenEval2(**settings), VQAScore(**settings))


def asked(picture: np.ndarray = PICTURE, questions: Any = QUESTIONS) -> ScorerInput:
    return entry(picture, "two cats", vqa_list=questions)


# --- the formula ---


def test_the_means_of_the_documents_example():
    atoms = [0.9, 0.8, 0.99, 0.5]
    assert GenEval2(checkpoint="random:qwen3_vl").combined(atoms) == pytest.approx(0.7975)
    assert geometric_mean(atoms) == pytest.approx(0.7726530, abs=2e-7)
    assert geometric_mean([*atoms, 0.01]) == pytest.approx(0.3238825, abs=1e-7)
    assert geometric_mean([0.9, 0.0]) == 0.0


def test_the_spellings_of_answers():
    assert answer_forms("Yes") == ("Yes", "yes", " yes", " Yes")
    assert answer_forms("two") == ("two", "Two", " two", " Two", "2", " 2")
    assert answer_forms("ten")[-2:] == ("10", " 10")
    for other in ("No", "yes", "2", "eleven", "zero", ""):
        with pytest.raises(ValueError, match=f"got '{other}'"):
            answer_forms(other)


# --- three ways ---


def rights(own: Own, answer: str) -> list[int]:
    """The first tokens of the spellings, written out."""
    vocabulary = own.tokenizer.get_vocab()
    words = {"Yes": ["Yes", "yes", "Ġyes", "ĠYes"], "two": ["two", "Two", "Ġtwo", "ĠTwo", "2", "Ġ"]}[answer]
    return [vocabulary[word] for word in words]


def test_the_probabilities_of_answers_are_those_of_generate_and_of_a_padded_batch_in_float64(checkpoint):
    (atoms,) = checkpoint.geneval2.probabilities([asked()])
    texts = [f"{text} Answer in one word." for text, _ in QUESTIONS]
    padded = checkpoint.own.padded(PICTURE, texts)
    for atom, text, (_, answer), row in zip(atoms, texts, QUESTIONS, padded, strict=True):
        right = rights(checkpoint.own, answer)
        assert atom == pytest.approx(float(row[right].sum()), abs=1e-6)
        assert atom == pytest.approx(float(checkpoint.own.generated(PICTURE, text)[right].sum()), abs=1e-6)
    assert len({round(atom, 5) for atom in atoms}) == 3


def test_the_score_is_their_mean(checkpoint):
    (atoms,) = checkpoint.geneval2.probabilities([asked()])
    assert checkpoint.geneval2.score([asked()]) == [pytest.approx(sum(atoms) / 3)]
    assert dataclasses.replace(checkpoint.geneval2, mean="geometric").score([asked()]) == [
        pytest.approx(math.prod(atoms) ** (1 / 3))
    ]


@pytest.mark.parametrize(
    ("wording", "text", "words"),
    [
        ("t2v_metrics", 'Does this figure show "two cats"? Please answer Yes or No.', ["Yes"]),
        (
            "geneval2",
            'Does this image show "two cats"? Answer the question with Yes or No.',
            ["Yes", "yes", "Ġyes", "ĠYes"],
        ),
    ],
)
def test_vqa_score_is_the_probability_of_yes_after_its_wording(checkpoint, wording, text, words):
    (score,) = dataclasses.replace(checkpoint.vqa_score, wording=wording).score([entry(PICTURE, "two cats")])
    right = [checkpoint.own.tokenizer.get_vocab()[word] for word in words]
    assert score == pytest.approx(float(checkpoint.own.generated(PICTURE, text)[right].sum()), abs=1e-6)
    assert score == pytest.approx(float(checkpoint.own.padded(PICTURE, [text])[0, right].sum()), abs=1e-6)


# --- once for all questions, and independent of the batch ---


def test_a_picture_and_what_its_questions_share_go_through_the_model_once(checkpoint):
    scorer = checkpoint.geneval2
    loaded = scorer.load(torch.device("cpu"), torch.float32)
    model = loaded.bundle.transformer
    towers, tokens = list[int](), list[int]()
    model.base_model.visual.register_forward_hook(lambda _m, given, _o: towers.append(len(given[0])))
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _o: tokens.append(given[0].numel()))
    same = [["Is it a cat?", "Yes"], ["Is it a dog?", "Yes"], ["Is it a bird?", "Yes"]]
    with torch.no_grad():
        scorer.judge(loaded, [asked(questions=same)])
    texts = [f"{text} Answer in one word." for text, _ in same]
    rows = [checkpoint.own.inputs(PICTURE, text)["input_ids"][0].tolist() for text in texts]
    columns = enumerate(zip(*rows, strict=False))
    shared = next(column for column, tokens_of_rows in columns if len(set(tokens_of_rows)) > 1)
    assert towers == [len(checkpoint.own.inputs(PICTURE, "")["pixel_values"])]
    assert tokens == [shared + sum(len(row) - shared for row in rows)]
    assert checkpoint.own.tokenizer.decode(rows[0][:shared]).endswith("<|vision_end|>Is it a ")


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_score_does_not_depend_on_the_batch(checkpoint, batch_size):
    samples = [
        asked(),
        asked(noise(40, 120, seed=1), QUESTIONS[:1]),
        asked(noise(100, 30, seed=2), QUESTIONS[1:]),
        asked(np.full((64, 64, 3), 128, np.uint8)),
        asked(noise(1, 1), QUESTIONS[::-1]),
    ]
    alone = [checkpoint.geneval2.score([sample])[0] for sample in samples]
    assert all(math.isfinite(score) and 0 < score < 1 for score in alone)
    assert dataclasses.replace(checkpoint.geneval2, batch_size=batch_size).score(samples) == pytest.approx(
        alone, abs=1e-6
    )


def test_bfloat16_is_near_float32(checkpoint):
    half = dataclasses.replace(checkpoint.geneval2, dtype="bfloat16")
    (rough,), (fine,) = half.probabilities([asked()]), checkpoint.geneval2.probabilities([asked()])
    assert rough == pytest.approx(fine, rel=0.1)


def test_other_prompts_and_pictures_score_differently(checkpoint):
    samples = [entry(picture, prompt) for picture in (PICTURE, noise(60, 90, seed=3)) for prompt in ("a cat", "")]
    scores = checkpoint.vqa_score.score([*samples, entry(PICTURE, "ein Kätzchen 猫 😀")])
    assert len({round(score, 6) for score in scores}) == 5


# --- what cannot be asked ---


def test_a_prompt_without_questions_is_invalid_by_name_and_costs_the_others_nothing(checkpoint):
    scores = checkpoint.geneval2.score([asked(), asked(questions=[]), entry(PICTURE, "a dog"), asked()])
    assert scores[0] == scores[3] == pytest.approx(checkpoint.geneval2.score([asked()])[0], abs=1e-6)
    assert cause(scores[1]) == "the prompt 'two cats' has no questions in metadata['vqa_list']"
    assert "metadata has no 'vqa_list'" in cause(scores[2])
    assert checkpoint.geneval2.probabilities([asked(questions=[])]) == [[]]


@pytest.mark.parametrize(
    ("questions", "why"),
    [
        ("Is it?", "has no questions"),
        ([["Is it?"]], r"must read [question, answer], both text, got ['Is it?']"),
        ([["How many?", 2]], "both text, got ['How many?', 2]"),
        ([["How many?", "eleven"]], "must be Yes or one of one, two"),
        ([["Is <|image_pad|> there?", "Yes"]], "leave <|image_pad|> out of texts"),
        ([["Is it? " * 400, "Yes"]], "tokens, the model reads"),
    ],
)
def test_questions_that_cannot_be_asked_are_invalid_and_tell_why(checkpoint, questions, why):
    assert why in cause(checkpoint.geneval2.score([asked(questions=questions)])[0])


def test_a_picture_too_narrow_for_the_model_or_none_is_invalid(checkpoint):
    narrow, none = checkpoint.geneval2.score([asked(noise(1, 300)), entry(None, "p", vqa_list=QUESTIONS)])
    assert "aspect ratio" in cause(narrow)
    assert "holds no picture" in cause(none)


def test_the_version_follows_the_weights(checkpoint, tmp_path):
    same = dataclasses.replace(checkpoint.vqa_score)
    other = dataclasses.replace(same, checkpoint=str(write_model(tmp_path, "qwen3_vl", seed=1)))
    assert checkpoint.vqa_score.version() == same.version() != other.version()
    assert same.version().endswith("/pil-mrope-..px-float32-t2v_metrics")
    scaled = dataclasses.replace(checkpoint.geneval2, max_pixels=4096, mean="geometric")
    assert scaled.variant == "pil-mrope-..4096px-float32-geometric"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GenEval2(checkpoint="nowhere"), "neither a folder nor a hub id"),
        (lambda: GenEval2(checkpoint="random:sd3"), "this family is Qwen2_5_VLForConditionalGeneration or"),
        (lambda: GenEval2(mean="median"), "mean must be arithmetic or geometric, got 'median'"),  # pyright: ignore[reportArgumentType]
        (lambda: VQAScore(wording="own"), "wording must be t2v_metrics or geneval2, got 'own'"),  # pyright: ignore[reportArgumentType]
        (lambda: VQAScore(min_pixels=9, max_pixels=4), "min_pixels=9 is more than max_pixels=4"),
        (lambda: VQAScore(batch_size=0), "batch_size must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_loads(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_through_the_service_an_unasked_prompt_is_invalid_not_0(checkpoint):
    rows = [{"vqa_list": QUESTIONS}, {"vqa_list": []}]
    scores = service(0.5, g=checkpoint.geneval2).score(generated(["two cats", "a dog"], metadata=rows))
    assert scores.valid.tolist() == [True, False]
    assert scores.causes[1] == "g: r0.p1/0: the prompt 'a dog' has no questions in metadata['vqa_list']"
