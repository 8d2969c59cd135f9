"""What an evaluation by a suite leaves on disk.

evaluation.json         settings, versions, the table, and every sample with its scores
pictures_<skill>.png    some prompts, the first figure below each picture
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from unirl.config.load import dump
from unirl.data.suite_prompts import ALL, skill_of
from unirl.observability.atomic import replace_file
from unirl.observability.grids import save_grid
from unirl.observability.run_folder import versions
from unirl.reward.scorer import Scorer
from unirl.reward.scorers.remote import RemoteScorer
from unirl.reward.version import version_of
from unirl.trainer.suite_evaluation import Asked, SuiteEvaluation

_FEW, _COLUMNS = 2, 4  # of a few pictures each, prompts share a line


def default_folder(asked: Asked, found: SuiteEvaluation) -> Path:
    """Inside a run's folder, by step and weights; of a recipe, `evaluations/<run name>/<suite>`."""
    if found.step is None:
        return Path("evaluations", found.config.run.name, found.suite.name)
    return Path(asked.model, "evaluations", f"{found.suite.name}_{found.step:06d}_{found.weights}")


def write(asked: Asked, found: SuiteEvaluation, folder: Path) -> None:
    """Everything into `folder`; an earlier evaluation there is replaced."""
    content = json.dumps(_content(asked, found), indent=1, allow_nan=False, ensure_ascii=False)
    replace_file(folder / "evaluation.json", f"{content}\n".encode())
    for skill, rows in _by_skill(found).items():
        _write_grid(found, rows, folder / f"pictures_{skill.replace(' ', '_')}.png")


def _by_skill(found: SuiteEvaluation) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for row in sorted(found.pictures):
        groups.setdefault(skill_of(found.suite.rows[row]) or ALL, []).append(row)
    return groups


def _write_grid(found: SuiteEvaluation, rows: list[int], path: Path) -> None:
    each = len(found.pictures[rows[0]])
    number = len(found.samples) // len(found.suite.rows)
    shown = [sample for row in rows for sample in found.samples[row * number : row * number + each]]
    save_grid(
        torch.cat([found.pictures[row] for row in rows]),
        path,
        columns=each if each > _FEW else _COLUMNS,
        captions=[found.suite.rows[sample.prompt].prompt for sample in shown],
        rewards=[next(iter(sample.scores.values())) for sample in shown],
    )


def _content(asked: Asked, found: SuiteEvaluation) -> dict[str, Any]:
    config = dump(found.config)
    return {
        "model": {
            "of": asked.model,
            "overrides": list(asked.overrides),
            "step": found.step,
            "weights": found.weights,
            "settings": config["model"],
        },
        "suite": {"name": found.suite.name, "prompts": len(found.suite.rows), "sha256": found.suite.digest},
        "seed": asked.seed,
        "samples_per_prompt": len(found.samples) // len(found.suite.rows),
        "sampling": dump(found.sampling),
        "scorers": {
            name: {**dump(weighted), "version": _version(weighted.scorer)}
            for name, weighted in found.suite.reward.scorers.items()
        },
        "versions": versions(),
        "table": [_plain(dataclasses.asdict(line)) for line in found.tallies()],
        "prompts": _prompts(found),
    }


def _prompts(found: SuiteEvaluation) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [
        {"prompt": row.prompt, "metadata": row.metadata, "samples": []} for row in found.suite.rows
    ]
    for sample in found.samples:
        said = _plain(dataclasses.asdict(sample))
        prompts[said.pop("prompt")]["samples"].append(said)
    return prompts


def _plain(value: Any) -> Any:
    """JSON knows no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(scorer: Scorer) -> str:
    return scorer.served_version if isinstance(scorer, RemoteScorer) else version_of(scorer)
