"""Texts of evaluations: a file for each, and what the report shows of the first and the last one.

    samples/eval_000020.jsonl    {"prompt": "What is the capital of France?", "text": "Paris", "reward": 1.5}

Samples of a prompt stand next to each other; a reward is null where no scorer could tell.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

from unirl.observability.atomic import replace_file
from unirl.observability.charts import evenly
from unirl.observability.formatting import figure

_MOST_PROMPTS = 12
# Characters: what a table shows at once, and what the page holds of a text.
_FOLDED, _MOST = 240, 8_000


@dataclasses.dataclass(frozen=True)
class Written:
    """A text as a page shows it. start: at once; rest: when it is unfolded; left_out: characters of neither"""

    start: str
    rest: str = ""
    left_out: int = 0
    reward: str = ""

    @classmethod
    def of(cls, text: str, reward: str = "") -> Written:
        return cls(text[:_FOLDED], text[_FOLDED:_MOST], max(len(text) - _MOST, 0), reward)


@dataclasses.dataclass(frozen=True)
class Answered:
    """A prompt with what was written to it at the first and at the last evaluation."""

    prompt: Written
    before: list[Written]
    after: list[Written]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """steps: of the first and of the last evaluation, which are one where there was one; left_out: further prompts"""

    steps: tuple[int, int]
    rows: list[Answered]
    left_out: int


def write_texts(file: Path, prompts: list[str], texts: list[str], rewards: list[float]) -> None:
    """A JSON line for each text; of each prompt as many, siblings next to each other."""
    samples = len(texts) // len(prompts)
    lines = [
        json.dumps(
            {"prompt": prompts[row // samples], "text": text, "reward": reward if math.isfinite(reward) else None},
            ensure_ascii=False,
            allow_nan=False,
        )
        for row, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]
    replace_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


def compare_texts(folder: Path) -> Comparison | None:
    """The first and the last evaluation of the samples in `folder`, which answer the same prompts; None without one."""
    files = sorted(folder.glob("eval_*.jsonl"))
    if not files:
        return None
    after = _read(files[-1])
    before = _read(files[0]) if len(files) > 1 else [(prompt, []) for prompt, _ in after]
    assert [prompt for prompt, _ in before] == [prompt for prompt, _ in after], f"{folder}: evaluations differ"
    rows = [Answered(Written.of(prompt), first, last) for (prompt, first), (_, last) in zip(before, after, strict=True)]
    shown = evenly(rows, _MOST_PROMPTS)
    first, last = (int(file.stem.removeprefix("eval_")) for file in (files[0], files[-1]))
    return Comparison((first, last), shown, len(rows) - len(shown))


def _read(file: Path) -> list[tuple[str, list[Written]]]:
    """Prompts with what was written to them."""
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    groups = itertools.groupby(lines, key=lambda line: line["prompt"])
    return [(prompt, [Written.of(line["text"], _score(line["reward"])) for line in group]) for prompt, group in groups]


def _score(reward: float | None) -> str:
    return "none" if reward is None else figure(reward)
