"""A judge over HTTP: what may pass is asked again, what fails is invalid with its cause (FIELD_FAULTS 93, 95)."""

from __future__ import annotations

import email.utils
import math
import random
import socket
import time
from typing import Any

import pytest

from tests.unit.reward.samples import accepted, answered, cause, service, wrote
from tests.unit.reward.scorers.judge_server import Reply, serving
from unirl.config.load import dump
from unirl.reward.chat import Chat
from unirl.reward.scorers.judge import Judge
from unirl.reward.service import RewardConfig, WeightedScorer

TEMPLATE = "{text}"


def judge(url: str, template: str = TEMPLATE, chat: dict[str, Any] | None = None, **settings: Any) -> Judge:
    fast = {"pause": 0.01, "seconds_per_try": 5.0, "seconds_in_all": 20.0, **(chat or {})}
    return Judge(Chat(url, "tiny", **fast), template=template, **settings)


def test_a_number_in_the_reply_is_the_score_and_a_real_0_is_kept():
    with serving(lambda message, _: Reply(f"Fine.\nScore: {message}")) as server:
        scores = service(r=judge(server.url)).score(answered(["7", "0", "3.5"]))
    assert scores.total.tolist() == [7.0, 0.0, 3.5]
    assert scores.valid.all()


def test_500_twice_then_a_reply_takes_three_requests():
    with serving(lambda _, before: Reply("Score: 4", status=500 if before < 2 else 200)) as server:
        assert judge(server.url).score([wrote("a")]) == [4.0]
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_passing_failure_is_tried_so_often_and_no_more(status):
    with serving(lambda _m, _b: Reply("busy", status=status)) as server:
        (score,) = judge(server.url, chat={"tries": 3}).score([wrote("a")])
        assert len(server.requests) == 3
    assert math.isnan(score)
    assert cause(score).startswith(f"{server.url}: status {status}: ")
    assert cause(score).endswith("(try 3 of 3)")


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_any_other_status_is_not_tried_again_and_its_body_is_told(status):
    with serving(lambda _m, _b: Reply(status=status, body=b'{"error": "no model tiny"}')) as server:
        (score,) = judge(server.url).score([wrote("a")])
        assert len(server.requests) == 1
    assert cause(score) == f'{server.url}: status {status}: \'{{"error": "no model tiny"}}\' (try 1 of 4)'


def test_a_connection_that_is_reset_is_tried_again():
    with serving(lambda _, before: Reply("Score: 5", reset=before == 0)) as server:
        assert judge(server.url).score([wrote("a")]) == [5.0]
        assert len(server.requests) == 2


def test_nobody_listening_is_invalid_and_names_the_endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        (score,) = judge(url, chat={"tries": 2}).score([wrote("a")])
    assert cause(score).startswith(f"{url}: ConnectError: ")


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"",
        b'{"score": NaN}',
        b'{"choices": []}',
        b'{"choices": [{"message": {}}]}',
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_reply_that_is_no_chat_completion_is_invalid_at_once(body):
    with serving(lambda _m, _b: Reply(body=body)) as server:
        (score,) = judge(server.url).score([wrote("a")])
        assert len(server.requests) == 1
    assert "no chat completion" in cause(score)


def test_a_completion_without_text_is_invalid():
    with serving(lambda _m, _b: Reply(None)) as server:
        assert "a chat completion without text" in cause(judge(server.url).score([wrote("a")])[0])


def test_a_reply_that_is_too_large_is_invalid():
    with serving(lambda _m, _b: Reply("Score: 1 " + "x" * (1 << 20))) as server:
        assert "more than 1048576 bytes" in cause(judge(server.url).score([wrote("a")])[0])


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 8", 8.0),
        ("**Score:** 8", 8.0),
        ("**Score**: **8/10**", 8.0),
        ("Score: 8.", 8.0),
        ("Score: 0", 0.0),
        ("Score: 4.25, because", 4.25),
        ("Score: 8 ... so\nScore: 8", 8.0),
    ],
)
def test_a_reply_with_one_number_is_read(reply, score):
    with serving(lambda _m, _b: Reply(reply)) as server:
        assert judge(server.url).score([wrote("a")]) == [score]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "no number in the reply: ''"),
        ("I rate it highly", "no number"),
        ("Score: NaN", "no number"),
        ("Score: inf", "no number"),
        ("Score: eight", "no number"),
        ("Score (0-10):", "no number"),
        ("Score: 0-10", "no number"),
        ("Score: 4e1", "no number"),
        ("Score: 1,5", "no number"),
        ("Score: 8 or\nScore: 3", "different numbers in one reply: [3.0, 8.0]"),
        ("Score: 80", "80 is out of range"),
        ("Score: -1", "-1 is out of range"),
    ],
)
def test_a_reply_without_one_number_in_range_is_invalid_and_tells_why(reply, why):
    with serving(lambda _m, _b: Reply(reply)) as server:
        assert why in cause(judge(server.url).score([wrote("a")])[0])


