"""A recipe and its overrides, composed by Hydra into plain data. The only file that knows Hydra and OmegaConf."""

from __future__ import annotations

import importlib.resources
import os
import re
import secrets
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from unirl.config.error import ConfigError, nearest, problem, shown
from unirl.config.recipes import PACKAGE, shipped_recipes

_VERSION_BASE = "1.3"
_IRRELEVANT = ("See https://", "Config search path", "provider=")
_NO_SUCH_KEY = "To append to"  # Hydra's advice, which strict loading would refuse


def compose(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The resolved plain data of a recipe: a shipped name such as `diffusion/digits`, or a path to a YAML file.

    A file's own folder is searched first, then the shipped recipes. `run.seed: null` becomes the seed of the run's
    folder, or a drawn one, before anything is resolved, so `${run.seed}` follows it; 0 is a seed. Raises `ConfigError`
    for an unknown recipe or group option, a malformed override, and an interpolation that is cyclic or names a missing
    key or environment variable.
    """
    with _errors_of(recipe):
        config = _composed(recipe, overrides)
        _refuse_without_effect(config, overrides)
        _draw_seed(config)
        data = OmegaConf.to_container(config, resolve=True)
    return cast(dict[str, Any], data)


def text_setting(key: str, value: object) -> str:
    """The override that sets `key` to `str(value)`, whatever characters that holds."""
    # Inside quotes Hydra reads a backslash as itself, but before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
    return f"{key}='{escaped}'"


def composed_yaml(recipe: str, overrides: Sequence[str] = ()) -> str:
    """The composed recipe as YAML, interpolations as they are written."""
    with _errors_of(recipe):
        return OmegaConf.to_yaml(_composed(recipe, overrides))


def _composed(recipe: str, overrides: Sequence[str]) -> DictConfig:
    own_folder = [Path(recipe).absolute().parent] if recipe.endswith(".yaml") else []
    folders = [importlib.resources.files(PACKAGE), *own_folder]
    overrides = [_as_hydra(override, folders) for override in overrides]
    if not recipe.endswith((".yaml", ".yml")):
        known = shipped_recipes()
        if recipe not in known:
            raise ConfigError(f"recipe {recipe}: not a shipped one, nor a file (.yaml); {nearest(recipe, known)}")
        with hydra.initialize_config_module(PACKAGE, version_base=_VERSION_BASE):
            return hydra.compose(recipe, overrides)
    file = Path(recipe).absolute()
    if file.suffix != ".yaml":
        raise ConfigError(f"recipe {recipe}: Hydra reads .yaml files only; rename it to {file.stem}.yaml")
    if not file.is_file():
        raise ConfigError(f"recipe {recipe}: there is no such file; shipped ones: {', '.join(shipped_recipes())}")
    with hydra.initialize_config_dir(str(file.parent), version_base=_VERSION_BASE):
        return hydra.compose(file.name, [*overrides, f"hydra.searchpath=[pkg://{PACKAGE}]"])


def _is_group(key: str, folders: Sequence[Traversable]) -> bool:
    """Whether one of the `folders` has options of that name."""
    found = [folder.joinpath(key) for folder in folders]
    return any(option.name.endswith(".yaml") for group in found if group.is_dir() for option in group.iterdir())


def _as_hydra(text: str, folders: Sequence[Traversable]) -> str:
    """`key=value` of no group sets the key, be it in the recipe or not: which keys exist is for the loader to say."""
    try:
        [override] = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise ConfigError(
            f"override '{text}': {_said(error)}; write key=value, and text of special characters as key='text'"
        ) from error
    key = override.key_or_group
    if re.match(r"hydra\b", key):
        raise ConfigError(f"override '{text}': Hydra's own settings have no effect here; leave it out")
    if override.is_sweep_override():
        raise ConfigError(
            f"override '{text}': one run takes one value; write a list as [a,b], text with commas in quotes"
        )
    if override.type is not OverrideType.CHANGE:
        return text
    if override.package is None and not _is_group(key, folders):
        return f"++{text}"
    if not isinstance(override.value(), str | list):
        got = shown(override.value())
        raise ConfigError(f"override '{text}': {key} is a group and takes the name of an option, got {got}")
    return text


def _refuse_without_effect(config: DictConfig, overrides: Sequence[str]) -> None:
    """Hydra merges mappings, so that an empty one changes nothing where there is another."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        filled_by_others = any(other.lstrip("+").startswith(f"{key}.") for other in overrides)
        if value.strip() == "{}" and OmegaConf.select(config, key) and not filled_by_others:
            raise ConfigError(
                f"override '{text}': mappings are merged, so it changes nothing; write ~{key} to empty it"
            )


def _draw_seed(config: DictConfig) -> None:
    OmegaConf.set_struct(config, False)
    run = OmegaConf.select(config, "run")
    if isinstance(run, DictConfig) and OmegaConf.select(run, "seed") is None:
        recorded = _recorded_seed(run)
        run["seed"] = secrets.randbelow(2**31) if recorded is None else recorded


def _recorded_seed(run: DictConfig) -> int | None:
    """The seed that an earlier start drew and wrote down: the same command continues the same run."""
    output, name = OmegaConf.select(run, "output", default="runs"), OmegaConf.select(run, "name")
    if not isinstance(output, str) or not isinstance(name, str):
        return None
    written = Path(os.path.expanduser(output)) / name / "config.yaml"
    return OmegaConf.select(OmegaConf.load(written), "run.seed") if written.is_file() else None


@contextmanager
def _errors_of(recipe: str) -> Generator[None]:
    """Whatever Hydra, OmegaConf and the YAML parser say of a recipe becomes a `ConfigError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # Hydra warns where the order of a recipe is ambiguous
            yield
    except MissingConfigException as error:
        raise _unknown_option(recipe, error) from error
    except OmegaConfBaseException as error:
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        raise problem(error.full_key or f"recipe {recipe}", reason) from error
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"recipe {recipe}: its defaults lists include one another") from error
    except (HydraException, UserWarning, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"recipe {recipe}: {_said(error)}") from error


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).replace("merging override ++", "merging override ").splitlines()]
    if isinstance(error.__cause__, ConfigTypeError):  # a mapping where there is a list, or the reverse
        reason = str(error.__cause__).splitlines()[0]
        lines.append(reason.replace("DictConfig", "a mapping").replace("ListConfig", "a list"))
    advice = "a setting is given as section.key=value, a group by the name of an option"
    lines = [advice if line.startswith(_NO_SUCH_KEY) else line.rstrip(".") for line in lines]
    return "; ".join(line for line in lines if line and not line.startswith(_IRRELEVANT))


def _unknown_option(recipe: str, error: MissingConfigException) -> ConfigError:
    if error.missing_cfg_file is None or error.options is None:
        return ConfigError(f"recipe {recipe}: {_said(error)}")
    group, _, option = error.missing_cfg_file.rpartition("/")
    return ConfigError(f"recipe {recipe}: {group} has no option '{option}'; {nearest(option, error.options)}")
