"""`report.html`: what a run did, on one page that can be sent around. Built from the files of the run folder alone."""

from __future__ import annotations

import base64
import dataclasses
import importlib.resources
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from unirl.observability.atomic import replace_file
from unirl.observability.charts import evenly
from unirl.observability.curves import main_cards, small_cards, time_card
from unirl.observability.flatten import flatten
from unirl.observability.formatting import change, duration, figure
from unirl.observability.health import Check, check_health
from unirl.observability.history import History
from unirl.observability.judges import EVAL, Evaluation, sort_evaluation
from unirl.observability.metrics import SECONDS, read
from unirl.observability.run_folder import RunFolder
from unirl.observability.texts import compare_texts

_MIME = {".webp": "image/webp", ".wav": "audio/wav"}
_MOST_CLIP_BYTES = 8_000_000
_TEMPLATE = "report.html.j2"
_MOST_GRIDS = 8
# What a figure is to the run.
_TRAINED, _JUDGE, _SCORER = "trained reward", "judge outside of the reward", "evaluation"
_DIVERSITY, _HELD_OUT_LOSS = "diversity", "held-out loss"
_PASSED = "chance that the best of k samples is a success"


@dataclasses.dataclass(frozen=True)
class Gain:
    """A figure before and after training. role: what it is to the run; warn: whether it gives cause to worry."""

    role: str
    name: str
    before: float
    after: float
    warn: bool = False

    @property
    def from_to(self) -> tuple[str, str]:
        return figure(self.before), figure(self.after)

    @property
    def change(self) -> str:
        return change(self.before, self.after)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG file, inline."""

    caption: str
    data: str


@dataclasses.dataclass(frozen=True)
class Clip:
    """A video or a sound, inline."""

    caption: str
    mime: str
    data: str


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into `run_folder` and return its path. Works on a run that is unfinished, or still running.

    Raises ValueError where the folder holds no run.
    """
    import jinja2

    folder = RunFolder(run_folder.resolve().parent, run_folder.resolve().name)
    if not folder.config.exists():
        raise ValueError(f"{run_folder} holds no run: {folder.config} does not exist")
    template = importlib.resources.files("unirl.observability").joinpath(_TEMPLATE).read_text()
    # Prompts, paths and recipes are other people's text: everything is escaped but the charts, which escape themselves.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template).render(_content(folder))
    replace_file(folder.report, page.encode())
    return folder.report


def _content(folder: RunFolder) -> dict[str, Any]:
    config = folder.config.read_text()
    settings = flatten(yaml.safe_load(config) or {})
    history = History(read(folder.metrics))
    evaluation = sort_evaluation(history, settings)
    checks = check_health(history, evaluation)
    gains = _gains(history, evaluation, checks)
    grids = sorted(path for path in folder.samples.glob("*.png") if path != folder.before_after)
    shown = evenly(grids, _MOST_GRIDS)
    info = folder.read_info() if folder.info.exists() else None
    return {
        "name": folder.name,
        "subtitle": _subtitle(settings, history, info),
        "verdict": _verdict(settings, history, gains, checks),
        "gains": gains,
        "checks": checks,
        "warned": [check for check in checks if check.state == "warn"],
        "before_after": _before_after(folder, grids),
        "texts": compare_texts(folder.samples),
        "main_cards": main_cards(history, evaluation),
        "small_cards": small_cards(history, evaluation),
        "time_card": time_card(history),
        "grids": [_picture(path) for path in shown],
        "grids_left_out": len(grids) - len(shown),
        "clips": _clips(folder),
        "config": config,
        "facts": _facts(info, settings),
    }


def _gains(history: History, evaluation: Evaluation, checks: list[Check]) -> list[Gain]:
    """The figures that tell whether training worked, most telling first."""
    warned = {check.topic for check in checks if check.state == "warn"}
    judge = _JUDGE if evaluation.trained else _SCORER
    roles = [(_TRAINED, evaluation.trained[:1]), (judge, evaluation.judges)]
    # The least and the largest k tell it all: what one sample is worth, and what the model can do at all.
    roles += [(_PASSED, list(dict.fromkeys([*evaluation.passes[:1], *evaluation.passes[-1:]])))]
    roles += [(_DIVERSITY, evaluation.diversity)]
    if "reward/mean" not in history:
        roles.append((_HELD_OUT_LOSS, [name for name in evaluation.others if name == f"{EVAL}loss"]))
    gains = []
    for role, names in roles:
        for name in names:
            points, short = history.finite(name), name.removeprefix(EVAL)
            if len(points) > 1:
                gains.append(Gain(role, short, points[0][1], points[-1][1], role != _TRAINED and short in warned))
    metric, role, short = (
        ("reward/mean", "reward of the training rollouts", "reward")
        if "reward/mean" in history
        else ("train/loss", "training loss", "loss")
    )
    if history.finite(metric):
        count = history.tenth(metric)
        role = f"{role} (mean of the first and of the last {count} steps)" if count > 1 else role
        gains.append(Gain(role, short, history.opening(metric), history.closing(metric)))
    return gains


