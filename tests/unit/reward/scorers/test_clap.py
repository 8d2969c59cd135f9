from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.unit.reward.samples import entry
from unirl.models.random_weights.parts import byte_tokenizer, redraw
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.clap import CLAPScore, mono, windows

RATE, SECONDS = 8000, 2  # of the tiny extractor: a window
PROMPTS = ("a dog barks", "", "ein Gewitter ⛈", "rain")


def save_clap(folder: Path, seed: int = 0) -> str:
    audio = {
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_embeds_hidden_size": 8,
        "hidden_size": 16,
        "depths": [1, 1],
        "num_attention_heads": [1, 2],
        "num_hidden_layers": 2,
    }
    text = {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 130,
    }
    config = transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=16)
    model = transformers.ClapModel(config)
    redraw([model], seed)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(bos="<s>", eos="</s>", pad="<pad>", extra=("<mask>",), single="<s> $A </s>", length=128)
    tokenizer.save_pretrained(folder)
    transformers.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=RATE,
        hop_length=160,
        max_length_s=SECONDS,
        fft_window_size=256,
        frequency_max=4000,
        truncation="rand_trunc",
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_clap(tmp_path_factory.mktemp("clap"))


@pytest.fixture(scope="module")
def scorer(checkpoint) -> CLAPScore:
    return CLAPScore(checkpoint=checkpoint)


def tone(hertz: float, seconds: float, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """A falling tone, `(channels, samples)` float32."""
    time = np.arange(round(seconds * rate)) / rate
    wave = np.sin(2 * np.pi * hertz * time * (1 - time / (4 * seconds)))
    return np.repeat(wave[None].astype(np.float32), channels, axis=0)


def heard(audio: np.ndarray, prompt: str = "a dog barks", rate: int = RATE) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt=prompt, audio=audio, audio_rate=rate)


def samples() -> list[ScorerInput]:
    sounds = [tone(440, 2), tone(900, 0.7), tone(300, 5), tone(440, 1, channels=2), np.zeros((1, RATE), np.float32)]
    return [heard(sound, PROMPTS[row % len(PROMPTS)]) for row, sound in enumerate(sounds)]


def test_the_score_is_the_logit_that_clap_itself_computes_without_its_scale(scorer, checkpoint):
    model: Any = transformers.ClapModel.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    extractor: Any = transformers.ClapFeatureExtractor.from_pretrained(checkpoint)
    for sample in (heard(tone(440, 2), prompt) for prompt in PROMPTS):
        features = extractor(sample.sound[0][0], sampling_rate=RATE, return_tensors="pt")
        out = model(**tokenizer([sample.prompt], return_tensors="pt", return_token_type_ids=False), **features)
        expected = (out.logits_per_audio / model.logit_scale_a.exp()).item()
        assert scorer.score([sample]) == [pytest.approx(expected, abs=2e-6)]
        assert scorer.score([sample]) == [pytest.approx((out.audio_embeds @ out.text_embeds.T).item(), abs=2e-6)]


def test_the_score_is_the_cosine_of_the_features_in_float64(scorer, checkpoint):
    model: Any = transformers.ClapModel.from_pretrained(checkpoint).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    extractor: Any = transformers.ClapFeatureExtractor.from_pretrained(checkpoint)
    for sample in (heard(tone(440, 0.7), prompt) for prompt in PROMPTS):
        features = extractor(sample.sound[0][0], sampling_rate=RATE, return_tensors="pt").input_features
        audio = model.get_audio_features(features.double()).pooler_output
        text = model.get_text_features(tokenizer([sample.prompt], return_tensors="pt").input_ids).pooler_output
        expected = torch.nn.functional.cosine_similarity(audio, text).item()
        assert scorer.score([sample]) == [pytest.approx(expected, abs=2e-6)]


def test_a_long_sound_has_one_score_the_mean_of_its_windows(scorer):
    sound = tone(300, 5)
    parts = [sound[:, start : start + 2 * RATE] for start in (0, 3 * RATE // 2, 3 * RATE)]
    singly = scorer.score([heard(part) for part in parts])
    assert scorer.score([heard(sound)]) == [pytest.approx(np.mean(singly), abs=2e-6)]
    assert scorer.score([heard(sound)]) == scorer.score([heard(sound)])


def test_windows_cover_a_sound_evenly_and_reach_its_end():
    sound = np.arange(23)
    assert [list(part[[0, -1]]) for part in windows(sound, 10)] == [[0, 9], [6, 15], [13, 22]]
    assert [len(part) for part in windows(sound, 23)] == [23]
    assert [list(part[[0, -1]]) for part in windows(sound, 22)] == [[0, 21], [1, 22]]


def test_channels_are_averaged_and_the_rate_is_changed(scorer):
    assert scorer.score([heard(tone(440, 1, channels=2))]) == pytest.approx(
        scorer.score([heard(tone(440, 1))]), abs=2e-6
    )
    resampled = mono(tone(440, 1, rate=44100, channels=2), 44100, RATE)
    assert resampled.shape == (RATE,)
    assert np.abs(resampled - tone(440, 1)[0])[100:-100].max() < 0.01
    (score,) = scorer.score([heard(tone(440, 1, rate=44100), rate=44100)])
    assert score == pytest.approx(scorer.score([heard(tone(440, 1))])[0], abs=0.02)


def test_scores_do_not_depend_on_the_batch(scorer, checkpoint):
    singly = [scorer.score([sample])[0] for sample in samples()]
    assert scorer.score(samples()) == pytest.approx(singly, abs=2e-6)
    assert CLAPScore(checkpoint=checkpoint, batch_size=2).score(samples()) == pytest.approx(singly, abs=2e-6)


def test_another_prompt_and_another_sound_are_other_scores(scorer):
    scores = scorer.score([heard(tone(pitch, 2), prompt) for pitch in (300, 1500) for prompt in PROMPTS])
    assert len({round(score, 4) for score in scores}) == 8


def test_a_prompt_is_cut_after_77_tokens_and_counted(checkpoint):
    scorer, long = CLAPScore(checkpoint=checkpoint), "abcde" * 20
    scores = scorer.score([heard(tone(440, 1), prompt) for prompt in (long, long[:75])])
    assert scores[0] == pytest.approx(scores[1], abs=2e-6)
    assert scorer._loaded.prompts.cut == 1


def test_one_sample_of_sound_has_a_score(scorer):
    assert -1 <= scorer.score([heard(np.ones((1, 1), np.float32))])[0] <= 1


def test_the_version_follows_the_weights(scorer, tmp_path):
    assert CLAPScore(checkpoint=save_clap(tmp_path, seed=1)).version() != scorer.version()


@pytest.mark.parametrize("sample", [entry(None), heard(np.zeros((1, 0), np.float32))], ids=["none", "empty"])
def test_what_is_no_sound_is_refused_by_name(scorer, sample):
    with pytest.raises(ValueError, match=r"r0\.p0/0 holds no sound"):
        scorer.score([sample])


def test_a_clap_that_fuses_random_windows_is_refused(tmp_path):
    folder = Path(save_clap(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"]["enable_fusion"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="draws at random: take a CLAP without fusion"):
        CLAPScore(checkpoint=str(folder)).prepare()
