"""What goes over the wire: msgpack, arrays as their raw bytes, so that a score is that of the picture as it was drawn.

    request  {protocol: 1, scorers: [name], items: [{id, prompt, sample?, metadata?, text?, media?: [media.py]}]}
    reply    {protocol: 1, versions: {scorer: version}, results: {id: {scorer: {score} | {error}}}, timing: {seconds}}

Results are found by the item's id, never by their order. A failure is an error with a message, never a number. For
people with curl, the same as JSON: `data` is base64 there, and the reply is JSON too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgpack

from unirl.reward.http.media import Malformed, Room, field, parsed_medium, raw
from unirl.reward.outcome import Outcome
from unirl.reward.scorer import ScorerInput, Unscored

PROTOCOL = 1
MEDIA_TYPE = "application/msgpack"
KEY_HEADER = "Idempotency-Key"  # equal for the tries of one request: those after the first cost the device nothing
_MOST_ENTRIES = 1 << 20  # of a list or mapping
_ITEM = {"id", "sample", "prompt", "metadata", "text", "media"}
Form = Literal["msgpack", "json"]
FORMS: dict[str, Form] = {MEDIA_TYPE: "msgpack", "application/json": "json"}


class OtherVersion(Exception):
    """The scorer is another function than the one that was asked for."""


def packed(message: dict[str, Any]) -> bytes:
    """ValueError for what msgpack has no form for, such as an object or a whole number of more than 64 bits."""
    try:
        return msgpack.Packer().pack(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"cannot go over the wire: {error}") from error


def unpacked(content: bytes, most: int, form: Form = "msgpack") -> dict[str, Any]:
    """The message, of this protocol, no key twice; lists and mappings of msgpack hold at most `most` entries."""
    try:
        if form == "json":
            message = json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
        else:
            limits = {"max_array_len": most, "max_map_len": most, "max_ext_len": 0}
            message = msgpack.unpackb(content, object_pairs_hook=_once, **limits)
    except Malformed:
        raise
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed(f"no {form}: {type(error).__name__}: {error}") from None
    if not isinstance(message, dict) or "protocol" not in message:
        raise Malformed("no mapping with a protocol")
    if message["protocol"] != PROTOCOL:
        raise Malformed(f"protocol {message['protocol']!r}; this side speaks {PROTOCOL}")
    return message


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise Malformed(f"the key {key!r} is there twice")
        mapping[key] = value
    return mapping


def _no_number(name: str) -> None:
    raise Malformed(f"no json: {name} is no number of JSON")


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
            "media": [raw(kind, array, rate) for kind, (array, rate) in arrays.items() if array is not None],
        }
    )


def request(scorer: str, items: Sequence[bytes]) -> list[bytes]:
    """The parts of a request, whose `items` are as `item` has packed them: pictures are not copied once more."""
    packer = msgpack.Packer()
    head = [packer.pack_map_header(3), *map(packer.pack, ("protocol", PROTOCOL, "scorers", [scorer], "items"))]
    return [b"".join([*head, packer.pack_array_header(len(items))]), *items]


def parsed_request(
    content: bytes, *, most_items: int, most_bytes: int, form: Form = "msgpack"
) -> tuple[list[str], dict[str, ScorerInput]]:
    """Names of scorers, and samples by item id; Malformed says what is wrong and where.

    TooLarge where the files of pictures decode to more than `most_bytes`.
    """
    message = unpacked(content, _MOST_ENTRIES, form)
    scorers, items = field(message, "scorers", list, "request"), field(message, "items", list, "request")
    if not scorers or not all(isinstance(name, str) for name in scorers) or len(set(scorers)) < len(scorers):
        raise Malformed(f"scorers must be different names, got {scorers!r}")
    if not 1 <= len(items) <= most_items:
        raise Malformed(f"items must be 1 to {most_items}, got {len(items)}")
    samples: dict[str, ScorerInput] = {}
    room = Room(most_bytes, most_bytes)
    for number, entry in enumerate(items):
        where = f"items[{number}]"
        if not isinstance(entry, dict):
            raise Malformed(f"{where} is no mapping")
        identity = field(entry, "id", str, where)
        if identity in samples:
            raise Malformed(f"{where}: id {identity!r} is there twice")
        samples[identity] = _sample(entry, where, room)
    return scorers, samples


def reply(
    versions: dict[str, str],
    results: dict[str, dict[str, Outcome]],
    samples: dict[str, ScorerInput],
    *,
    seconds: float,
    form: Form = "msgpack",
) -> bytes:
    """`results[id][scorer]`; causes go without the names that the client knows better.

    seconds: from the request to the reply
    """
    plain = {
        identity: {name: _result(name, samples[identity], outcome) for name, outcome in by_scorer.items()}
        for identity, by_scorer in results.items()
    }
    message = {"protocol": PROTOCOL, "versions": versions, "results": plain, "timing": {"seconds": seconds}}
    return packed(message) if form == "msgpack" else json.dumps(message, allow_nan=False).encode()


def parsed_reply(content: bytes, scorer: str, version: str, ids: Sequence[str]) -> list[float]:
    """Scores in the order of `ids`, Unscored with the server's cause; Malformed unless exactly these are answered."""
    message = unpacked(content, _MOST_ENTRIES)
    versions, results = field(message, "versions", dict, "reply"), field(message, "results", dict, "reply")
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


def _sample(entry: dict[str, Any], where: str, room: Room) -> ScorerInput:
    if not set(entry) <= _ITEM:
        raise Malformed(f"{where}: unknown {sorted(set(entry) - _ITEM)}; known are {sorted(_ITEM)}")
    text = entry.get("text")
    if not isinstance(text, str | None):
        raise Malformed(f"{where}.text must be text or nil, got {type(text).__name__}")
    entry = {"sample": entry["id"], "metadata": {}, "media": []} | entry
    arrays: dict[str, Any] = {}
    for medium in field(entry, "media", list, where):
        kind, array, rate = parsed_medium(medium, f"{where}.media", room)
        if kind in arrays:
            raise Malformed(f"{where}.media: {kind} is there twice")
        arrays[kind] = array
        if kind in ("video", "audio"):
            arrays["fps" if kind == "video" else "audio_rate"] = rate
    return ScorerInput(
        id=field(entry, "sample", str, where),
        prompt=field(entry, "prompt", str, where),
        text=text,
        metadata=field(entry, "metadata", dict, where),
        **arrays,
    )
