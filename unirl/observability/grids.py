"""Sheets of sample pictures, as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from unirl.observability.atomic import replace_file
from unirl.types.media import to_uint8

if TYPE_CHECKING:
    from PIL import Image, ImageFont

T = TypeVar("T")
# The text of one picture, each line with True where it is the reward.
Lines = list[tuple[str, bool]]

# Pixels. A sheet is a white page, so that it reads the same in a light report, a dark chat and on a slide.
_GAP = 8
_SMALLEST_TILE, _LARGEST_TILE = 112, 320
_FONT_SIZE, _LABEL_SIZE, _LINE_HEIGHT = 15, 19, 19
_MOST_LINES = 3
_PAPER, _INK, _FAINT = (255, 255, 255), (28, 30, 33), (120, 124, 130)


def save_grid(
    images: torch.Tensor,
    path: Path,
    *,
    columns: int,
    captions: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
    scale: int | None = None,
) -> Path:
    """Write pictures row by row, `columns` a row.

    images:   `(N, 3, H, W)` in [0, 1]
    captions: N texts, each below its picture; or one a column, above the rows
    rewards:  N figures, each below its picture with two decimals
    scale:    how many pixels a pixel becomes a side, unblended. None enlarges small pictures until they can be seen
              (8 x 8 by 14) and shrinks large ones to 320 pixels
    """
    tiles = _tiles(images, scale)
    if columns < 1:
        raise ValueError(f"a grid needs at least 1 column, got {columns}")
    width, height, columns = tiles[0].width, tiles[0].height, min(columns, len(tiles))
    headers: list[Lines] = []
    if captions is not None and len(captions) == columns < len(tiles):
        headers, captions = _texts(columns, captions, None, width), None
    rows = _in_rows(tiles, columns)
    texts = _in_rows(_texts(len(tiles), captions, rewards, width), columns)
    heights = [height + _text_height(row) for row in texts]
    top = _GAP + _text_height(headers)
    sheet = _page(columns * (width + _GAP) + _GAP, top + sum(heights) + _GAP * len(rows))
    _write_row(sheet, headers, left=_GAP, top=0, width=width)
    for row, lines, row_height in zip(rows, texts, heights, strict=True):
        _paste_row(sheet, row, left=_GAP, top=top)
        _write_row(sheet, lines, left=_GAP, top=top + height, width=width)
        top += row_height + _GAP
    return _save(sheet, path)


def before_after(
    before: torch.Tensor,
    after: torch.Tensor,
    path: Path,
    *,
    prompts: Sequence[str],
    labels: tuple[str, str] = ("before", "after"),
    scale: int | None = None,
) -> Path:
    """Write two sets of pictures made from the same prompts and the same noise, one above the other, a prompt a column.

    before, after: `(P * S, 3, H, W)` in [0, 1]: S samples of each of P prompts, siblings next to each other as in a
                   Part; sample j of a prompt is row j of its column in both halves
    scale:         as in `save_grid`
    """
    count = len(prompts)
    if before.shape != after.shape or count == 0 or len(before) % count:
        raise ValueError(
            f"before {tuple(before.shape)} and after {tuple(after.shape)} must be alike and hold the same number of "
            f"pictures for each of the {count} prompts"
        )
    tiles = _tiles(torch.cat([before, after]), scale)
    halves = [tiles[: len(before)], tiles[len(before) :]]
    width, height, samples = tiles[0].width, tiles[0].height, len(before) // count
    headers = _texts(count, prompts, None, width)
    margin = _LABEL_SIZE + 6 + 2 * _GAP
    head, half = _GAP + _text_height(headers), samples * (height + _GAP)
    sheet = _page(margin + count * (width + _GAP), head + 2 * half + 3 * _GAP)
    _write_row(sheet, headers, left=margin, top=0, width=width)
    top = head + _GAP
    for label, half_tiles in zip(labels, halves, strict=True):
        _write_upwards(sheet, label, left=_GAP, centre=top + (half - _GAP) // 2)
        for row in range(samples):
            _paste_row(sheet, half_tiles[row::samples], left=margin, top=top + row * (height + _GAP))
        top += half + 2 * _GAP
    return _save(sheet, path)


def _tiles(images: torch.Tensor, scale: int | None) -> list[Image.Image]:
    from PIL import Image

    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise ValueError(f"pictures must be (N, 3, H, W) with N of at least 1, got {tuple(images.shape)}")
    if scale is not None and scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    pictures = [Image.fromarray(picture.numpy()) for picture in to_uint8(images.detach())]
    width, height = pictures[0].size
    longest, shortest = max(width, height), min(width, height)
    if scale is None and longest > _LARGEST_TILE:
        fit = _LARGEST_TILE / longest
        shrunk = (max(1, round(width * fit)), max(1, round(height * fit)))
        return [picture.resize(shrunk, Image.Resampling.LANCZOS) for picture in pictures]
    factor = scale or max(1, min(math.ceil(_SMALLEST_TILE / shortest), _LARGEST_TILE // longest))
    return [picture.resize((width * factor, height * factor), Image.Resampling.NEAREST) for picture in pictures]


def _texts(count: int, captions: Sequence[str] | None, rewards: Sequence[float] | None, width: int) -> list[Lines]:
    for name, values in (("captions", captions), ("rewards", rewards)):
        if values is not None and len(values) != count:
            raise ValueError(f"{len(values)} {name} for {count} pictures")
    lines: list[Lines] = [[] for _ in range(count)]
    if captions is not None:
        lines = [[(line, False) for line in _wrap(caption, width)] for caption in captions]
    if rewards is not None:
        lines = [[*text, (f"{reward:.2f}", True)] for text, reward in zip(lines, rewards, strict=True)]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """Lines that fit `width` pixels, at most three; an ellipsis tells that there is more."""
    font, lines, words = _font(), [""], text.split()
    while words:
        longer = f"{lines[-1]} {words[0]}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            words.pop(0)
        elif not lines[-1]:
            cut = next((n for n in range(len(words[0]) - 1, 0, -1) if font.getlength(words[0][:n]) <= width), 1)
            lines[-1], words[0] = words[0][:cut], words[0][cut:]
        elif len(lines) < _MOST_LINES:
            lines.append("")
        else:
            return [*lines[:-1], _ellipsis(lines[-1], width)]
    return [line for line in lines if line]


def _ellipsis(line: str, width: int) -> str:
    while line and _font().getlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line.rstrip()}…"


def _text_height(texts: Sequence[Lines]) -> int:
    most = max((len(lines) for lines in texts), default=0)
    return most * _LINE_HEIGHT + _GAP // 2 if most else 0


def _in_rows(items: list[T], columns: int) -> list[list[T]]:
    return [items[start : start + columns] for start in range(0, len(items), columns)]


def _font(size: int = _FONT_SIZE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _page(width: int, height: int) -> Image.Image:
    from PIL import Image

    return Image.new("RGB", (width, height), _PAPER)


def _paste_row(sheet: Image.Image, tiles: Sequence[Image.Image], *, left: int, top: int) -> None:
    for column, tile in enumerate(tiles):
        sheet.paste(tile, (left + column * (tile.width + _GAP), top))


def _write_row(sheet: Image.Image, texts: Sequence[Lines], *, left: int, top: int, width: int) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(sheet)
    for column, lines in enumerate(texts):
        centre = left + column * (width + _GAP) + width // 2
        for number, (line, is_reward) in enumerate(lines):
            place = (centre, top + _GAP // 2 + number * _LINE_HEIGHT)
            pen.text(place, line, fill=_FAINT if is_reward else _INK, font=_font(), anchor="ma")


def _write_upwards(sheet: Image.Image, label: str, *, left: int, centre: int) -> None:
    from PIL import ImageDraw

    font = _font(_LABEL_SIZE)
    strip = _page(math.ceil(font.getlength(label)) + 2, _LABEL_SIZE + 6)
    ImageDraw.Draw(strip).text((1, 1), label, fill=_INK, font=font)
    turned = strip.rotate(90, expand=True)
    sheet.paste(turned, (left, centre - turned.height // 2))


def _save(sheet: Image.Image, path: Path) -> Path:
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    replace_file(path, buffer.getvalue())
    return path
