"""Which model families there are, and what each says of itself: `unirl models`, and docs/models.md."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import textwrap
from pathlib import Path
from typing import Any

import unirl.models.diffusion
import unirl.models.language
import unirl.models.tiny
import unirl.models.tiny_language
from unirl.config.error import nearest
from unirl.models import base
from unirl.models.base import DiffusionFamily, LanguageFamily

PAGE = Path("docs", "models.md")
_WIDTH = 120
_SHOWN_TARGETS = 4
_REQUIRED = "required"
_AXES = {"sp": "context", "tp": "tensor", "ep": "expert"}

_INTRODUCTION = """\
# Models

{count} families: {kinds}. This page is what their code says of itself: `make docs` writes it anew, and
`unirl models` and `unirl models NAME` print it. A recipe names a family by its path:

```yaml
model: {{_target_: unirl.models.diffusion.sd3.SD3, checkpoint: stabilityai/stable-diffusion-3.5-medium}}
```

Parameters are those of the transformer, in the order of the checkpoints. Gated: the hub asks for consent first.
Parallel: the plans of its library that training can use, `placement.sp` (context), `placement.tp` (tensor) and
`placement.ep` (expert, of checkpoints that are mixtures of experts).
[Add a model family](add-a-model.md) tells how to write another.
"""

Family = type[base.Family]


def families() -> dict[str, Family]:
    """Every family that a recipe can name, by class name; in the order of kinds, and in each by the alphabet."""
    modules = [unirl.models.tiny, unirl.models.tiny_language]
    for package in (unirl.models.diffusion, unirl.models.language):
        found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        # Modules of `nn.Module` classes load torch, and hold no family.
        modules += [importlib.import_module(module.name) for module in found if not module.name.endswith("_modules")]
    own = [cls for module in modules for cls in vars(module).values() if _is_family(cls, module.__name__)]
    return {cls.__name__: cls for cls in sorted(own, key=lambda cls: (kind(cls), cls.__name__.lower()))}


def find_family(name: str) -> Family:
    """The family of that name, in capitals or not. ValueError, with the nearest names, for one that there is not."""
    known = families()
    same = [family for own, family in known.items() if own.lower() == name.lower()]
    if not same:
        raise ValueError(f"no model family {name!r}; {nearest(name, known)}")
    return same[0]


def kind(family: Family) -> str:
    """The first word of what it makes: image, video."""
    return family.facts.makes.replace(",", " ").split()[0]


def by_kind() -> dict[str, list[str]]:
    """Names of the families of each kind."""
    found: dict[str, list[str]] = {}
    for name, family in families().items():
        found.setdefault(kind(family), []).append(name)
    return found


def facts(family: Family) -> dict[str, str]:
    """What a person wants to know of a family, each in one line; `needs` and `advice` only where there is any."""
    told = family.facts
    lines = {
        "makes": told.makes,
        "parameters": told.parameters,
        "checkpoints": ", ".join(told.checkpoints) or "none published",
        "licence": f"{told.licence}; gated" if told.gated else told.licence,
        "guidance": told.guidance,
        "blocks to shard": ", ".join(family.block_names),
        "LoRA targets": ", ".join(family.lora_targets),
        "parallel": ", ".join(_AXES[axis] for axis in told.plans) or "none",
        "needs": ", ".join(told.needs),
        "advice": told.advice,
    }
    return {label: line for label, line in lines.items() if line}


def settings(family: Family) -> list[tuple[str, str, str]]:
    """Name, type and default of each setting; the default as a recipe writes it, `required` where there is none."""
    assert dataclasses.is_dataclass(family)
    fields = dataclasses.fields(family)
    written = [json.dumps(_default(field), default=str, ensure_ascii=False).strip('"') for field in fields]
    return [(field.name, str(field.type), value) for field, value in zip(fields, written, strict=True)]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is dataclasses.MISSING else field.default


def description(family: Family) -> str:
    """Its docstring, then those of the classes that it shares with others."""
    contracts = (base.Family, DiffusionFamily, LanguageFamily)
    shared = [cls for cls in family.__mro__ if issubclass(cls, base.Family) and cls not in contracts]
    return "\n\n".join(inspect.cleandoc(cls.__doc__ or "") for cls in shared)


def overview() -> str:
    """All families as a terminal shows them."""
    return "\n".join(f"{name}\n{_lines(_shortened(family))}" for name, family in families().items())


def details(name: str) -> str:
    """One family as a terminal shows it, with its settings. ValueError for one that there is not."""
    family = find_family(name)
    rows = [("setting", "type", "default"), *settings(family)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "".join(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}\n" for row in rows)
    text = textwrap.indent(description(family), "  ")
    return f"{family.__name__}  ({_path(family)})\n\n{text}\n\n{_lines(facts(family))}\n{table}"


def page() -> str:
    """docs/models.md."""
    found, kinds = families(), by_kind()
    counts = ", ".join(f"{len(names)} for {kind}" for kind, names in kinds.items())
    parts = [_INTRODUCTION.format(count=len(found), kinds=counts)]
    columns = ("makes", "parameters", "licence", "guidance", "parallel")
    for title, names in kinds.items():
        told = {name: facts(found[name]) for name in names}
        known = [column for column in columns if all(column in lines for lines in told.values())]
        rows = [(f"[{name}](#{name.lower()})", *(told[name][column] for column in known)) for name in names]
        parts.append(f"## {title.capitalize()}\n\n{_markdown(('family', *known), rows)}")
    return "\n".join([*parts, "## Each family\n", *map(_section, found.values())])


def _is_family(cls: object, module: str) -> bool:
    """Whether it is a family with facts that this module defines: not imported, and no base of several."""
    own = isinstance(cls, type) and issubclass(cls, base.Family) and cls.__module__ == module
    return own and "facts" in vars(cls)


def _path(family: Family) -> str:
    return f"{family.__module__}.{family.__name__}"


def _shortened(family: Family) -> dict[str, str]:
    lines, more = facts(family), len(family.lora_targets) - _SHOWN_TARGETS
    if more > 0:
        lines["LoRA targets"] = f"{', '.join(family.lora_targets[:_SHOWN_TARGETS])} and {more} more"
    return lines


def _lines(told: dict[str, str]) -> str:
    width = max(map(len, told)) + 2
    return "".join(
        textwrap.fill(
            line,
            _WIDTH,
            initial_indent=f"  {label:<{width}}",
            subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
        + "\n"
        for label, line in told.items()
    )


def _section(family: Family) -> str:
    listed = "".join(f"- {label}: {line}\n" for label, line in facts(family).items())
    rows = [tuple(f"`{cell}`" for cell in row) for row in settings(family)]
    table = _markdown(("setting", "type", "default"), rows)
    return f"### {family.__name__}\n\n`{_path(family)}`\n\n```text\n{description(family)}\n```\n\n{listed}\n{table}"


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
