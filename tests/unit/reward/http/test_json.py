"""The protocol as people with curl speak it: JSON, base64, picture files; and what such files may not do."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import live
from tests.unit.reward.samples import Rule
from unirl.reward.http import protocol
from unirl.reward.scorer import ScorerInput
from unirl.reward.version import version_of

JSON = {"Content-Type": "application/json"}
PICTURE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(picture: np.ndarray | Image.Image, encoding: str, **settings: Any) -> bytes:
    image, buffer = picture if isinstance(picture, Image.Image) else Image.fromarray(picture), io.BytesIO()
    image.save(buffer, encoding, **settings)
    return buffer.getvalue()


def body(*media: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A request with one item."""
    item = {"id": "a", "prompt": "a fox", "media": list(media)}
    return {"protocol": 1, "scorers": ["level"], "items": [item], **changes}


def as_file(data: bytes, encoding: str) -> dict[str, Any]:
    return {"kind": "image", "encoding": encoding, "data": encoded(data)}


def bomb(side: int) -> bytes:
    """A PNG of `side` x `side` black pixels, of which a few bytes are there."""
    rows = zlib.compress(b"\0" * 1000, 9)
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("encoding", "settings", "exact"),
    [("png", {}, True), ("webp", {"lossless": True}, True), ("webp", {}, False), ("jpeg", {"quality": 95}, False)],
)
def test_a_picture_file_is_the_picture_that_pillow_reads(encoding, settings, exact):
    seen: list[ScorerInput] = []
    data = saved(PICTURE, encoding, **settings)
    with live({"level": Rule(lambda one: seen.append(one) or 0.5)}) as url:
        for headers, content in (
            (JSON, json.dumps(body(as_file(data, encoding))).encode()),
            ({}, protocol.packed(body(as_file(data, encoding) | {"data": data}))),
        ):
            assert httpx.post(f"{url}/v1/score", content=content, headers=headers).status_code == 200
    read = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    for one in seen:
        np.testing.assert_array_equal(one.picture, read, strict=True)
        assert not one.picture.flags.writeable
        assert (one.id, one.prompt, one.text, one.metadata) == ("a", "a fox", None, {})
    assert len(seen) == 2
    assert (read == PICTURE).all() == exact


def test_a_request_of_json_gets_a_reply_of_json_with_scores_errors_versions_and_time():
    pictures = [np.full((2, 2, 3), level, np.uint8) for level in (70, 199)]
    items = [
        {"id": name, "prompt": "", "media": [as_file(saved(picture, "png"), "png")]}
        for name, picture in zip("xy", pictures, strict=True)
    ]
    with live({"level": Level(bad=(199,)), "other": Level()}) as url:
        asked = body(items=items, scorers=["level", "other"])
        response = httpx.post(f"{url}/v1/score", json=asked)
    assert response.headers["content-type"] == "application/json"
    reply = response.json()
    assert reply["results"] == {
        "x": {"level": {"score": 10.0}, "other": {"score": 10.0}},
        "y": {"level": {"error": "RuntimeError: a bad level"}, "other": {"score": 199 / 7}},
    }
    assert reply["versions"] == {"level": version_of(Level(bad=(199,))), "other": version_of(Level())}
    assert (reply["protocol"], set(reply)) == (1, {"protocol", "versions", "results", "timing"})
    assert reply["timing"]["seconds"] > 0


def test_all_kinds_of_media_come_as_json():
    seen: list[ScorerInput] = []
    video, sound = np.stack([PICTURE, PICTURE]), np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    media = [
        {"kind": "video", "dtype": "uint8", "shape": [2, 20, 30, 3], "rate": 12.5, "data": encoded(video.tobytes())},
        {"kind": "audio", "dtype": "float32", "shape": [2, 4], "rate": 16000, "data": encoded(sound.tobytes())},
    ]
    entry = {
        "id": "a",
        "sample": "r0.p1/2",
        "prompt": "ein Apfel \U0001f34e",
        "metadata": {"n": [1, None]},
        "text": "t",
    }
    entry["media"] = [{"encoding": "raw", **medium} for medium in media]
    with live({"level": Rule(lambda one: seen.append(one) or 0.0)}) as url:
        assert httpx.post(f"{url}/v1/score", json=body(items=[entry])).status_code == 200
    (one,) = seen
    np.testing.assert_array_equal(one.frames, video, strict=True)
    np.testing.assert_array_equal(one.sound[0], sound, strict=True)
    assert (one.id, one.prompt, one.metadata, one.text) == ("r0.p1/2", "ein Apfel \U0001f34e", {"n": [1, None]}, "t")
    assert (one.fps, one.audio_rate) == (12.5, 16000)


