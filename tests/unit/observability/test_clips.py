"""Videos and sounds on disk, read back by other people's code."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unirl.observability.clips import stills, write_clips
from unirl.types.media import Media


def test_a_video_becomes_an_animated_picture_of_its_frames_and_rate(tmp_path: Path) -> None:
    video = torch.linspace(0, 1, 5)[None, :, None, None, None].expand(1, 5, 3, 16, 24)
    [path] = write_clips(Media(videos=video, fps=10.0), 0, tmp_path / "clip")
    with Image.open(path) as picture:
        assert picture.n_frames == 5  # type: ignore[attr-defined]
        assert picture.size == (24, 16)
        levels = []
        for frame in range(5):
            picture.seek(frame)
            levels.append(float(np.asarray(picture.convert("L")).mean()))
            assert picture.info["duration"] == 100
    assert np.allclose(levels, [0, 64, 128, 191, 255], atol=3)


def test_sound_becomes_a_wave_file_with_its_samples(tmp_path: Path) -> None:
    audio = torch.tensor([[[0.0, 0.5, -1.0, 2.0], [1.0, 0.0, 0.0, 0.0]]])
    [path] = write_clips(Media(audio=audio, audio_rate=8000), 0, tmp_path / "sound")
    with wave.open(str(path), "rb") as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (2, 8000, 4)
        samples = np.frombuffer(sound.readframes(4), dtype="<i2").reshape(4, 2).T
    assert samples.tolist() == [[0, 16384, -32767, 32767], [32767, 0, 0, 0]]


def test_the_stills_of_a_video_stand_side_by_side() -> None:
    video = torch.arange(7.0)[None, :, None, None, None].expand(1, 7, 3, 2, 2)
    strip = stills(Media(videos=video))
    assert strip is not None
    assert strip.shape == (1, 3, 2, 8)
    assert strip[0, 0, 0, ::2].tolist() == [0, 2, 4, 6]


def test_pictures_are_their_own_stills_and_sound_has_none() -> None:
    images = torch.rand(2, 3, 4, 4)
    assert stills(Media(images=images)) is images
    assert stills(Media(audio=torch.zeros(1, 1, 4), audio_rate=8)) is None
