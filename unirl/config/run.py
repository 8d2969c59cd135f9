"""What every entrypoint does first: environment, composition, strict loading."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from typing import Any

from unirl.config.compose import compose
from unirl.config.environment import set_environment
from unirl.config.error import ConfigError, nearest, shown
from unirl.config.lazy import defer_heavy_imports
from unirl.config.load import load
from unirl.config.recipes import DOMAINS, entry


def prepare_process() -> None:
    """Set the environment, and have torch and its kin load when first used: what a program does first of all."""
    set_environment()
    defer_heavy_imports()


def load_recipe(recipe: str, overrides: Sequence[str] = (), domain: str | None = None) -> Any:
    """The typed run config of a recipe: the class of its domain.

    domain: the entrypoint that the recipe must be of; None takes any
    """
    data = compose(recipe, overrides)
    if "domain" not in data:
        raise ConfigError(f"recipe {recipe}: domain: missing; give one of {', '.join(DOMAINS)}")
    named = data["domain"]
    if not isinstance(named, str) or named not in DOMAINS:
        raise ConfigError(f"recipe {recipe}: domain: unknown value {shown(named)}; {nearest(named, DOMAINS)}")
    if domain not in (None, entry(named)):
        command = shlex.join(["python", "-m", f"unirl.train_{entry(named)}", recipe, *overrides])
        raise ConfigError(f"recipe {recipe} is of domain {named}, not {domain}; run `{command}`")
    module, _, name = DOMAINS[named].rpartition(".")
    return load(vars(importlib.import_module(module))[name], data)


def load_run(domain: str, argv: Sequence[str]) -> Any:
    """The run config of a command line `RECIPE [key=value ...]`; a mistake in it ends the program with exit code 2.

    It prepares the process; torch loads when first used, which is after the recipe is accepted.
    """
    parser = argparse.ArgumentParser(prog=f"python -m unirl.train_{domain}")
    parser.add_argument("recipe", help="a shipped recipe (see `unirl recipes`) or a YAML file")
    parser.add_argument("overrides", nargs="*", help="key=value, as in run.steps=10")
    arguments = parser.parse_args(argv)
    prepare_process()
    try:
        return load_recipe(arguments.recipe, arguments.overrides, domain)
    except ConfigError as error:
        parser.exit(2, error.report())
