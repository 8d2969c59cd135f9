"""Import of modules that users write."""

from __future__ import annotations

import importlib
import itertools
import traceback
from types import ModuleType


def import_named(module_name: str) -> ModuleType:
    """The module. ValueError with file, line and cause for what its code raises, but for an ImportError."""
    try:
        return importlib.import_module(module_name)
    except ImportError:
        raise
    except Exception as error:  # a module of the user's may raise anything
        cause = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ValueError(f"cannot import {module_name}: {_place(error)}{type(error).__name__}: {cause}") from error


def _place(error: Exception) -> str:
    """`file:line: ` in the module that was being imported; empty where not even its file could be read."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    innermost_first = reversed(traceback.extract_tb(error.__traceback__))
    own = list(itertools.takewhile(lambda frame: not frame.filename.startswith("<frozen importlib"), innermost_first))
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