def _verdict(settings: dict[str, Any], history: History, gains: list[Gain], checks: list[Check]) -> str:
    """One paragraph: what was trained, what it brought, and whether it can be believed."""
    algorithm, steps = _algorithm(settings), history.last_step
    if not history.names():
        return f"{algorithm} has not finished a step yet."
    planned = settings.get("run.steps", steps)
    sentences = [f"{algorithm} trained {steps:,} steps."]
    if planned != steps:
        sentences = [f"{algorithm} has trained {steps:,} of {planned:,} steps; the same command continues it."]
    by_role: dict[str, list[Gain]] = {}
    for gain in gains:
        by_role.setdefault(gain.role, []).append(gain)
    for role, group in by_role.items():
        heard = "; ".join(f"{gain.name} {_went(gain)}" for gain in group)
        if role == _TRAINED:
            sentences.append(f"On the evaluation prompts the trained reward ({group[0].name}) {_went(group[0])}.")
        elif role == _JUDGE:
            parted = any(gain.warn for gain in group)
            agree = "part from it, so the gain may be a hacked one" if parted else "agree"
            sentences.append(f"Judges outside of the reward {agree}: {heard}.")
        elif role == _SCORER:
            sentences.append(f"On the evaluation prompts {heard}.")
        elif role == _PASSED:
            sentences.append(f"{heard}.")
        elif role == _DIVERSITY:
            sentences += [f"{_capital(gain.name)} {_went(gain)}{_kept(gain)}." for gain in group]
        elif _TRAINED not in by_role:
            sentences.append(f"The {role} {_went(group[0])}.")
    if restarts := history.finite("run/restarts"):
        count = max(count for _, count in restarts)
        sentences.append(f"{count:,.0f} {'restart' if count == 1 else 'restarts'} replaced lost workers.")
    return " ".join([*sentences, _health_sentence(checks)])


def _health_sentence(checks: list[Check]) -> str:
    judged = [check for check in checks if check.state != "info"]
    warned = [check.topic for check in judged if check.state == "warn"]
    if warned:
        return f"{len(warned)} of {len(judged)} health checks warn: {', '.join(warned)}."
    return f"All {len(judged)} health checks are fine." if len(judged) > 1 else "The health check is fine."


def _kept(gain: Gain) -> str:
    return f", {gain.after / gain.before:.0%} of what it was" if gain.before > 0 and gain.after != gain.before else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _went(gain: Gain) -> str:
    verb = "rose" if gain.after > gain.before else "fell" if gain.after < gain.before else "stayed"
    before, after = gain.from_to
    return f"{verb} from {before} to {after} ({gain.change})" if verb != "stayed" else f"stayed at {after}"


def _algorithm(settings: dict[str, Any]) -> str:
    """The algorithm's name as the subject of a sentence."""
    if "algorithm._target_" in settings:
        return str(settings["algorithm._target_"]).rpartition(".")[2]
    return "Supervised fine-tuning" if "domain" in settings and settings["domain"] in ("sft", "text_sft") else "The run"


def _subtitle(settings: dict[str, Any], history: History, info: dict[str, Any] | None) -> list[str]:
    names = [
        str(settings[key]).rpartition(".")[2] for key in ("algorithm._target_", "model._target_") if key in settings
    ]
    parts = [" on ".join(names)] if names else []
    parts.append(f"{history.last_step:,} steps")
    seconds = [value for _, value in history.finite(f"{SECONDS}step")]
    if seconds:
        parts.append(duration(sum(seconds)))
    if info is not None:
        parts += [f"seed {info['seed']}", info["started"][:16].replace("T", " ") + " UTC"]
    return parts


def _facts(info: dict[str, Any] | None, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what it takes to repeat the run."""
    if info is None:
        return []
    facts = [("command", shlex.join(info["command"])), ("seed", str(info["seed"])), ("started", info["started"])]
    if info["git"] is not None:
        changed = {True: ", with changes that are not committed", False: "", None: ""}[info["git"]["modified"]]
        facts.append(("git commit", f"{info['git']['commit']}{changed}"))
    facts += list(info["versions"].items())
    facts += [("continued", f"{again['started']} by {shlex.join(again['command'])}") for again in info["resumed"]]
    return facts


def _before_after(folder: RunFolder, grids: list[Path]) -> list[Picture]:
    """The grid made for it; else the first and the last evaluation, which draw the same prompts from the same noise."""
    if folder.before_after.exists():
        return [_picture(folder.before_after)]
    evaluations = [path for path in grids if path.name.startswith("eval_")]
    if len(evaluations) < 2:
        return []
    before, after = _picture(evaluations[0]), _picture(evaluations[-1])
    return [
        dataclasses.replace(before, caption=f"before ({before.caption})"),
        dataclasses.replace(after, caption=f"after ({after.caption})"),
    ]


def _clips(folder: RunFolder) -> list[Clip]:
    """Videos and sounds of the last evaluation, as far as they fit."""
    found = sorted(path for path in folder.samples.glob("eval_*_prompt_*") if path.suffix in _MIME)
    last = [path for path in found if path.name.split("_")[1] == found[-1].name.split("_")[1]]
    clips, left = [], _MOST_CLIP_BYTES
    for path in last:
        left -= path.stat().st_size
        if left < 0:
            break
        step, prompt = (int(part) for part in path.stem.removeprefix("eval_").split("_prompt_"))
        data = base64.b64encode(path.read_bytes()).decode()
        clips.append(Clip(f"step {step:,}, prompt {prompt + 1}", _MIME[path.suffix], data))
    return clips


def _picture(path: Path) -> Picture:
    step = re.search(r"(\d+)$", path.stem)
    caption = f"step {int(step[1]):,}" if step else path.stem.replace("_", " ")
    return Picture(caption, base64.b64encode(path.read_bytes()).decode())
