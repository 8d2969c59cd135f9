from __future__ import annotations

import math
import threading

import pytest

from tests.unit.reward.samples import answered, service, wrote
from unirl.reward.scorers.math_answer import MathAnswer
from unirl.reward.service import WeightedScorer


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("4", r"\boxed{4}", 1),
        ("1/2", r"\boxed{0.5}", 1),
        (r"\sqrt{2}", r"\boxed{1.41421356}", 1),
        ("4", "x=4 so 5", 0),
        ("4", "", 0),
        (4, "The answer is 4.", 1),
        (0.5, r"$\frac{1}{2}$", 1),
        (r"$\frac{1}{2}$", "so $0.5$", 1),
        (r"\boxed{4}", r"\boxed{4}", 1),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        (r"\{1,2\}", r"\boxed{2,1}", 1),
        ("4", r"\boxed{3}\boxed{4}", 0),
        ("4", "\\boxed{3} is wrong.\n\nSo it is \\boxed{4}.", 1),
        ("4", "\\boxed{4} is wrong.\n\nSo it is \\boxed{3}.", 0),
        ("π", r"\boxed{\pi}", 1),
        ("pi", r"\boxed{\pi}", 1),
        ("2pi", r"$2\pi$", 1),
        ("pi", r"\boxed{3.14}", 0),
        (5e-05, "0.00005", 1),
        (5e-05, r"\boxed{0.00005}", 1),
        (1e-7, "0.0000001", 1),
        (1e-7, r"\boxed{10^{-7}}", 1),
        (1e-7, r"\boxed{e-7}", 0),
        (1e-7, r"\boxed{0.0000004}", 0),
        (1e22, r"\boxed{10^{22}}", 1),
        (1e22, r"\boxed{10000000000000000000000}", 1),
        (1e-300, r"\boxed{10^{-300}}", 1),
        (1e-300, r"\boxed{0}", 0),
        ("0.000001", r"\boxed{0.0000014}", 0),
        ("0.000001", r"\boxed{0.000001}", 1),
        ("-0.000001", r"\boxed{-0.0000014}", 0),
        ("1/3", r"\boxed{0.333333}", 1),
        ("1/3", r"\boxed{0.333}", 0),
        ("0", r"\boxed{0}", 1),
        ("50%", "50%", 1),
        ("50%", r"so 50\%", 1),
        ("50%", r"\boxed{50\%}", 1),
        ("50%", r"$\boxed{50\%}$", 1),
        ("50%", r"\boxed{50%}", 1),
        (r"12.5\%", r"\boxed{1/8}", 1),
        (r"$50\%$", r"\boxed{50\%}", 1),
        ("50%", r"$50\%$", 1),
        ("50", "50%", 1),
        ("50", r"so 50\%", 1),
        ("50%", r"\boxed{50}", 0),
        ("50%", "50", 0),
        ("50%", r"\boxed{5\%}", 0),
        ("1 1/2", r"\boxed{3/2}", 1),
        ("1 1/2", "It is 1 1/2.", 1),
        ("1 1/2", r"\boxed{1.5}", 1),
        ("-1 1/2", r"\boxed{-1.5}", 1),
        ("1 1/2", r"\boxed{1/2}", 0),
        ("-5", "−5", 1),  # noqa: RUF001 - as it is printed
        ("5", "−5", 0),  # noqa: RUF001 - as it is printed
        ("5", "<answer>5</answer>", 1),
        ("5", "<think>6</think><answer>\n5\n</answer>", 1),
        ("6", "<think>6</think><answer>5</answer>", 0),
        ("5", "<answer>5</answer><answer>6</answer>", 0),
        ("5", "(5)", 1),
        ("5", "Answer:5", 1),
        ("5", "Answer:6", 0),
        ("5", "The answer is (5).", 1),
        ("5", "_5_", 1),
        ("-5", "Answer: (-5)", 1),
        ("(5,6)", "Answer: $(5, 6)$", 1),
        ("5", "Answer: (5, 6)", 0),
        (r"\text{yes}", r"\boxed{\text{yes}}", 1),
        ("x", r"\boxed{x}", 1),
        ("4", "答案是 4", 1),
        ("4", "４", 0),  # noqa: RUF001 - full-width
        ("4", "no " * 100_000 + "4", 1),
        ("4", "9" * 5000, 0),
        ("4", r"\frac{" * 3000, 0),
        ("4", "(" * 3000, 0),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_answer_is_compared_as_mathematics(gold, text, score):
    assert MathAnswer().score([wrote(text, answer=gold)]) == [score]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("", "no mathematics found in the gold answer ''"),
        ("5€", "no mathematics found in the gold answer '5€'"),
        ("yes", "no mathematics found in the gold answer 'yes'"),
        ("text answer", "no mathematics found"),
        (math.nan, "no mathematics found in the gold answer nan"),
        (math.inf, "no mathematics found in the gold answer inf"),
        (None, "must be a number or text"),
        (True, "must be a number"),
    ],
)
def test_a_gold_answer_that_cannot_be_read_is_an_error_and_not_0(gold, message):
    with pytest.raises(ValueError, match=message):
        MathAnswer().score([wrote("4", answer=gold)])


def test_it_scores_on_any_thread_and_warns_of_nothing(caplog):
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(MathAnswer().score([wrote("4", answer="4")])))
    thread.start()
    thread.join(60)
    assert scores == [1.0]
    assert caplog.text == ""


def test_under_its_own_time_limit_a_power_tower_is_invalid_and_the_others_keep_their_scores():
    assert WeightedScorer(MathAnswer()).limit == 10.0
    texts = [r"\boxed{9^{9^{9^{9}}}}", "4", "5", r"\boxed{999999999!}"]
    judge = service(0.5, math=WeightedScorer(MathAnswer("gold"), time_limit=2.0))
    scores = judge.score(answered(texts, [{"gold": "4"}] * 4))
    judge.close()
    assert scores.total.tolist()[1:3] == [1.0, 0.0]
    assert scores.valid.tolist() == [False, True, True, False]
    assert scores.causes[0] == "math: r0.p0/0: not scored within the time limit of 2 s"


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scores_do_not_depend_on_the_batch_and_stay_in_order(batch):
    samples = [wrote(f"so $\\frac{{{row}}}{{2}}$", answer=str(row / 2 if row % 3 else 99)) for row in range(10)]
    scorer = MathAnswer()
    scored = [value for at in range(0, 10, batch) for value in scorer.score(samples[at : at + batch])]
    assert scored == [float(row % 3 != 0) for row in range(10)]
    assert not any(math.isnan(value) for value in scored)
