"""Texts of an evaluation as a file: prompts with what was written to them, and its rewards."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.observability.atomic import replace_file


def write_texts(file: Path, prompts: list[str], texts: list[str], rewards: list[float]) -> None:
    """A JSON line for each text; of each prompt as many, siblings next to each other."""
    samples = len(texts) // len(prompts)
    lines = [
        json.dumps({"prompt": prompts[row // samples], "text": text, "reward": reward}, ensure_ascii=False)
        for row, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]
    replace_file(file, "".join(f"{line}\n" for line in lines).encode())