def test_a_failure_is_invalid_among_good_ones_and_its_cause_reaches_the_service():
    with serving(lambda message, _: Reply("Score: 0" if message == "good" else "hm")) as server:
        scores = service(0.5, r=judge(server.url)).score(answered(["good", "bad"]))
        assert len(server.requests) == 2
    assert scores.valid.tolist() == [True, False]
    assert scores.total[0] == 0.0
    assert scores.causes == ["", "r: r0.p1/0: no number in the reply: 'hm'"]


def test_a_judge_that_always_fails_stops_the_run_naming_the_endpoint():
    with serving(lambda _m, _b: Reply("no", status=500)) as server, pytest.raises(RuntimeError) as raised:
        accepted(service(0.5, r=judge(server.url, chat={"tries": 2})), answered(["a", "b"]))
    assert f"Failed: r on 2. First cause: r: r0.p0/0: {server.url}: status 500" in str(raised.value)


# --- time ---


def test_a_slow_reply_is_given_up_and_the_others_keep_their_scores():
    with serving(lambda message, _: Reply("Score: 2", delay=30.0 if message == "slow" else 0.0)) as server:
        fast, slow = judge(server.url, chat={"seconds_per_try": 0.5, "tries": 2}).score([wrote("fast"), wrote("slow")])
    assert fast == 2.0
    assert cause(slow) == f"{server.url}: no reply within 0.5 s (try 2 of 2)"


def test_a_reply_that_drips_does_not_extend_its_time():
    with serving(lambda _m, _b: Reply("Score: 2", drip=0.05)) as server:
        (score,) = judge(server.url, chat={"seconds_per_try": 0.5, "tries": 1}).score([wrote("a")])
    assert "no reply within 0.5 s" in cause(score)


def test_the_time_for_all_messages_ends_the_call_and_tells_who_was_not_asked():
    with serving(lambda _m, _b: Reply("Score: 2", delay=30.0)) as server:
        scores = judge(server.url, chat={"seconds_in_all": 0.5, "concurrency": 1}).score([wrote("a"), wrote("b")])
        assert len(server.requests) == 1
    assert "no reply within" in cause(scores[0])
    assert "not asked: the time for all messages, 0.5 s, is over" in cause(scores[1])


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_kept_to(form):
    times = []

    def script(_: str, before: int) -> Reply:
        times.append(time.monotonic())
        until = email.utils.formatdate(time.time() + 2, usegmt=True) if form == "date" else "1"
        return Reply("Score: 1", status=429 if before == 0 else 200, headers=(("Retry-After", until),))

    with serving(script) as server:
        assert judge(server.url).score([wrote("a")]) == [1.0]
    assert times[1] - times[0] >= 0.95


def test_a_retry_after_beyond_the_time_for_all_is_given_up_at_once():
    with serving(lambda _m, _b: Reply("x", status=503, headers=(("Retry-After", "3600"),))) as server:
        (score,) = judge(server.url).score([wrote("a")])
        assert len(server.requests) == 1
    assert "in 3.6e+03 s, would be too late for the 20 s" in cause(score)


def test_a_retry_after_that_says_nothing_leaves_the_pause_as_it_is():
    headers = (("Retry-After", "soon"),)
    with serving(lambda _, before: Reply("Score: 1", status=503 if before == 0 else 200, headers=headers)) as server:
        assert judge(server.url).score([wrote("a")]) == [1.0]


# --- order and concurrency (FIELD_FAULTS 95) ---


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_score_i_belongs_to_sample_i_when_replies_come_in_reverse(batch):
    with serving(lambda message, _: Reply(f"Score: {message}", delay=0.02 * (8 - int(message)))) as server:
        samples = [wrote(str(row)) for row in range(8)]
        scored = [v for at in range(0, 8, batch) for v in judge(server.url).score(samples[at : at + batch])]
    assert scored == [float(row) for row in range(8)]


