"""The `unirl` command. A subcommand is a function and its line in `COMMANDS`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import unirl
from unirl.config.compose import compose, composed_yaml
from unirl.config.error import ConfigError, refusals
from unirl.config.load import dump, load
from unirl.config.recipes import shipped_recipes
from unirl.config.run import load_recipe, prepare_process


def check(recipe: str, more: list[str]) -> None:
    """Tell whether a recipe, or several with the same settings, would run, without running it."""
    prepare_process()
    from unirl.observability.run_folder import RunFolder

    recipes = [recipe, *(word for word in more if not _is_override(word))]
    overrides = [word for word in more if _is_override(word)]
    for name in recipes:
        config = load_recipe(name, overrides)
        with refusals():
            RunFolder(config.run.output, config.run.name).refuse_other(dump(config), config.digests)
        print(f"ok: {name}")


def _is_override(word: str) -> bool:
    """`key=value`, or `~key` to leave something out."""
    return "=" in word or word.startswith("~")


def recipes(name: str | None) -> None:
    """List the shipped recipes, or show one as it is composed."""
    if name is not None:
        print(composed_yaml(name), end="")
        return
    found = shipped_recipes()
    width = max(map(len, found))
    for recipe, description in found.items():
        print(f"{recipe:<{width}}  {description}")


def models(name: str | None) -> None:
    """List the model families, or show all about one and its settings."""
    prepare_process()
    from unirl.models.catalogue import details, overview

    with refusals():
        print(overview() if name is None else details(name), end="")


def train(recipe: str, overrides: list[str]) -> int:
    """Start a run, or continue it."""
    prepare_process()
    config = load_recipe(recipe, overrides)
    from unirl.trainer.base import run
    from unirl.trainer.domains import trainer_of

    return run(trainer_of(config))


def quickstart(output: Path, seed: int) -> int:
    """Train two small models, one draws and one writes, on this machine's CPU: from data to report."""
    prepare_process()
    from unirl.trainer.base import reported
    from unirl.trainer.quickstart import PLAN, run_quickstart

    print(PLAN, flush=True)
    return reported(lambda: run_quickstart(output, seed))


def sample(run: Path, prompts: list[str], number: int, seed: int, out: Path | None, step: int | None) -> None:
    """Draw pictures, or write texts, with the weights of a run."""
    prepare_process()
    from unirl.observability.grids import save_grid
    from unirl.trainer.restore import sample_run

    media = sample_run(run, prompts, number, seed=seed, step=step)
    if media.texts is not None:
        if out is not None:
            raise ConfigError(f"--out {out} is a file of pictures, and this run writes texts: they are printed")
        print(*media.texts, sep="\n")
        return
    assert media.images is not None
    captions = [prompt for prompt in prompts for _ in range(number)]
    print(save_grid(media.images, out or run / "samples" / "sample.png", columns=number, captions=captions))


def evaluate(suite: str, out: Path | None, overrides: list[str], **asked: Any) -> None:
    """Sample a suite of prompts, score it, and print a table by skill."""
    prepare_process()
    from unirl.observability.skills import table
    from unirl.trainer import suite_evaluation, suite_folder
    from unirl.trainer.suite import load_suite

    request = suite_evaluation.Asked(overrides=tuple(overrides), **asked)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # told now where it cannot be, not after hours
    found = suite_evaluation.evaluate(request, load_suite(suite))
    folder = out or suite_folder.default_folder(request, found)
    suite_folder.write(request, found, folder)
    print(table(found.tallies()), folder / "evaluation.json", sep="\n")


def report(run: Path) -> None:
    """Write the report of a run anew."""
    prepare_process()
    from unirl.observability.report import write_report

    with refusals():
        print(write_report(run))


def export(run: Path, folder: Path, step: int | None, weights: Literal["live", "ema"] | None) -> None:
    """Write the weights of a run as diffusers (full weights) or peft (adapters) load them."""
    prepare_process()
    from unirl.trainer.restore import export_run

    export_run(run, folder, step=step, weights=weights)
    print(folder)


