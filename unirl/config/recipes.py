"""Which recipes are shipped, and which config class reads a recipe of each domain."""

from __future__ import annotations

import importlib.resources

# What a recipe gives as `domain` -> the class of its settings, imported when needed.
DOMAINS = {
    "ar": "unirl.trainer.ar.ARConfig",
    "diffusion": "unirl.trainer.diffusion.DiffusionConfig",
    "sft": "unirl.trainer.flow_sft.SFTConfig",
    "text_sft": "unirl.trainer.text_sft.TextSFTConfig",
}
_ENTRIES = {"text_sft": "sft"}

PACKAGE = "unirl.recipes"


def entry(domain: str) -> str:
    """The folder of the domain's shipped recipes, and the NAME of its `python -m unirl.train_NAME`."""
    return _ENTRIES.get(domain, domain)


def shipped_recipes() -> dict[str, str]:
    """Names such as `diffusion/digits`, each with its description: the first comment that is no Hydra directive."""
    root = importlib.resources.files(PACKAGE)
    found: dict[str, str] = {}
    for folder in dict.fromkeys(map(entry, DOMAINS)):
        for file in sorted(root.joinpath(folder).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".yaml"):
                found[f"{folder}/{file.name.removesuffix('.yaml')}"] = _description(file.read_text(encoding="utf-8"))
    return found


def _description(text: str) -> str:
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next((comment for comment in comments if not comment.startswith("@package")), "")
