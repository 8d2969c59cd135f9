"""Does the picture show the text that the prompt puts in quotes? Read by rapidocr on the CPU (extra `unirl[ocr]`)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import statistics
import unicodedata
from typing import Any, Literal

import numpy as np

from unirl.reward.scorer import Scorer, ScorerInput

Rule = Literal["substring", "edit", "exact", "precision"]

_QUOTED = re.compile(r'["“”„]([^"“”„]*)["“”]')
_LINE_HEIGHT = 48  # pixels, what the recogniser reads
_INK = 40  # levels by which some channel of a character differs from the ground
_FRAME_STRIDE = 4  # frames of a video: so many share a latent in most models, and look alike
_WIDEST = 40  # width / height above which a line is a stroke and no text: scaled to the height it would be endless


@dataclasses.dataclass(frozen=True)
class OcrEditSimilarity(Scorer):
    """Similarity of the text in the picture to the first quoted text of the prompt, in [0, 1], higher is better.

    Compared without spaces and case; `d` is the Levenshtein distance. A prompt without quoted text has no score (NaN).

    rule:   substring: 1 if the target occurs in what was read, else 1 - min(d, len(target)) / len(target): the reward
                       of Flow-GRPO and those after it; any amount of text beside the target is free
            edit:      the same without that exception
            precision: 1 - d / the longer length: every missing and every extra character costs
            exact:     1 or 0
    layout: lines: text on an even ground, cut into lines by rules; characters down to 5 pixels high, 25 ms a line
            scene: text anywhere in a photograph, found by rapidocr's detector; needs about 20 pixels, 0.2 s a picture

    A video has the mean similarity of every fourth frame.
    rapidocr 3.10 (Apache-2.0), PP-OCRv6 small models of its wheel (Chinese, English, digits), one picture at a time.
    """

    reads = frozenset({"frames"})

    rule: Rule = "substring"
    layout: Literal["lines", "scene"] = "lines"

    def __post_init__(self) -> None:
        for package in ("rapidocr", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"OcrEditSimilarity needs {package}, which is not installed: pip install 'unirl[ocr]'")

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def read(self, picture: np.ndarray) -> str:
        """The text of a picture `(H, W, 3)` uint8, its lines put together without a break."""
        if self.layout == "scene":
            return self._recognise(picture, detect=True)
        return "".join(self._recognise(line, detect=False) for line in text_lines(picture))

    def _score(self, sample: ScorerInput) -> float:
        target = quoted_text(sample.prompt)
        if target is None:
            return math.nan
        frames = sample.frames[::_FRAME_STRIDE]
        return statistics.fmean(text_score(target, self.read(frame), self.rule) for frame in frames)

    def _recognise(self, picture: np.ndarray, *, detect: bool) -> str:
        bgr = np.ascontiguousarray(picture[..., ::-1])
        # Without detector the result always has texts; with it, None stands for "nothing found".
        return "".join(self._engine(bgr, use_det=detect, use_cls=False, use_rec=True).txts or ())

    @functools.cached_property
    def _engine(self) -> Any:
        from rapidocr import RapidOCR

        return RapidOCR(params={"Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": 1})


def quoted_text(prompt: str) -> str | None:
    """The text between the first pair of double quotes, straight or curly; None without one, or with nothing in it."""
    found = _QUOTED.search(prompt)
    return found[1] if found and found[1].strip() else None


def text_score(target: str, read: str, rule: Rule) -> float:
    """The similarity of `read` to `target` in [0, 1]: `text_score("Hello World", "Helo Wrld", "edit") == 0.8`."""
    target, read = _plain(target), _plain(read)
    if not target:
        raise ValueError("the target text is empty")
    if rule == "exact":
        return float(target == read)
    if rule == "substring" and target in read:
        return 1.0
    distance = levenshtein(target, read)
    longest = max(len(target), len(read)) if rule == "precision" else len(target)
    return 1 - min(distance, longest) / longest


def levenshtein(a: str, b: str) -> int:
    """The fewest insertions, deletions and replacements of a character that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        above, row = row, [i]
        for j, right in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (left != right)))
    return row[-1]


def text_lines(picture: np.ndarray) -> list[np.ndarray]:
    """The lines of text of a picture, each cut out, scaled to the recogniser's height and padded with the ground.

    The ground is the median of the border; a row of pixels without anything else parts two lines. Each is `(48, W, 3)`.
    """
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    ground = np.median(border, axis=0).astype(np.uint8)
    ink = np.abs(picture - ground.astype(np.int16)).max(axis=2) > _INK
    lines = []
    for top, bottom in _bands(ink.any(axis=1)):
        columns = np.flatnonzero(ink[top:bottom].any(axis=0))
        line = picture[top:bottom, columns[0] : columns[-1] + 1]
        if line.shape[1] <= _WIDEST * line.shape[0]:
            lines.append(_padded(line, ground))
    return lines


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).replace(" ", "").casefold()


def _bands(inked: np.ndarray) -> list[tuple[int, int]]:
    """Runs of inked rows as (first, last + 1); a run far lower than the highest is a dot or accent of its neighbour."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inked, [False]]).astype(np.int8))).tolist()
    bands = list(zip(edges[::2], edges[1::2], strict=True))
    highest = max((bottom - top for top, bottom in bands), default=0)
    while len(bands) > 1:
        low = [i for i, (top, bottom) in enumerate(bands) if bottom - top < 0.4 * highest]
        if not low:
            break
        i = low[0]
        gap_above = bands[i][0] - bands[i - 1][1] if i > 0 else math.inf
        gap_below = bands[i + 1][0] - bands[i][1] if i + 1 < len(bands) else math.inf
        first = i - 1 if gap_above < gap_below else i
        bands[first : first + 2] = [(bands[first][0], bands[first + 1][1])]
    return bands


def _padded(line: np.ndarray, ground: np.ndarray) -> np.ndarray:
    from PIL import Image

    height = round(0.7 * _LINE_HEIGHT)
    width = max(1, round(line.shape[1] * height / line.shape[0]))
    scaled = np.asarray(Image.fromarray(line).resize((width, height), Image.Resampling.BICUBIC))
    canvas = np.empty((_LINE_HEIGHT, width + _LINE_HEIGHT, 3), np.uint8)
    canvas[:] = ground
    top, left = (_LINE_HEIGHT - height) // 2, _LINE_HEIGHT // 2
    canvas[top : top + height, left : left + width] = scaled
    return canvas
