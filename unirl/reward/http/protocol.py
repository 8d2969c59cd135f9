"""What goes over the wire: msgpack, arrays as their raw bytes, so that a score is that of the picture as it was drawn.

    request  {protocol: 1, scorers: [name], items: [{id, sample, prompt, metadata, text?, media: [...]}]}
    medium   {kind: image | source | video | audio, encoding: raw, dtype, shape, rate?, data}
    reply    {protocol: 1, versions: {scorer: version}, results: {id: {scorer: {score} | {error}}}}

Results are found by the item's id, never by their order. A failure is an error with a message, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from unirl.reward.outcome import Outcome
from unirl.reward.scorer import ScorerInput, Unscored

PROTOCOL = 1
MEDIA_TYPE = "application/msgpack"
KEY_HEADER = "Idempotency-Key"  # equal for the tries of one request: those after the first cost the device nothing
_MOST_ENTRIES = 1 << 20  # of a list or mapping
_KINDS = {"image": ("uint8", 3), "source": ("uint8", 3), "video": ("uint8", 4), "audio": ("float32", 2)}
_ITEM = {"id", "sample", "prompt", "metadata", "text", "media"}
_MEDIUM = {"kind", "encoding", "dtype", "shape", "rate", "data"}


class Malformed(ValueError):
    """A message that is not of this protocol."""


class OtherVersion(Exception):
    """The scorer is another function than the one that was asked for."""


def packed(message: dict[str, Any]) -> bytes:
    """ValueError for what msgpack has no form for, such as an object or a whole number of more than 64 bits."""
    try:
        return msgpack.Packer().pack(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"cannot go over the wire: {error}") from error


def unpacked(content: bytes, most: int) -> dict[str, Any]:
    """The message, of this protocol version; lists and mappings hold at most `most` entries."""
    try:
        message = msgpack.unpackb(content, max_array_len=most, max_map_len=most, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"no msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(message, dict) or "protocol" not in message:
        raise Malformed("no mapping with a protocol")
    if message["protocol"] != PROTOCOL:
        raise Malformed(f"protocol {message['protocol']!r}; this side speaks {PROTOCOL}")
    return message


def item(number: int, sample: ScorerInput) -> bytes:
    """A sample; `number` is its id, since samples of a call may carry one lineage id. ValueError as `packed`."""
    arrays = {"image": (sample.image, None), "source": (sample.source, None), "video": (sample.video, sample.fps)}
    arrays["audio"] = (sample.audio, sample.audio_rate)
    return packed(
        {
            "id": str(number),
            "sample": sample.id,
            "prompt": sample.prompt,
            "metadata": sample.metadata,
            "text": sample.text,
            "media": [_raw(kind, array, rate) for kind, (array, rate) in arrays.items() if array is not None],
        }
    )


def request(scorer: str, items: Sequence[bytes]) -> list[bytes]:
    """The parts of a request, whose `items` are as `item` has packed them: pictures are not copied once more."""
    packer = msgpack.Packer()
    head = [packer.pack_map_header(3), *map(packer.pack, ("protocol", PROTOCOL, "scorers", [scorer], "items"))]
    return [b"".join([*head, packer.pack_array_header(len(items))]), *items]


def _raw(kind: str, array: np.ndarray, rate: float | None) -> dict[str, Any]:
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


def parsed_request(content: bytes, most_items: int) -> tuple[list[str], dict[str, ScorerInput]]:
    """Names of scorers, and samples by item id; Malformed says what is wrong and where."""
    message = unpacked(content, _MOST_ENTRIES)
    scorers, items = _of(message, "scorers", list, "request"), _of(message, "items", list, "request")
    if not scorers or not all(isinstance(name, str) for name in scorers) or len(set(scorers)) < len(scorers):
        raise Malformed(f"scorers must be different names, got {scorers!r}")
    if not 1 <= len(items) <= most_items:
        raise Malformed(f"items must be 1 to {most_items}, got {len(items)}")
    samples: dict[str, ScorerInput] = {}
    for number, entry in enumerate(items):
        where = f"items[{number}]"
        if not isinstance(entry, dict):
            raise Malformed(f"{where} is no mapping")
        identity = _of(entry, "id", str, where)
        if identity in samples:
            raise Malformed(f"{where}: id {identity!r} is there twice")
        samples[identity] = _sample(entry, where)
    return scorers, samples


def reply(versions: dict[str, str], results: dict[str, dict[str, Outcome]], samples: dict[str, ScorerInput]) -> bytes:
    """`results[id][scorer]`; causes go without the names that the client knows better."""
    plain = {
        identity: {name: _result(name, samples[identity], outcome) for name, outcome in by_scorer.items()}
        for identity, by_scorer in results.items()
    }
    return packed({"protocol": PROTOCOL, "versions": versions, "results": plain})


def parsed_reply(content: bytes, scorer: str, version: str, ids: Sequence[str]) -> list[float]:
    """Scores in the order of `ids`, Unscored with the server's cause; Malformed unless exactly these are answered."""
    message = unpacked(content, _MOST_ENTRIES)
    versions, results = _of(message, "versions", dict, "reply"), _of(message, "results", dict, "reply")
    if scorer in versions and versions[scorer] != version:
        raise OtherVersion(f"scorer {scorer!r} is now version {versions[scorer]!r}, and was {version!r}")
    if set(results) != set(ids):
        missing, extra = sorted(set(ids) - set(results)), sorted(set(results) - set(ids))
        raise Malformed(f"{len(results)} results for {len(ids)} items; missing {missing[:3]}, not asked {extra[:3]}")
    return [_score(results[identity], scorer) for identity in ids]


