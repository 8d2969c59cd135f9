"""The `unirl` command. A subcommand is a function and its line in `COMMANDS`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import unirl
from unirl.config.compose import composed_yaml
from unirl.config.error import ConfigError
from unirl.config.recipes import shipped_recipes
from unirl.config.run import load_recipe, prepare_process


def check(recipe: str, overrides: list[str]) -> None:
    """Tell whether a recipe would run, without running it."""
    prepare_process()
    load_recipe(recipe, overrides)
    print(f"ok: {recipe}")


def recipes(name: str | None) -> None:
    """List the shipped recipes, or show one as it is composed."""
    if name is not None:
        print(composed_yaml(name), end="")
        return
    found = shipped_recipes()
    width = max(map(len, found))
    for recipe, description in found.items():
        print(f"{recipe:<{width}}  {description}")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a subcommand: what `ArgumentParser.add_argument` takes."""

    name: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: `run` takes the arguments by name; its docstring is the help."""

    run: Callable[..., None]
    arguments: tuple[Argument, ...]


RECIPE = Argument("recipe", {"help": "a shipped recipe such as diffusion/digits, or a YAML file"})
OVERRIDES = Argument("overrides", {"nargs": "*", "metavar": "key=value", "help": "settings to change: run.steps=10"})

COMMANDS = {
    "check": Command(check, (RECIPE, OVERRIDES)),
    "recipes": Command(recipes, (Argument("name", {"nargs": "?", "help": "show this recipe as it is composed"}),)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 2 is the exit code of a mistake in the command line or the recipe."""
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
        COMMANDS[arguments.pop("command")].run(**arguments)
    except ConfigError as error:
        sys.stderr.write(error.report())
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