def serve_reward(config: str, overrides: list[str]) -> int:
    """Serve scorers over HTTP, to any number of runs."""
    prepare_process()
    from unirl.reward.http.config import ServeConfig

    served = load(ServeConfig, compose(config, overrides))
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve-reward needs {', '.join(missing)}: pip install 'unirl[serve]'")
    from unirl.reward.http.server import RewardServer, listening_socket

    with listening_socket(served) as listener:
        server = RewardServer(served)
        host, port = listener.getsockname()[:2]
        print(
            f"serving {', '.join(served.scorers)} on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True
        )
        server.run(listener)
    if server.failure is not None:
        sys.stderr.write(f"error: {server.failure}\n")
    return 0 if server.failure is None else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a subcommand: what `ArgumentParser.add_argument` takes."""

    name: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: `run` takes the arguments by name and may return an exit code; its docstring is the help."""

    run: Callable[..., int | None]
    arguments: tuple[Argument, ...]


RECIPE = Argument("recipe", {"help": "a shipped recipe such as diffusion/digits, or a YAML file"})
OVERRIDES = Argument("overrides", {"nargs": "*", "metavar": "key=value", "help": "settings to change: run.steps=10"})

RUN = Argument("run", {"type": Path, "help": "folder of a run: runs/NAME"})
STEP = Argument("--step", {"type": int, "help": "take this checkpoint; otherwise the newest"})
SEED = Argument("--seed", {"type": int, "default": 0, "help": "key of all noise (default 0)"})

WEIGHTS = Argument("--weights", {"choices": ["live", "ema"], "help": "otherwise those that its evaluations show"})

COMMANDS = {
    "quickstart": Command(
        quickstart,
        (Argument("--output", {"type": Path, "default": Path("runs/quickstart"), "help": "where the runs go"}), SEED),
    ),
    "train": Command(train, (RECIPE, OVERRIDES)),
    "check": Command(
        check,
        (
            RECIPE,
            Argument(
                "more", {"nargs": "*", "metavar": "RECIPE | key=value", "help": "further recipes; settings to change"}
            ),
        ),
    ),
    "recipes": Command(recipes, (Argument("name", {"nargs": "?", "help": "show this recipe as it is composed"}),)),
    "models": Command(models, (Argument("name", {"nargs": "?", "help": "show all about this family, such as SD3"}),)),
    "sample": Command(
        sample,
        (
            RUN,
            Argument("prompts", {"nargs": "+", "metavar": "PROMPT", "help": "one row of pictures each"}),
            Argument("--number", {"type": _positive, "default": 4, "help": "pictures of each prompt (default 4)"}),
            SEED,
            Argument("--out", {"type": Path, "help": "PNG file (default RUN/samples/sample.png)"}),
            STEP,
        ),
    ),
    "evaluate": Command(
        evaluate,
        (
            Argument("model", {"metavar": "run_or_recipe", "help": "folder of a run; a recipe: its untrained model"}),
            OVERRIDES,
            Argument("--suite", {"required": True, "help": "a shipped suite or a file: docs/evaluate.md"}),
            STEP,
            WEIGHTS,
            Argument("--number", {"type": _positive, "help": "samples of each prompt (default: the suite's)"}),
            SEED,
            Argument("--out", {"type": Path, "help": "a folder (default RUN/evaluations/...)"}),
        ),
    ),
    "report": Command(report, (RUN,)),
    "serve-reward": Command(
        serve_reward, (Argument("config", {"help": "a YAML file: docs/rewards-service.md"}), OVERRIDES)
    ),
    "export": Command(
        export,
        (
            RUN,
            Argument("folder", {"type": Path, "help": "a new folder"}),
            STEP,
            WEIGHTS,
        ),
    ),
}


def _reader_left() -> bool:
    """Whether nobody reads standard output any more, as after `unirl recipes | head`; it then leads nowhere."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in watched.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it ends
    return left


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 2 is the exit code of a mistake in the command line or the recipe.

    141 is that of shells for a reader of its output who left before the end.
    """
    parser = argparse.ArgumentParser(prog="unirl", description=unirl.__doc__)
    parser.add_argument("--version", action="version", version=unirl.__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.run.__doc__, description=command.run.__doc__)
        for argument in command.arguments:
            subparser.add_argument(argument.name, **argument.options)
    arguments = vars(parser.parse_args(argv))
    if os.getcwd() not in sys.path:  # as under `python -m`: a `_target_` may name a module of the working directory
        sys.path.insert(0, os.getcwd())
    try:
        code = COMMANDS[arguments.pop("command")].run(**arguments) or 0
        sys.stdout.flush()
        return code
    except ConfigError as error:
        sys.stderr.write(error.report())
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 141
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
