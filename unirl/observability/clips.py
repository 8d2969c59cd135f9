"""Videos and sounds as files that a browser plays, and as strips of stills for a grid."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import torch

from unirl.observability.atomic import replace_file
from unirl.types.media import Media, to_uint8

_LONGEST_SIDE = 320  # pixels of a clip: enough to see, small enough for a report
_STILLS = 4


def stills(media: Media) -> torch.Tensor | None:
    """Pictures to look at, `(N, 3, H, W')`: the images, or up to four frames of each video side by side."""
    if media.images is not None:
        return media.images
    if media.videos is None:
        return None
    frames = media.videos.shape[1]
    chosen = torch.linspace(0, frames - 1, min(frames, _STILLS)).round().long()
    return torch.cat(list(media.videos[:, chosen].unbind(1)), dim=-1)


def write_clips(media: Media, row: int, stem: Path) -> list[Path]:
    """What row `row` plays: `stem.webp` for its video (an animated picture), `stem.wav` for its sound."""
    written = []
    if media.videos is not None:
        written.append(_write_webp(media.videos[row], media.fps or 8.0, stem.with_suffix(".webp")))
    if media.audio is not None:
        assert media.audio_rate is not None, "sound comes with its rate"
        written.append(_write_wav(media.audio[row], media.audio_rate, stem.with_suffix(".wav")))
    return written


def _write_webp(video: torch.Tensor, fps: float, path: Path) -> Path:
    """video: `(F, 3, H, W)` in [0, 1]."""
    from PIL import Image

    frames = [Image.fromarray(frame.numpy()) for frame in to_uint8(video)]
    for frame in frames:
        frame.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    file = io.BytesIO()
    frames[0].save(
        file, "WEBP", save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0, quality=80
    )
    replace_file(path, file.getvalue())
    return path


def _write_wav(audio: torch.Tensor, rate: int, path: Path) -> Path:
    """audio: `(channels, samples)` in [-1, 1], written as 16 bit."""
    samples = (audio.float().clamp(-1, 1) * 32767).round().to(torch.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(len(samples))
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(samples.T.contiguous().numpy().tobytes())
    replace_file(path, file.getvalue())
    return path
