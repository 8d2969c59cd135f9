"""Any Python callable as a scorer: nothing to register, nothing to subclass."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from unirl.config.imports import import_named
from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class FunctionScorer(Scorer):
    """Calls `function`, a `module:name`, with the list of ScorerInput; it returns one float a sample, NaN for no score.

    Range and unit are the function's own. The module is an installed one or a file in the current directory
    (`my_rewards:brightness` is `brightness` in ./my_rewards.py); it is imported when the recipe is checked.
    """

    function: str

    def __post_init__(self) -> None:
        _ = self._callable  # a name that does not resolve is found before anything is loaded

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return self._callable(samples)

    @functools.cached_property
    def _callable(self) -> Callable[[list[ScorerInput]], list[float]]:
        module_name, colon, name = self.function.partition(":")
        if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
            raise ValueError(
                f"function must read 'module:name', got {self.function!r}; a function in ./my_rewards.py is "
                "my_rewards:its_name"
            )
        module = _import(module_name, self.function)
        try:
            found = getattr(module, name)
        except AttributeError:
            hint = _nearest(name, [known for known in vars(module) if not known.startswith("_")])
            raise ValueError(f"function {self.function!r}: {module_name} has no {name!r}{hint}") from None
        return _checked(found, self.function)


def _checked(found: Any, function: str) -> Callable[[list[ScorerInput]], list[float]]:
    if isinstance(found, type):
        raise ValueError(f"function {function!r} is a class: name a Scorer by its _target_, and here a function")
    if not callable(found):
        raise ValueError(f"function {function!r} is a {type(found).__name__}, which cannot be called")
    if inspect.iscoroutinefunction(found):
        raise ValueError(f"function {function!r} is async: a scorer returns its scores, wrap it in asyncio.run")
    try:
        inspect.signature(found).bind([])
    except TypeError as error:
        raise ValueError(f"function {function!r} must take one argument, the list of samples: {error}") from None
    return cast(Callable[[list[ScorerInput]], list[float]], found)


def _import(module_name: str, function: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file here must not hide an installed package
    importlib.invalidate_caches()
    try:
        return import_named(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ValueError(
                f"function {function!r}: {module_name} needs {missing!r}, which is not installed"
            ) from error
        hint = _nearest(missing, _siblings(missing))
        raise ValueError(f"function {function!r}: there is no module {missing!r}{hint}") from None
    except ImportError as error:
        raise ValueError(f"function {function!r}: cannot import {module_name} ({error})") from error
    except ValueError as error:
        raise ValueError(f"function {function!r}: {error}") from error


def _siblings(module_name: str) -> list[str]:
    """Names of the modules that stand beside `module_name`, which does not exist itself."""
    parent, dot, _ = module_name.rpartition(".")
    if not dot:
        return [found.name for found in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(parent)
    paths = spec.submodule_search_locations if spec else None
    return [f"{parent}.{found.name}" for found in pkgutil.iter_modules(paths or [])]


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" (nearest: {', '.join(close)})" if close else ""