def _score(by_scorer: object, scorer: str) -> float:
    if not isinstance(by_scorer, dict) or set(by_scorer) != {scorer} or not isinstance(by_scorer[scorer], dict):
        raise Malformed(f"a result must hold scorer {scorer!r} alone, got {by_scorer!r:.200}")
    result = by_scorer[scorer]
    if set(result) == {"error"} and isinstance(result["error"], str):
        return Unscored(result["error"])
    if set(result) != {"score"} or type(result["score"]) is not float:
        raise Malformed(f"a result is a score or an error, got {result!r:.200}")
    if not math.isfinite(result["score"]):
        raise Malformed(f"the score is {result['score']}: a failure must come as an error")
    return result["score"]


def _result(name: str, sample: ScorerInput, outcome: Outcome) -> dict[str, float | str]:
    if outcome.cause:
        return {"error": outcome.cause.removeprefix(f"{name}: {sample.id}: ")}
    return {"score": outcome.value}


def _sample(entry: dict[str, Any], where: str) -> ScorerInput:
    if not set(entry) <= _ITEM:
        raise Malformed(f"{where}: unknown {sorted(set(entry) - _ITEM)}; known are {sorted(_ITEM)}")
    text = entry.get("text")
    if not isinstance(text, str | None):
        raise Malformed(f"{where}.text must be text or nil, got {type(text).__name__}")
    arrays: dict[str, Any] = {}
    for medium in _of(entry, "media", list, where):
        kind, array, rate = _medium(medium, f"{where}.media")
        if kind in arrays:
            raise Malformed(f"{where}.media: {kind} is there twice")
        arrays[kind] = array
        if kind in ("video", "audio"):
            arrays["fps" if kind == "video" else "audio_rate"] = rate
    return ScorerInput(
        id=_of(entry, "sample", str, where),
        prompt=_of(entry, "prompt", str, where),
        text=text,
        metadata=_of(entry, "metadata", dict, where),
        **arrays,
    )


def _medium(medium: object, where: str) -> tuple[str, np.ndarray, float | int | None]:
    if not isinstance(medium, dict) or not set(medium) <= _MEDIUM:
        raise Malformed(f"{where}: a medium is a mapping of {sorted(_MEDIUM)}")
    kind, encoding = _of(medium, "kind", str, where), _of(medium, "encoding", str, where)
    if kind not in _KINDS or encoding != "raw":
        raise Malformed(f"{where}: a raw image, source, video or audio is known, got {encoding!r} {kind!r}")
    dtype, shape, data = (_of(medium, key, kinds, where) for key, kinds in _ARRAY_FIELDS)
    known, dimensions = _KINDS[kind]
    if dtype != known or len(shape) != dimensions or not all(type(size) is int and size >= 0 for size in shape):
        raise Malformed(f"{where}: {kind} is {known} of {dimensions} dimensions, got {dtype!r} {shape!r}")
    if kind != "audio" and shape[-1] != 3:
        raise Malformed(f"{where}: {kind} has 3 channels last, got {shape!r}")
    rate = medium.get("rate")
    if not (rate is None or (type(rate) in (int, float) and 0 < rate < math.inf)):
        raise Malformed(f"{where}: rate must be positive, got {rate!r}")
    if math.prod(shape) * np.dtype(known).itemsize != len(data):
        raise Malformed(f"{where}: {len(data)} bytes do not fill {shape!r} {known}")
    # Over bytes, an array cannot be written to.
    return kind, np.frombuffer(data, dtype=known).reshape(shape), rate


_ARRAY_FIELDS = (("dtype", str), ("shape", list), ("data", bytes))


def _of(mapping: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if key not in mapping:
        raise Malformed(f"{where}: {key} is missing")
    if not isinstance(mapping[key], kind):
        raise Malformed(f"{where}.{key} must be {kind.__name__}, got {type(mapping[key]).__name__}")
    return mapping[key]
