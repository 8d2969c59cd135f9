from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.unit.reward.samples import entry
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.ocr import OcrEditSimilarity, levenshtein, quoted_text, text_lines, text_score

LONG_JUNK = "lorem ipsum dolor sit amet " * 20


@pytest.mark.parametrize(
    ("read", "substring", "edit", "exact", "precision"),
    [
        ("Hello World", 1.0, 1.0, 1.0, 1.0),
        ("HELLO WORLD!!!! buy now", 1.0, 0.0, 0.0, 0.5),
        ("Helo Wrld", 0.8, 0.8, 0.0, 0.8),
        ("Hello\nWorld", 0.9, 0.9, 0.0, 10 / 11),
        ("hello world!", 1.0, 0.9, 0.0, 10 / 11),
        ("", 0.0, 0.0, 0.0, 0.0),
        (LONG_JUNK, 0.0, 0.0, 0.0, pytest.approx(8 / 440, abs=1e-9)),
    ],
)
def test_golden_table_for_hello_world(read, substring, edit, exact, precision):
    assert text_score("Hello World", read, "substring") == substring
    assert text_score("Hello World", read, "edit") == edit
    assert text_score("Hello World", read, "exact") == exact
    assert text_score("Hello World", read, "precision") == precision


def test_case_spaces_and_the_form_of_accents_do_not_count():
    assert text_score("Café Noir", "CAFE\u0301NOIR", "exact") == 1.0


def test_levenshtein_of_known_pairs():
    assert levenshtein("kitten", "sitting") == 3
    assert levenshtein("", "abc") == 3
    assert levenshtein("flaw", "lawn") == 2


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says “OPEN”", "OPEN"),
        ("ein Schild „OFFEN“", "OFFEN"),
        ('"first" and "second"', "first"),
        ("it's a dog's 'life'", None),
        ("no quotes", None),
        ('an open "quote', None),
        ('""', None),
        ('" "', None),
    ],
)
def test_the_target_is_what_stands_in_the_first_double_quotes(prompt, target):
    assert quoted_text(prompt) == target


def draw(text: str, size: tuple[int, int], height: int, ink=(0, 0, 0), ground=(255, 255, 255), at=(6, 4)) -> np.ndarray:
    picture = Image.new("RGB", size, ground)
    ImageDraw.Draw(picture).text(at, text, font=ImageFont.load_default(height), fill=ink)
    return np.asarray(picture)


@pytest.fixture(scope="module")
def lines():
    return OcrEditSimilarity()


@pytest.mark.parametrize(
    ("text", "picture"),
    [
        ("Hello World", draw("Hello World", (160, 32), 22)),
        ("Hello World", draw("Hello World", (80, 16), 11)),
        ("Hello World", draw("Hello World", (128, 128), 20, at=(6, 50))),
        ("Hello World", draw("Hello\nWorld", (512, 512), 60, at=(60, 150))),
        ("STOP", draw("STOP", (64, 32), 20, ink=(255, 255, 255), ground=(200, 0, 0))),
        ("A7", draw("A7", (24, 24), 14, at=(3, 3))),
        ("CAT", draw("CAT", (32, 12), 8, at=(2, 1))),
        ("Jim is in", draw("Jim is in", (128, 32), 22)),
    ],
    ids=["line", "small", "square", "two lines", "white on red", "24 pixels", "12 pixels", "dots"],
)
def test_drawn_text_is_read(lines, text, picture):
    assert text_score(text, lines.read(picture), "exact") == 1.0


def test_the_scene_layout_finds_text_on_a_busy_ground():
    rng = np.random.default_rng(0)
    ramp = np.linspace(60, 220, 384)[None, :, None] + rng.normal(0, 6, (384, 384, 3))
    picture = Image.fromarray(ramp.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    pen.rectangle([100, 140, 300, 230], fill=(240, 240, 230))
    pen.text((120, 150), "OPEN", font=ImageFont.load_default(56), fill=(20, 20, 90))
    sample = entry(np.asarray(picture), 'a door with a sign that says "open"')
    assert OcrEditSimilarity(layout="scene").score([sample]) == [1.0]


def test_scores_follow_the_rule(lines):
    sample = entry(draw("HELLO WORLD NOW", (256, 40), 24), 'says "Hello World"')
    assert lines.score([sample]) == [1.0]
    assert OcrEditSimilarity("precision").score([sample]) == [pytest.approx(10 / 13)]
    assert OcrEditSimilarity("exact").score([sample]) == [0.0]


def test_every_fourth_frame_of_a_video_counts(lines):
    shown, blank = draw("STOP", (96, 40), 24), np.full((40, 96, 3), 255, np.uint8)
    video = np.stack([shown, blank, blank, blank, shown, blank, blank, blank, blank])
    sample = ScorerInput(id="r0.p0/0", prompt='says "STOP"', video=video)
    assert lines.score([sample]) == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scores_do_not_depend_on_the_batch_and_stay_in_order(lines, batch):
    words = ["ALPHA", "BRAVO", "CHARLIE", "DELTA", "ECHO"]
    samples = [
        entry(draw(w, (40 + 20 * len(w), 40), 24), f'the word "{word}"') for w, word in zip(words, words, strict=True)
    ]
    samples[3] = entry(samples[0].picture, 'the word "DELTA"')
    scored = [v for i in range(0, 5, batch) for v in lines.score(samples[i : i + batch])]
    assert scored == [1.0, 1.0, 1.0, 1 - levenshtein("alpha", "delta") / 5, 1.0]


def test_an_unquoted_prompt_has_no_score_and_the_others_have_theirs(lines):
    picture = draw("STOP", (96, 40), 24)
    scored = lines.score([entry(picture, "a sign"), entry(picture, 'says "STOP"')])
    assert math.isnan(scored[0])
    assert scored[1] == 1.0


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((1, 1, 3), np.uint8),
        np.full((64, 64, 3), 128, np.uint8),
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8),
    ],
    ids=["one pixel", "grey", "noise"],
)
@pytest.mark.parametrize("layout", ["lines", "scene"])
def test_a_picture_without_text_scores_a_real_0(picture, layout):
    assert OcrEditSimilarity(layout=layout).score([entry(picture, 'says "Hello"')]) == [0.0]


def test_lines_are_cut_scaled_and_padded_with_the_ground():
    picture = np.full((40, 60, 3), 200, np.uint8)
    picture[5:15, 10:50] = 0
    picture[25:35, 10:20] = 0
    first, second = text_lines(picture)
    assert first.shape == (48, 4 * 34 + 48, 3)
    assert second.shape == (48, 34 + 48, 3)
    assert (first[:7] == 200).all()
    assert (first[20, 30:-30] == 0).all()


def test_a_low_run_of_rows_belongs_to_the_nearest_line():
    picture = np.full((60, 60, 3), 255, np.uint8)
    picture[5:8, 10:14] = 0  # the dot of an i
    picture[10:26, 10:14] = 0
    picture[36:52, 10:40] = 0
    assert len(text_lines(picture)) == 2


def test_a_missing_package_is_named_at_construction(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rapidocr" else found(name))
    with pytest.raises(ValueError, match=r"needs rapidocr, which is not installed: pip install 'unirl\[ocr\]'"):
        OcrEditSimilarity()
