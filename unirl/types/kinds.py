"""Kinds of media: what models make and scorers read. Imports no torch: scorer processes start with it."""

from __future__ import annotations

from typing import Literal

Kind = Literal["picture", "video", "sound", "text"]
# Of a sample and of what its prompt comes with; frames: of a video, or a picture as the only one.
Read = Literal[Kind, "frames", "source"]
