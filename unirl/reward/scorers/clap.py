"""CLAP (arXiv 2211.06687): does the sound fit the prompt?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy
import torch
import transformers

from unirl.models.pretrained import check_checkpoint, resolve
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.prompts import PromptTokens
from unirl.reward.scorer import ScorerInput
from unirl.reward.weights import load_whole

_TOKENS = 77  # as it was trained; the text model could read 512


@dataclasses.dataclass(frozen=True, eq=False)
class _Loaded:
    model: Any
    prompts: PromptTokens
    features: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLAPScore(ModelScorer):
    """`cos(prompt, sound)`, -1 to 1, higher is better; sounds of LTX-2.3 have 0.02 to 0.14.

    Channels are averaged. A sound of more than 10 s has the mean score of windows of 10 s that cover it evenly; a
    shorter one is repeated. A prompt is cut after 77 tokens. 194 M parameters, Apache-2.0.

    checkpoint: hub id or folder of a ClapModel with its tokenizer and feature extractor, without fusion
    """

    reads = frozenset({"sound"})

    card = Card(
        looks_at="audio with prompt",
        range="-1 to 1",
        unit="cosine",
        licence="Apache-2.0",
        checkpoints=("laion/larger_clap_general", "laion/larger_clap_music", "laion/clap-htsat-unfused"),
        preprocessing="mono-polyphase-windows",
    )

    checkpoint: str = "laion/larger_clap_general"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_checkpoint(self.checkpoint, "ClapModel", index="config.json")

    def load(self, device: torch.device, dtype: torch.dtype) -> _Loaded:
        folder = resolve(self.checkpoint)
        config: Any = transformers.ClapConfig.from_pretrained(folder)
        if config.audio_config.enable_fusion:
            raise ValueError(f"{self.checkpoint} fuses windows that it draws at random: take a CLAP without fusion")
        model = load_whole(transformers.ClapModel, self.checkpoint, device, dtype)
        prompts = PromptTokens(transformers.AutoTokenizer.from_pretrained(folder), _TOKENS)
        return _Loaded(model, prompts, transformers.ClapFeatureExtractor.from_pretrained(folder))

    def modules(self, loaded: _Loaded) -> Iterable[torch.nn.Module]:
        return [loaded.model]

    def judge(self, loaded: _Loaded, samples: list[ScorerInput]) -> list[float]:
        rate, length = loaded.features.sampling_rate, loaded.features.nb_max_samples
        cut = [windows(mono(*sample.sound, rate), length) for sample in samples]
        counts, flat = [len(parts) for parts in cut], [part for parts in cut for part in parts]
        chunks = range(0, len(flat), self.batch_size)
        sounds = torch.cat([_embed_sounds(loaded, flat[start : start + self.batch_size]) for start in chunks])
        prompts = _embed_prompts(loaded, [sample.prompt for sample in samples])
        prompts = prompts.repeat_interleave(torch.tensor(counts, device=prompts.device), dim=0)
        return [scores.mean().item() for scores in (sounds * prompts).sum(-1).split(counts)]


def mono(audio: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Audio `(channels, samples)` at `rate` as one channel `(samples,)` at the `wanted` rate."""
    mixed = audio.mean(axis=0, dtype=np.float64)
    if rate == wanted:
        return mixed
    common = math.gcd(rate, wanted)
    return scipy.signal.resample_poly(mixed, wanted // common, rate // common)


def windows(sound: np.ndarray, length: int) -> list[np.ndarray]:
    """A sound of at most `length` as it is, else as few windows of that length as cover it, evenly spaced.

    The feature extractor would cut a window out at random, and the same sound would have two scores.
    """
    if len(sound) <= length:
        return [sound]
    count = math.ceil(len(sound) / length)
    starts = np.linspace(0, len(sound) - length, count).round().astype(int)
    return [sound[start : start + length] for start in starts]


def _embed_sounds(loaded: _Loaded, sounds: list[np.ndarray]) -> torch.Tensor:
    features = loaded.features(
        sounds,
        sampling_rate=loaded.features.sampling_rate,
        truncation="rand_trunc",  # of what is never too long: with "fusion" even a short sound takes part in a draw
        padding="repeatpad",
        return_tensors="pt",
    ).input_features
    seen = loaded.model.audio_model(input_features=features.to(loaded.model.device, loaded.model.dtype)).pooler_output
    return torch.nn.functional.normalize(loaded.model.audio_projection(seen).float(), dim=-1)


def _embed_prompts(loaded: _Loaded, prompts: list[str]) -> torch.Tensor:
    tokens = {name: ids.to(loaded.model.device) for name, ids in loaded.prompts(prompts).items()}
    read = loaded.model.text_model(**tokens).pooler_output
    return torch.nn.functional.normalize(loaded.model.text_projection(read).float(), dim=-1)
