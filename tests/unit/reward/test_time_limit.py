"""A sample that never ends costs itself and nothing else (FIELD_FAULTS 96)."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.reward.samples import Rule, accepted, answered, service, wrote
from tests.unit.reward.stubborn import Broken, Impatient, Stubborn
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.function import FunctionScorer
from unirl.reward.service import WeightedScorer
from unirl.reward.time_limit import TimeLimited

ROOT = Path(__file__).parents[3]


def limited(seconds: float = 1.0, processes: int = 1) -> WeightedScorer:
    return WeightedScorer(Stubborn(), time_limit=seconds, processes=processes)


def inputs(*texts: str) -> list[ScorerInput]:
    return [wrote(text) for text in texts]


def gone(pid: int) -> bool:
    """Whether the process ends within twenty seconds; a zombie that nobody waits for has ended."""
    for _ in range(2000):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("deed", ["spin", "spin in C", "spin deaf"])
def test_a_sample_that_never_ends_is_invalid_and_the_others_have_their_scores_in_order(deed):
    judge = service(0.25, r=limited())
    scores = judge.score(answered(["1", deed, "3", "4"]))
    assert scores.total.tolist()[::2] == [1.0, 3.0]
    assert scores.valid.tolist() == [True, False, True, True]
    assert scores.causes == ["", "r: r0.p1/0: not scored within the time limit of 1 s", "", ""]
    judge.close()


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_scores_stay_in_order_whatever_the_number_of_processes(processes):
    texts = [str(row) for row in range(20)]
    texts[7] = texts[8] = "spin"
    outcomes = TimeLimited("r", Stubborn(), 1.0, processes).score(inputs(*texts))
    assert [row for row, outcome in enumerate(outcomes) if outcome.cause] == [7, 8]
    assert all(outcome.value == row for row, outcome in enumerate(outcomes) if not outcome.cause)


def test_the_processes_are_kept_between_calls_and_no_more_are_started_than_samples():
    judge = TimeLimited("r", Stubborn(), 60, processes=3)
    (first,) = judge.score(inputs("pid"))
    (again,) = judge.score(inputs("pid"))
    assert first.value == again.value != os.getpid()
    assert judge.score([]) == []


def test_a_batch_of_one_and_a_batch_of_many_agree_with_the_scorer_in_this_process():
    texts = ["0", "1.5", "-2", "1e30"]
    judge = TimeLimited("r", Stubborn(), 60)
    assert [outcome.value for outcome in judge.score(inputs(*texts))] == Stubborn().score(inputs(*texts))
    assert [judge.score(inputs(text))[0].value for text in texts] == Stubborn().score(inputs(*texts))


def test_failures_read_as_they_do_without_a_time_limit():
    texts = ["1", "raise no number in it", "unscored the judge is out", "nan", "1e39"]
    plain = service(0.9, r=Stubborn()).score(answered(texts))
    apart = service(0.9, r=limited(60)).score(answered(texts))
    assert apart.causes == plain.causes
    assert plain.causes[1] == "r: r0.p1/0: ValueError: no number in it"
    assert plain.causes[2] == "r: r0.p2/0: the judge is out"
    assert apart.valid.tolist() == plain.valid.tolist() == [True, False, False, False, False]


def test_above_max_invalid_the_error_shows_where_the_scorer_raised():
    with pytest.raises(RuntimeError, match=r"Failed: r on 1\. First cause: r: r0.p0/0: ValueError") as raised:
        accepted(service(r=limited(60)), answered(["raise no", "1"]))
    assert "in _raise" in str(raised.value.__cause__)


@pytest.mark.parametrize(("deed", "status"), [("exit 3", "exit code 3"), ("fault", "SIGSEGV")])
def test_a_sample_that_ends_the_process_is_invalid_and_names_how_it_ended(deed, status):
    outcomes = TimeLimited("r", Stubborn(), 60).score(inputs("1", deed, "3"))
    assert [outcome.cause for outcome in outcomes] == [
        "",
        f"r: r0.p0/0: the process that scored it ended ({status})",
        "",
    ]
    assert [outcomes[0].value, outcomes[2].value] == [1.0, 3.0]


def test_a_process_that_died_between_two_calls_is_replaced():
    judge = TimeLimited("r", Stubborn(), 60)
    (first,) = judge.score(inputs("pid"))
    os.kill(int(first.value), signal.SIGKILL)
    assert gone(int(first.value))
    (second,) = judge.score(inputs("pid"))
    assert second.cause == ""
    assert second.value != first.value


def test_the_process_loads_no_torch_and_the_time_it_takes_to_start_is_no_samples_time():
    (outcome,) = TimeLimited("r", Stubborn(), 1.0).score(inputs("torch"))
    assert outcome.value == 0.0


# --- nothing is left behind ---


def test_close_ends_the_process_and_a_later_score_starts_another():
    judge = service(r=limited(60))
    pid = int(judge.score(answered(["pid"])).components["r"].item())
    judge.close()
    judge.close()
    assert gone(pid)
    assert judge.score(answered(["5"])).total.tolist() == [5.0]


def test_a_service_that_nobody_holds_takes_its_process_with_it():
    judge = TimeLimited("r", Stubborn(), 60)
    (outcome,) = judge.score(inputs("pid"))
    del judge
    gc.collect()
    assert gone(int(outcome.value))


def test_what_a_sample_started_ends_with_it(tmp_path):
    (outcome,) = TimeLimited("r", Stubborn(), 1.0).score(inputs(f"start {tmp_path / 'pid'}"))
    assert "time limit" in outcome.cause
    assert gone(int((tmp_path / "pid").read_text()))


PROGRAM = """
import sys
from tests.unit.reward.stubborn import Stubborn
from unirl.reward.scorer import ScorerInput
from unirl.reward.time_limit import TimeLimited

