"""Pictures, videos and sounds of a message: raw bytes, or pictures as files, measured before they are decoded.

    raw   {kind: image | source | video | audio, encoding: raw, dtype, shape, rate?, data}
    file  {kind: image | source, encoding: png | jpeg | webp, data}

A file of a few bytes can hold gigabytes of one colour: what a request decodes to may be as large as its body.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import math
import struct
from typing import Any

import numpy as np

_KINDS = {"image": ("uint8", 3), "source": ("uint8", 3), "video": ("uint8", 4), "audio": ("float32", 2)}
_PICTURES = ("image", "source")
_FILES = ("png", "jpeg", "webp")
_RAW_FIELDS = {"kind", "encoding", "dtype", "shape", "rate", "data"}
_FILE_FIELDS = {"kind", "encoding", "data"}
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}  # of 8 bits or less, that RGB can hold


class Malformed(ValueError):
    """A message that is not of this protocol."""


class TooLarge(ValueError):
    """A message that holds more than it may."""


@dataclasses.dataclass
class Room:
    """Bytes that the files of a request may still decode to, of `most`."""

    most: int
    left: int

    def take(self, size: int, where: str) -> None:
        if size > self.left:
            raise TooLarge(f"{where}: the pictures of a request are {self.most} bytes decoded at most (max_body_mb)")
        self.left -= size


def raw(kind: str, array: np.ndarray, rate: float | None) -> dict[str, Any]:
    """The medium of an array; its bytes are not copied."""
    array = np.ascontiguousarray(array)
    data = array.reshape(-1).view(np.uint8).data
    return {
        "kind": kind,
        "encoding": "raw",
        "dtype": array.dtype.name,
        "shape": array.shape,
        "rate": rate,
        "data": data,
    }


def parsed_medium(medium: object, where: str, room: Room) -> tuple[str, np.ndarray, float | int | None]:
    """Kind, array that cannot be written to, and rate; `data` is bytes, or base64 of them as text."""
    if not isinstance(medium, dict):
        raise Malformed(f"{where}: a medium is a mapping of {sorted(_RAW_FIELDS)}")
    kind, encoding = field(medium, "kind", str, where), field(medium, "encoding", str, where)
    known = _RAW_FIELDS if encoding == "raw" else _FILE_FIELDS
    if kind not in _KINDS or (encoding != "raw" and (kind not in _PICTURES or encoding not in _FILES)):
        raise Malformed(
            f"{where}: a raw image, source, video or audio is known, and a picture as {', '.join(_FILES)}, got "
            f"{encoding!r} {kind!r}"
        )
    if not set(medium) <= known:
        raise Malformed(f"{where}: unknown {sorted(set(medium) - known)}; {encoding} has {sorted(known)}")
    data = _bytes(field(medium, "data", bytes | str, where), where)
    if encoding != "raw":
        return kind, _decoded(data, encoding, where, room), None
    return kind, _array(medium, kind, data, where), _rate(medium, where)


def field(mapping: dict[str, Any], key: str, kind: Any, where: str) -> Any:
    """`mapping[key]`, which must be there and of that kind."""
    if key not in mapping:
        raise Malformed(f"{where}: {key} is missing")
    if not isinstance(mapping[key], kind):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise Malformed(f"{where}.{key} must be {name}, got {type(mapping[key]).__name__}")
    return mapping[key]


def _bytes(data: bytes | str, where: str) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{where}: data is no base64: {error}") from None


def _array(medium: dict[str, Any], kind: str, data: bytes, where: str) -> np.ndarray:
    dtype, shape = field(medium, "dtype", str, where), field(medium, "shape", list, where)
    known, dimensions = _KINDS[kind]
    if dtype != known or len(shape) != dimensions or not all(type(size) is int and size >= 0 for size in shape):
        raise Malformed(f"{where}: {kind} is {known} of {dimensions} dimensions, got {dtype!r} {shape!r}")
    if kind != "audio" and shape[-1] != 3:
        raise Malformed(f"{where}: {kind} has 3 channels last, got {shape!r}")
    if math.prod(shape) * np.dtype(known).itemsize != len(data):
        raise Malformed(f"{where}: {len(data)} bytes do not fill {shape!r} {known}")
    # Over bytes, an array cannot be written to.
    return np.frombuffer(data, dtype=known).reshape(shape)


def _rate(medium: dict[str, Any], where: str) -> float | int | None:
    rate = medium.get("rate")
    if not (rate is None or (type(rate) in (int, float) and 0 < rate < math.inf)):
        raise Malformed(f"{where}: rate must be positive, got {rate!r}")
    return rate


def _decoded(data: bytes, encoding: str, where: str, room: Room) -> np.ndarray:
    """`(H, W, 3)` uint8 of a file with one picture; transparency is dropped, as from files of prompts."""
    from PIL import Image

    try:
        # Its head alone is read here. No format but the one that is named: each is code that can be attacked.
        with Image.open(io.BytesIO(data), formats=[encoding]) as file:
            room.take(3 * file.width * file.height, where)
            if file.mode not in _MODES or _frames(file) != 1:
                raise Malformed(f"{where}: one picture of 8 bits, got mode {file.mode} and {_frames(file)} frames")
            picture = np.array(file.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"{where}: {error}") from None
    except (Malformed, TooLarge):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise Malformed(f"{where}: no {encoding}: {type(error).__name__}: {error}") from None
    picture.setflags(write=False)
    return picture


def _frames(file: Any) -> int:
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    return file.n_frames if isinstance(file, PngImageFile | WebPImageFile) else 1
