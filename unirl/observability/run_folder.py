"""One run on disk: `runs/<name>`.

config.yaml    the resolved recipe           run.json       versions, git commit, command, seed, ...
metrics.jsonl  one line a step               samples/       eval_000010.png ...
checkpoints/   complete or invisible         report.html    self-contained
.lock          held by the program that trains
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import logging
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from unirl import __version__
from unirl.config.error import ConfigError
from unirl.observability.atomic import replace_file
from unirl.observability.flatten import flatten

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "diffusers", "transformers", "peft")
# What may differ when a run is continued, since it changes no number of a step (but for the rounding of other devices):
# keys, and whole nodes.
_FREE_KEYS = ("run.steps", "run.output", "run.async_save", "run.max_restarts", "eval.every")
_FREE_NODES = ("logging.", "placement.", "train.backend.sharding.")
_GIT_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths and records of the run `name` under `root`."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or self.name != Path(self.name).name:
            raise ValueError(f"run.name must be a plain folder name, got {self.name!r}")

    @classmethod
    def open(
        cls,
        root: Path,
        name: str,
        *,
        config: Mapping[str, Any],
        seed: int,
        digests: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> RunFolder:
        """Make the folder for a run of `config` (the resolved recipe as plain data), or go on with it.

        digests: of the data, by the key of the recipe that names it
        command: what was typed; None takes it from the interpreter

        Refuses the folder of another recipe, or of other data, as `refuse_other` does. A run that goes on keeps its
        run.json, to which the new start is added, and takes over those settings of `config` that may differ.
        """
        folder = cls(root, name)
        digests = dict(digests or {})
        folder.refuse_other(config, digests)
        start = _start_record(sys.orig_argv if command is None else command)
        if folder.config.exists() and folder.metrics.exists():
            record = folder.read_info()
            record["resumed"].append(start)
        else:
            record = {"id": secrets.token_hex(8), "seed": seed, **start, "resumed": []}
        record["digests"] = digests
        # The recipe comes last: a folder with a config.yaml is a whole one.
        replace_file(folder.info, (json.dumps(record, indent=2) + "\n").encode())
        replace_file(folder.config, _yaml(config).encode())
        return folder

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other program trains in this folder inside the block; the lock ends with the process, even a killed one.

        ConfigError where another one does. A file system that has no locks is warned of.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path}: another program trains in this folder; wait for its end, or choose another run.name"
                ) from error
            except OSError as error:
                logger.warning("%s cannot be locked (%s): start no second run in the same folder", self.path, error)
            yield

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.root / self.name

    @property
    def config(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.yaml"

    @property
    def info(self) -> Path:
        """Versions, git commit, command, seed, start times, digests of the prompts."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """An empty file that stays; what counts is who has locked it."""
        return self.path / ".lock"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of the sample grids: `eval_000010.png`; the last digits of a name are its step."""
        return self.path / "samples"

    @property
    def before_after(self) -> Path:
        """The grid of `before_after`, where a run writes one."""
        return self.samples / "before_after.png"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """The page that `write_report` writes."""
        return self.path / "report.html"

    def recorded_seed(self) -> int | None:
        """The seed that an earlier start wrote down; None in a new folder. A drawn seed is thus drawn once."""
        return self.read_info()["seed"] if self.info.exists() else None

    def read_info(self) -> dict[str, Any]:
        """run.json. Raises ValueError where it is missing or broken."""
        try:
            return json.loads(self.info.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.info} cannot be read ({error}); without its seed the run cannot go on") from error

    def _read_config(self) -> Mapping[str, Any]:
        try:
            recipe = yaml.safe_load(self.config.read_text())
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.config} cannot be read ({reason}); choose another run.name") from error
        if not isinstance(recipe, Mapping):
            raise ValueError(f"{self.config} holds no recipe; choose another run.name, or delete the folder")
        return recipe

    def refuse_other(self, config: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Raise ValueError where the folder holds another recipe than `config` or a run on data of other digests, or is
        no run at all. Writes nothing.

        A run without a line of metrics was refused while it loaded its model: its recipe may be mended.
        """
        if not self.config.exists():
            entries = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
            # A start that was killed early leaves run.json alone, or a file written aside.
            own = (self.info.name, self.lock.name)
            strangers = [name for name in entries if name not in own and not name.endswith(".tmp")]
            if strangers:
                raise ValueError(
                    f"{self.path} exists and is no run (no config.yaml; it holds {', '.join(strangers[:5])}); "
                    f"choose another run.name, or delete the folder"
                )
            return
        if not self.metrics.exists():
            return
        differing = changed_keys(self._read_config(), config)
        if differing:
            listed = "; ".join(f"{key}: {there} there, {here} here" for key, (there, here) in differing.items())
            raise ValueError(
                f"{self.path} holds a run of another recipe ({listed}); choose another run.name, or delete the folder "
                f"to start anew"
            )
        began_with = {**digests, **self.read_info().get("digests", {})}
        other = [key for key, digest in digests.items() if began_with[key] != digest]
        if other:
            raise ValueError(
                f"{self.path} holds a run that began with other prompts in {' and '.join(other)}; put those back, "
                "choose another run.name, or delete the folder to start anew"
            )


def changed_keys(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The dotted keys in which two recipes differ, with both values; settings that change no number of a step may."""
    # Through YAML and back, as the recipe on disk went: tuples become lists.
    old, new = (flatten(yaml.safe_load(_yaml(recipe)) or {}) for recipe in (there, here))
    return {
        key: (_shown(old, key), _shown(new, key))
        for key in sorted(old.keys() | new.keys())
        if _shown(old, key) != _shown(new, key) and key not in _FREE_KEYS and not f"{key}.".startswith(_FREE_NODES)
    }


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)


def _shown(settings: dict[str, Any], key: str) -> str:
    return json.dumps(settings[key], default=str) if key in settings else "absent"


def _start_record(command: Sequence[str]) -> dict[str, Any]:
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": versions(),
        "git": _git_state(Path.cwd()),
    }


def versions() -> dict[str, str]:
    """Read from the packages' metadata, since importing them takes seconds; what is not installed is left out."""
    found = {"unirl": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the git tree around `folder` and whether tracked files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": None if changes is None else changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