judge = TimeLimited("r", Stubborn(), float(sys.argv[2]))
print(int(judge.score([ScorerInput("r0.p0/0", "", text="pid")])[0].value), flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError("the run fails")
if sys.argv[1] == "killed":
    judge.score([ScorerInput("r0.p0/0", "", text="spin")])
"""


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("raise", 1)])
def test_the_end_of_python_ends_the_process_also_after_an_exception(tmp_path, ending, code):
    # a script without `if __name__ == "__main__"`: it must not run a second time in the process
    (tmp_path / "script.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", ending, "60"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    (pid,) = done.stdout.split()
    assert gone(int(pid))


def test_a_process_that_spins_ends_by_itself_when_its_parent_was_killed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "killed", "1"], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
    assert gone(pid)


def test_a_call_that_is_interrupted_leaves_no_answer_for_the_next_one():
    judge = TimeLimited("r", Stubborn(), 60)
    judge.score(inputs("1"))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        judge.score(inputs("spin"))
    signal.signal(signal.SIGALRM, previous)
    assert [outcome.value for outcome in judge.score(inputs("7", "8"))] == [7.0, 8.0]


# --- mistakes ---


def test_a_scorer_that_breaks_its_contract_is_named_as_it_is_without_a_time_limit():
    with pytest.raises(ValueError, match="scorer r returned 2 scores for 1 samples"):
        service(r=WeightedScorer(Broken(""), time_limit=60)).score(answered(["1"]))


@pytest.mark.parametrize(
    ("fault", "message"), [("raise", "OSError: no weights"), ("exit", r"it ended \(exit code 7\)")]
)
def test_a_scorer_that_does_not_start_stops_the_run_with_the_cause(fault, message):
    with pytest.raises(RuntimeError, match=f"(?s)scorer r does not start in a process of its own: .*{message}"):
        service(r=WeightedScorer(Broken(fault), time_limit=60)).score(answered(["1"]))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_limit_is_a_positive_number_of_seconds(seconds):
    with pytest.raises(ValueError, match="time_limit must be positive seconds, or null"):
        WeightedScorer(Stubborn(), time_limit=seconds)


def test_processes_without_a_time_limit_would_be_ignored_and_are_refused():
    with pytest.raises(ValueError, match="processes=2 takes effect under a time_limit only"):
        WeightedScorer(Stubborn(), processes=2)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        WeightedScorer(Stubborn(), time_limit=1, processes=0)


def test_a_scorer_that_cannot_go_to_another_process_is_refused_at_once(monkeypatch):
    with pytest.raises(ValueError, match=r"runs Rule in another process, and it cannot go there: .*lambda"):
        WeightedScorer(Rule(lambda _: 1.0), time_limit=1)
    kind = type("Home", (Stubborn,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Home", kind, raising=False)
    with pytest.raises(ValueError, match="runs Home in another process, which cannot import it from the main program"):
        WeightedScorer(kind(), time_limit=1)


def test_a_class_may_ask_for_a_time_limit_and_the_recipe_may_give_another():
    assert WeightedScorer(Stubborn()).limit is None
    assert WeightedScorer(Impatient()).limit == 1.5
    assert WeightedScorer(Impatient(), time_limit=9.0).limit == 9.0
    assert "time limit of 1.5 s" in service(0.5, r=Impatient()).score(answered(["1", "spin"])).causes[1]


def test_a_function_of_the_current_folder_runs_under_a_time_limit(tmp_path, monkeypatch):
    (tmp_path / "own_rewards_under_limit.py").write_text(
        "def size(samples):\n    return [len(s.text) for s in samples]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    scorer = FunctionScorer("own_rewards_under_limit:size")
    scores = service(r=WeightedScorer(scorer, time_limit=60)).score(answered(["", "four"]))
    assert scores.total.tolist() == [0.0, 4.0]
