"""Which recipes are shipped, and which config class reads a recipe of each domain."""

from __future__ import annotations

import importlib.resources

# What a recipe gives as `domain` (its folder, for a shipped one) -> the class of its settings, imported when needed.
DOMAINS = {
    "ar": "unirl.trainer.ar.ARConfig",
    "diffusion": "unirl.trainer.diffusion.DiffusionConfig",
    "sft": "unirl.trainer.sft.SFTConfig",
}

PACKAGE = "unirl.recipes"


def shipped_recipes() -> dict[str, str]:
    """Names such as `diffusion/digits`, each with its description: the first comment that is no Hydra directive."""
    root = importlib.resources.files(PACKAGE)
    found: dict[str, str] = {}
    for domain in DOMAINS:
        for file in sorted(root.joinpath(domain).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".yaml"):
                found[f"{domain}/{file.name.removesuffix('.yaml')}"] = _description(file.read_text(encoding="utf-8"))
    return found


def _description(text: str) -> str:
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next((comment for comment in comments if not comment.startswith("@package")), "")
