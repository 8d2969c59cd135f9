"""Judges that are sent pictures: what is sent, to the pixel, and which replies are numbers."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.reward.samples import cause, entry, generated, service
from tests.unit.reward.scorers.judge_server import Reply, serving
from tests.unit.reward.scorers.vision import noise
from unirl.reward.chat import Chat
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.judge import Judge, spread
from unirl.reward.scorers.unified_reward import UnifiedReward

# The example of the authors' own script for release 2.0.
OFFICIAL = """Alignment Score (1-5): 2.694700002670288
Coherence Score (1-5): 2.371500015258789
Style Score (1-5): 2.802500009536743
"""


def chat(url: str) -> Chat:
    return Chat(url, "tiny", pause=0.01, seconds_per_try=5.0, seconds_in_all=20.0)


def pixels(part: dict[str, Any]) -> np.ndarray:
    """Of what was sent."""
    head, data = part["image_url"]["url"].split(",")
    assert (part["type"], head) == ("image_url", "data:image/png;base64")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def rated(reply: str, **settings: Any) -> float:
    with serving(lambda _m, _b: Reply(reply)) as server:
        (score,) = UnifiedReward(chat(server.url), **settings).score([entry(noise(8, 6), "a cat")])
    return score


# --- a judge with pictures ---


def test_the_picture_comes_before_the_message_and_every_level_is_kept():
    picture = noise(9, 7)
    with serving(lambda _m, _b: Reply("Score: 3")) as server:
        scorer = Judge(chat(server.url), template='Rate "{prompt}"', frames=1)
        assert scorer.score([entry(picture, "ein Kätzchen 猫 {text}")]) == [3.0]
    image, text = server.requests[0]["messages"][0]["content"]
    assert np.array_equal(pixels(image), picture)
    assert text == {"type": "text", "text": 'Rate "ein Kätzchen 猫 {text}"'}


def test_a_grey_picture_and_one_of_a_pixel_are_sent_as_they_are():
    samples = [entry(np.full((5, 5, 3), 128, np.uint8), "a"), entry(noise(1, 1), "b")]
    with serving(lambda message, _: Reply(f"Score: {len(message)}")) as server:
        assert Judge(chat(server.url), template="{prompt}", frames=2).score(samples) == [1.0, 1.0]
    sent = {pixels(request["messages"][0]["content"][0]).shape for request in server.requests}
    assert sent == {(5, 5, 3), (1, 1, 3)}


def test_frames_of_a_video_are_spread_from_its_first_to_its_last():
    video = np.arange(9, dtype=np.uint8)[:, None, None, None] * np.ones((4, 4, 3), np.uint8)
    sample = ScorerInput(id="r0.p0/0", prompt="p", video=video, fps=8.0)
    with serving(lambda _m, _b: Reply("Score: 3")) as server:
        Judge(chat(server.url), template="{prompt}", frames=3).score([sample])
    *images, _ = server.requests[0]["messages"][0]["content"]
    assert [int(pixels(image)[0, 0, 0]) for image in images] == [0, 4, 8]
    assert [int(frame[0, 0, 0]) for frame in spread(video, 1)] == [4]
    assert len(spread(video, 20)) == 9


def test_a_sample_without_a_picture_is_an_error_by_name():
    with pytest.raises(ValueError, match=r"r0\.p0/0 holds no picture"):
        Judge(Chat("http://127.0.0.1/v1", "m"), template="{prompt}", frames=1).score([entry(None, "a")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames": 1}, "the template of a judge that is sent pictures must be given"),
        ({"frames": -1, "template": "{text}"}, "frames must be at least 0, got -1"),
        ({"template": "{prompt}"}, "template must hold {text}"),
    ],
)
def test_a_judge_that_cannot_see_what_it_judges_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Judge(Chat("http://127.0.0.1/v1", "m"), **settings)


# --- UnifiedReward ---


def test_the_official_example_is_read():
    assert rated(OFFICIAL) == pytest.approx((2.694700002670288 + 2.371500015258789 + 2.802500009536743) / 3)
    assert rated(OFFICIAL, output="alignment") == 2.694700002670288
    assert rated(OFFICIAL, output="coherence") == 2.371500015258789
    assert rated(OFFICIAL, output="style") == 2.802500009536743


def test_the_formats_of_earlier_releases_are_read():
    words = '---\n\nWord-wise Scores: [["cat", 0.51], ["[No_mistakes]", 3.2]]\n\n'
    assert rated(words + OFFICIAL, release="1.5", output="style") == 2.802500009536743
    assert rated("cat (object): 1\nred (attribute): 0\nFinal Score: 3.5", release="1.0") == 3.5
    assert rated("**Final Score:** 4\n", release="1.0") == 4.0


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "no number in the reply: ''"),
        ("Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z", "no number"),
        ("(1-5)", "no number"),
        ("1, 5, 4", "no number"),
        (OFFICIAL.replace("Style", "Beauty"), "no number"),
        (OFFICIAL.replace("2.37", "NaN"), "no number"),
        (OFFICIAL.replace("2.802500009536743", "3-4"), "no number"),
        (OFFICIAL.replace("2.802500009536743", "7"), "7 is out of range"),
        (OFFICIAL.replace("2.802500009536743", "0"), "0 is out of range"),
        (OFFICIAL + "Style Score (1-5): 4", "different numbers in one reply"),
        ("as asked: Final Score: 3", "no number"),
    ],
)
def test_a_reply_without_all_ratings_in_range_is_invalid_and_tells_why(reply, why):
    assert why in cause(rated(reply))


def test_a_long_reply_of_blanks_is_read_to_its_end():
    assert "no number" in cause(rated("\n *" * 200_000))


def test_the_model_is_asked_in_its_own_words():
    with serving(lambda _m, _b: Reply(OFFICIAL)) as server:
        UnifiedReward(chat(server.url)).score([entry(noise(8, 6), "a [red] cat {prompt}")])
    _, part = server.requests[0]["messages"][0]["content"]
    lines = part["text"].split("\n")
    assert lines[1] == "Provide overall assessments for the image along the following axes (each rated from 1 to 5):"
    assert lines[-6:] == [
        "Alignment Score (1-5): X",
        "Coherence Score (1-5): Y",
        "Style Score (1-5): Z",
        "",
        "Your task is provided as follows:",
        "Text Caption: [a [red] cat {prompt}]",
    ]
    assert server.requests[0]["temperature"] == 0


@pytest.mark.parametrize("release", ["1.0", "1.5", "2.0"])
def test_each_release_is_asked_otherwise_and_swapped_prompts_are_told_apart(release):
    scorer = UnifiedReward(Chat("http://127.0.0.1/v1", "m"), release=release)
    others = {UnifiedReward(scorer.chat, release=other).message("a") for other in ("1.0", "1.5", "2.0")}
    assert len(others) == 3
    assert scorer.message("a").endswith("Text Caption: [a]")
    assert scorer.message("") != scorer.message("a")


def test_a_failed_rating_is_invalid_not_0_among_good_ones():
    def script(message: str, _: int) -> Reply:
        return Reply(OFFICIAL) if "prompt good" in message else Reply("no", status=400)

    with serving(script) as server:
        scores = service(0.5, u=UnifiedReward(chat(server.url))).score(generated(["prompt good", "prompt bad"]))
    assert scores.valid.tolist() == [True, False]
    assert scores.total[0] == pytest.approx(2.6229, abs=1e-4)
    assert scores.causes[1].startswith(f"u: r0.p1/0: {server.url}: status 400")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"release": "3"}, "release must be 1.0, 1.5 or 2.0 in quotes, got '3'"),
        ({"output": "beauty"}, "output must be mean, alignment, coherence or style, got 'beauty'"),
        ({"release": "1.0", "output": "style"}, "release 1.0 gives one final score and no style"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        UnifiedReward(Chat("http://127.0.0.1/v1", "m"), **settings)
