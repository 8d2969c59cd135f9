"""`_target_: module.Class` names the class of a section."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import sys
from typing import Any

from unirl.config.error import ConfigError, nearest, problem, shown
from unirl.config.imports import import_named


def target_class(target: Any, base: type, path: str) -> type:
    """The class that `target` names: a concrete dataclass and a `base`.

    Raises `ConfigError` at `path` where it is none, cannot be imported, or is a class of another kind.
    """
    if not isinstance(target, str) or "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise problem(path, f"expected module.Class, got {shown(target)}; name a {base.__name__}")
    module_name, _, name = target.rpartition(".")
    namespace = _import_namespace(module_name, path)
    if name not in namespace:
        # `isinstance(value, type)` would ask a module that is not loaded yet for its __class__
        classes = [key for key, value in namespace.items() if issubclass(type(value), type) and issubclass(value, base)]
        raise problem(path, f"module {module_name} has no class '{name}'; {nearest(name, classes)}")
    cls = namespace[name]
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise problem(path, f"{target} is not a {base.__name__}; name a subclass of {base.__module__}.{base.__name__}")
    if inspect.isabstract(cls):
        raise problem(path, f"{target} is abstract; name a concrete {base.__name__}")
    if not dataclasses.is_dataclass(cls):
        raise problem(path, f"{target} has no settings; make it a dataclass (@dataclasses.dataclass(frozen=True))")
    return cls


def _import_namespace(module_name: str, path: str) -> dict[str, Any]:
    try:
        return vars(import_named(module_name))
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _unknown_module(error.name, path) from error
        raise problem(path, f"cannot import {module_name} ({error}); install the package that it needs") from error
    except ImportError as error:
        raise problem(path, f"cannot import {module_name} ({error})") from error
    except ValueError as error:
        raise problem(path, str(error)) from error


def _unknown_module(missing: str, path: str) -> ConfigError:
    """`missing` is the first module of the chain that does not exist."""
    parent, _, name = missing.rpartition(".")
    if not parent:
        return problem(path, f"there is no module '{missing}'; install it, or start where Python finds it")
    namespace = vars(sys.modules[parent])
    siblings = (
        [module.name for module in pkgutil.iter_modules(namespace["__path__"])] if "__path__" in namespace else []
    )
    return problem(path, f"package {parent} has no module '{name}'; {nearest(name, siblings)}")
