"""Heavy packages are imported when first used: a recipe is checked without loading torch."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

HEAVY = (
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "jaxtyping",
    "safetensors",
    "huggingface_hub",
    "scipy",
    "sklearn",
    "PIL",
)

# What `import x` asks of a known module, `isinstance` of any object, and `inspect` of all modules there are.
_QUIET = frozenset(
    {"__spec__", "__class__", "__name__", "__file__", "__loader__", "__package__", "__warningregistry__"}
)


def defer_heavy_imports() -> None:
    """From now on `import torch` (and the rest of `HEAVY`) binds a module that loads when it is asked for an attribute.

    What is loaded already, or not installed, stays as it is. `from torch import nn` and `import torch.nn` load at once.
    The first use must be on one thread: a second one would see the module half loaded.
    """
    # importlib.util.LazyLoader does not do: `import torch` reads `__spec__` of a known module, which makes it load.
    for name in HEAVY:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _DeferredModule
            sys.modules[name] = module
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _DeferredModule(types.ModuleType):
    """A module before it is executed. It is executed in place, so that all who hold it hold the loaded module."""

    def __getattribute__(self, name: str) -> Any:
        if name in _QUIET:
            return object.__getattribute__(self, name)
        _execute(self)
        return getattr(self, name)


def _execute(module: types.ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    module.__class__ = types.ModuleType
    spec.loader.exec_module(module)
    successor = sys.modules[spec.name]
    if successor is not module:  # transformers and diffusers put an object of their own in their place
        module.__dict__["__getattr__"] = partial(getattr, successor)


class _LoadedByParent(MetaPathFinder, Loader):
    """`import torch.nn` asks the deferred torch for its path, which loads torch and torch.nn with it: take that one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        is_reload = target is not None
        if is_reload or fullname.partition(".")[0] not in HEAVY or fullname not in sys.modules:
            return None
        return ModuleSpec(fullname, self, loader_state=sys.modules[fullname].__spec__)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_FINDER = _LoadedByParent()
