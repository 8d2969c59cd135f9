"""Scores of a batch, and when too many of them are none."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from unirl.types.reward import Failure, Scores


def scored(*failures: tuple[Failure, ...], names: tuple[str, ...] = ("one", "two")) -> Scores:
    total = torch.tensor([math.nan if row else 0.5 for row in failures])
    return Scores(total, dict.fromkeys(names, total), list(failures))


def failed(culprit: str, row: int) -> Failure:
    return Failure(culprit, f"{culprit}: r0.p{row}/0: no")


def test_zero_is_a_score_and_nan_is_none() -> None:
    late = (Failure("r", "timed out"),)
    scores = Scores(torch.tensor([0.0, float("nan"), -1.0]), {"r": torch.zeros(3)}, [(), late, ()])
    assert scores.valid.tolist() == [True, False, True]
    assert scores.select([1]).causes == ["timed out"]


def test_columns_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match=r"fields disagree on the number of rows: \{'total': 2, 'components': 3"):
        Scores(torch.zeros(2), {"r": torch.zeros(3)}, [(), ()])


def test_causes_of_a_sample_are_told_together() -> None:
    assert scored((), (failed("one", 1), failed("two", 1))).causes == ["", "one: r0.p1/0: no; two: r0.p1/0: no"]


def test_the_share_is_of_the_whole_batch_however_it_was_cut() -> None:
    """3 of 16 are 0.1875; the shard of 4 in which they fell alone would be at 0.75."""
    whole = scored(*[(failed("one", row),) if row in (4, 5, 6) else () for row in range(16)])
    joined = Scores.concat([*whole.split([4, 4, 8])])
    assert joined.accepted(0.1875) is joined
    with pytest.raises(RuntimeError, match=r"^3 of 16 samples have no reward, more than max_invalid=0\.18 allows\. "):
        joined.accepted(0.18)


def test_the_first_samples_stop_a_batch_as_soon_as_it_is_lost() -> None:
    first = scored((failed("one", 0),), (failed("one", 1),))
    assert first.accepted(0.25, of=8) is first
    with pytest.raises(RuntimeError, match=r"^2 of 8 samples have no reward"):
        first.accepted(0.2, of=8)


def test_culprits_are_counted_in_the_order_of_the_scorers_with_the_first_cause_of_the_first() -> None:
    """A picture that is broken comes before all scorers, whichever sample failed first."""
    rows = ((failed("two", 0),), (failed("one", 1), failed("two", 1)), (failed("one", 2),), ())
    message = r"Failed: one on 2, two on 2\. First cause: one: r0\.p1/0: no"
    with pytest.raises(RuntimeError, match=message):
        scored(*rows).accepted(0.5)
    with pytest.raises(RuntimeError, match=r"Failed: picture on 1, one on 2, two on 2\. First cause: picture: r0"):
        scored(*rows[:3], (failed("picture", 3),)).accepted(0.5)


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_a_failure_goes_to_another_process_whatever_was_raised() -> None:
    try:
        raise Unpicklable("no", "judge")
    except Unpicklable as error:
        failure = Failure("r", "r: it raised", error)
    sent = pickle.loads(pickle.dumps(failure))
    assert (sent.culprit, sent.cause) == ("r", "r: it raised")
    assert isinstance(sent.error, RuntimeError)
    assert "test_reward.py" in str(sent.error)
    assert str(sent.error).endswith("Unpicklable: no judge\n")
    assert pickle.loads(pickle.dumps(failed("r", 0))) == failed("r", 0)