@pytest.mark.parametrize(("mode", "level"), [("L", 51), ("1", 0), ("RGBA", 51), ("P", 51), ("LA", 51)])
def test_grey_alpha_and_palette_become_colours(mode, level):
    seen: list[ScorerInput] = []
    picture = Image.fromarray(np.full((3, 4, 3), 51, np.uint8)).convert(mode, dither=Image.Dither.NONE)
    with live({"level": Rule(lambda one: seen.append(one) or 0.0)}) as url:
        assert httpx.post(f"{url}/v1/score", json=body(as_file(saved(picture, "png"), "png"))).status_code == 200
    np.testing.assert_array_equal(seen[0].picture, np.full((3, 4, 3), level, np.uint8), strict=True)


def animation(encoding: str) -> bytes:
    frames = [Image.fromarray(np.full((4, 4, 3), level, np.uint8)) for level in (10, 200)]
    return saved(frames[0], encoding, save_all=True, append_images=frames[1:])


WHOLE = saved(PICTURE, "png")


@pytest.mark.parametrize(
    ("request_body", "status", "words"),
    [
        (b"{", 400, "no json: JSONDecodeError"),
        (b"[" * 100_000, 400, "no json: RecursionError"),
        (b"\xff", 400, "no json: UnicodeDecodeError"),
        (b'{"protocol": 1, "protocol": 1}', 400, "the key 'protocol' is there twice"),
        (b'{"protocol": 1, "scorers": ["level"], "items": NaN}', 400, "NaN is no number of JSON"),
        (b"[]", 400, "no mapping with a protocol"),
        (body(protocol=2), 400, "protocol 2; this side speaks 1"),
        (body({"kind": "image", "encoding": "png", "data": "no base64!"}), 400, "items[0].media: data is no base64"),
        (body({"kind": "image", "encoding": "png", "data": 3}), 400, "items[0].media.data must be"),
        (body({"kind": "image", "encoding": "png"}), 400, "items[0].media: data is missing"),
        (body(as_file(b"", "png")), 400, "items[0].media: no png: UnidentifiedImageError"),
        (body(as_file(WHOLE, "jpeg")), 400, "items[0].media: no jpeg: UnidentifiedImageError"),
        (body(as_file(WHOLE[:-200], "png")), 400, "items[0].media: no png: OSError: image file is truncated"),
        (body(as_file(animation("png"), "png")), 400, "one picture of 8 bits, got mode RGB and 2 frames"),
        (body(as_file(animation("webp"), "webp")), 400, "and 2 frames"),
        (body(as_file(saved(Image.new("I;16", (4, 4)), "png"), "png")), 400, "of 8 bits, got mode I;16"),
        (body(as_file(WHOLE, "png") | {"kind": "video"}), 400, "got 'png' 'video'"),
        (body(as_file(bomb(600), "png")), 413, "1048576 bytes decoded at most (max_body_mb)"),
        (body(as_file(bomb(10_000), "png")), 413, "items[0].media: "),
        (body(as_file(bomb(60_000), "png")), 413, "items[0].media: "),
        (
            body(items=[{"id": str(n), "prompt": "", "media": [as_file(bomb(500), "png")]} for n in range(2)]),
            400,
            "items[0].media: no png: ",
        ),
    ],
)  # fmt: skip
def test_a_server_refuses_malformed_json_and_files_before_it_decodes_them(request_body, status, words):
    content = request_body if isinstance(request_body, bytes) else json.dumps(request_body).encode()
    with live({"level": Level()}, max_body_mb=1) as url:
        response = httpx.post(f"{url}/v1/score", content=content, headers=JSON)
    assert response.status_code == status
    assert words in response.json()["error"]


def test_files_that_are_small_one_by_one_are_too_large_together():
    black = saved(np.zeros((500, 500, 3), np.uint8), "png")
    items = [{"id": str(n), "prompt": "", "media": [as_file(black, "png")]} for n in range(2)]
    with live({"level": Level()}, max_body_mb=1) as url:
        assert httpx.post(f"{url}/v1/score", json=body(items=items[:1])).status_code == 200
        response = httpx.post(f"{url}/v1/score", json=body(items=items))
    assert response.status_code == 413
    assert response.json()["error"].startswith("items[1].media: the pictures of a request")


def test_another_content_type_is_refused_with_those_that_are_known():
    with live({"level": Level()}) as url:
        response = httpx.post(f"{url}/v1/score", data={"a": "b"})
        headers = {"Content-Type": "APPLICATION/json; charset=utf-8"}
        assert httpx.post(f"{url}/v1/score", json=body(), headers=headers).status_code == 200
    assert response.status_code == 415
    assert response.json()["error"] == (
        "the Content-Type is one of ['application/json', 'application/msgpack'], got "
        "'application/x-www-form-urlencoded'"
    )