def test_no_more_requests_at_a_time_than_concurrency():
    with serving(lambda _m, _b: Reply("Score: 1", delay=0.05)) as server:
        judge(server.url, chat={"concurrency": 3}).score([wrote(str(row)) for row in range(12)])
    assert 1 < server.most_at_once <= 3


def test_chance_of_the_run_is_left_alone():
    state = random.getstate()
    with serving(lambda _, before: Reply("Score: 1", status=500 if before == 0 else 200)) as server:
        judge(server.url).score([wrote("a")])
    assert random.getstate() == state


# --- what is sent ---


def test_the_message_holds_prompt_text_and_answer_and_braces_of_a_text_are_not_filled_in():
    template = 'Q {prompt} A {text} gold {answer} reply {"score": 1}'
    with serving(lambda _m, _b: Reply("Score: 1")) as server:
        scorer = judge(server.url, template, answer="gold", chat={"request": {"max_completion_tokens": 9, "seed": 0}})
        scorer.score([wrote("{answer} {prompt} é 😀", "2 + 2?", gold=4)])
    (request,) = server.requests
    assert request == {
        "path": "/v1/chat/completions",
        "model": "tiny",
        "messages": [{"role": "user", "content": 'Q 2 + 2? A {answer} {prompt} é 😀 gold 4 reply {"score": 1}'}],
        "max_completion_tokens": 9,
        "seed": 0,
    }


def test_an_empty_text_is_judged_and_an_over_long_one_is_not_sent():
    with serving(lambda _m, _b: Reply("Score: 1")) as server:
        empty, long = judge(server.url, "T {text}", longest=20).score([wrote(""), wrote("x" * 19)])
        assert [request["messages"][0]["content"] for request in server.requests] == ["T "]
    assert empty == 1.0
    assert cause(long) == "a message of 21 characters, more than longest=20"


def test_the_token_is_sent_and_never_told_or_written_down(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "sk-abc123")
    body = b"x" * 295 + b"sk-abc123"
    with serving(lambda _m, _b: Reply(status=401, body=body)) as server:
        scorer = judge(server.url, chat={"token_variable": "JUDGE_TOKEN"})
        (score,) = scorer.score([wrote("a")])
    assert server.headers[0]["Authorization"] == "Bearer sk-abc123"
    assert "sk-" not in cause(score)
    assert "sk-abc123" not in repr(scorer) + repr(dump(RewardConfig({"r": WeightedScorer(scorer)})))


def test_without_a_token_variable_no_token_is_sent_and_proxies_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving(lambda _m, _b: Reply("Score: 1")) as server:
        assert judge(server.url).score([wrote("a")]) == [1.0]
    assert "Authorization" not in server.headers[0]


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url must read like http"),
        ({"url": "ftp://127.0.0.1/v1"}, "url must read like http"),
        ({"url": f"http://{'user:secret'}@127.0.0.1/v1"}, "url holds a user or a password"),
        ({"request": {"model": "x", "stream": True}}, r"request must leave \['model', 'stream'\] to Chat"),
        ({"tries": 0}, "tries and concurrency must be at least 1"),
        ({"seconds_per_try": 0.0}, "pause must be at least 0"),
        ({"token_variable": "NOT_SET_ANYWHERE"}, "environment variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_chat_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        Chat(**{"url": "http://127.0.0.1/v1", "model": "m", **settings})
    assert "secret" not in str(raised.value)


def test_a_token_with_a_line_break_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "sk-abc\nX: y")
    with pytest.raises(ValueError, match="holds blanks or characters that no token has") as raised:
        Chat("http://127.0.0.1/v1", "m", token_variable="JUDGE_TOKEN")
    assert "sk-abc" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{text} {question}"}, r"template names \['question'\]"),
        ({"template": "{prompt}"}, "template must hold {text}"),
        ({"template": "{text} {answer}"}, "go together, got answer=None"),
        ({"answer": "gold"}, "go together, got answer='gold'"),
        ({"pattern": "Score: [0-9]"}, "pattern must have 1 group in parentheses, got 0"),
        ({"pattern": "("}, "pattern is no regular expression"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest must be below highest"),
        ({"longest": 0}, "longest must be at least 1"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Judge(Chat("http://127.0.0.1/v1", "m"), **settings)
