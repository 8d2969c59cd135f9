from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.reward.samples import entry, generated, service
from unirl.reward.scorers.function import FunctionScorer

MODULE = "tests.unit.reward.scorers.test_function"

not_callable = 3


def brightness(samples):
    return [float(sample.picture.mean()) for sample in samples]


def without_arguments():
    return []


def fails_on_the_third(samples):
    return [1 / (float(sample.picture[0, 0, 0]) - 2) for sample in samples]


async def later(samples):
    return [0.0 for _ in samples]


def test_any_function_is_a_scorer():
    scorer = FunctionScorer(f"{MODULE}:brightness")
    assert scorer.score([entry(np.full((2, 2, 3), level, np.uint8)) for level in (0, 7)]) == [0.0, 7.0]


def test_a_function_that_raises_costs_the_sample_that_it_raised_on():
    scores = service(0.3, mine=FunctionScorer(f"{MODULE}:fails_on_the_third")).score(generated(["a"] * 4))
    assert scores.total.tolist() == [-0.5, -1.0, pytest.approx(math.nan, nan_ok=True), 1.0]
    assert scores.causes[2].startswith("mine: r0.p2/0: ZeroDivisionError")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{MODULE}:brightnes", r"has no 'brightnes' \(nearest: brightness"),
        (f"{MODULE}s:brightness", rf"there is no module '{MODULE}s' \(nearest: {MODULE}"),
        ("jsn:loads", r"there is no module 'jsn' \(nearest: .*json"),
        ("json.decoder.x:loads", "there is no module 'json.decoder.x'"),
        ("json", "must read 'module:name', got 'json'"),
        ("json:", "must read 'module:name', got 'json:'"),
        ("./my_rewards:right", r"got './my_rewards:right'; a function in ./my_rewards.py is my_rewards:its_name"),
        (":loads", "must read 'module:name', got ':loads'"),
        (f"{MODULE}:not_callable", "is a int, which cannot be called"),
        (f"{MODULE}:without_arguments", "must take one argument, the list of samples: too many positional arguments"),
        (f"{MODULE}:later", "is async"),
        (f"{MODULE}:FunctionScorer", "is a class: name a Scorer by its _target_"),
    ],
)
def test_a_name_that_is_no_scorer_is_refused_at_construction(function, message):
    with pytest.raises(ValueError, match=message):
        FunctionScorer(function)


def test_a_module_that_lacks_a_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match="needs_more needs 'a_package_that_is_not_there', which is not installed"):
        FunctionScorer("needs_more:score")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "import math\nscore = [\n",
            r"cannot import broken_rewards: .*/broken_rewards\.py:2: SyntaxError: '\[' was never",
        ),
        (
            "import json\n\nlimits = json.loads('x')\n",
            r"/broken_rewards\.py:3: JSONDecodeError: Expecting value: line 1",
        ),
        ("def f():\n    return 1 / 0\nf()\n", r"/broken_rewards\.py:3: ZeroDivisionError: division by zero$"),
        ("from math import sqrtt\n", r"cannot import broken_rewards \(cannot import name 'sqrtt' from 'math'"),
    ],
)
def test_a_module_that_fails_is_refused_with_file_line_and_cause(text, told, tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match=rf"^function 'broken_rewards:score': .*{told}"):
        FunctionScorer("broken_rewards:score")


def test_a_file_in_the_current_directory_is_found_by_a_program_that_lives_elsewhere(tmp_path):
    (tmp_path / "my_rewards.py").write_text("def ones(samples):\n    return [1.0 for _ in samples]\n")
    program = (
        "from unirl.reward.scorers.function import FunctionScorer; print(FunctionScorer('my_rewards:ones').score([0]))"
    )
    script = tmp_path / "elsewhere" / "program.py"
    script.parent.mkdir()
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )
    assert done.stdout == "[1.0]\n", done.stderr


def environment() -> dict[str, str]:
    """The paths of this process, for a child whose current directory is another."""
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_a_file_in_the_current_directory_does_not_hide_an_installed_module(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("loads = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "json")
    with pytest.raises(TypeError, match="must be str, bytes or bytearray, not list"):
        FunctionScorer("json:loads").score([])


def test_a_function_scorer_survives_pickling():
    scorer = pickle.loads(pickle.dumps(FunctionScorer(f"{MODULE}:brightness")))
    assert scorer.score([entry(np.full((2, 2, 3), 5, np.uint8))]) == [5.0]
