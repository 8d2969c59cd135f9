"""Every family through the whole trainer: rollout, reward, advantages and three steps of each algorithm."""

from __future__ import annotations

import dataclasses
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.families.case import Case, Given
from tests.families.cases import flux3
from tests.families.conftest import ALL
from tests.families.test_hunyuan import MEAN_FLOW
from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.data.prompts import PromptRow, PromptSource
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.placement import Placement
from unirl.distributed.group.remote import Remote, remote
from unirl.models.base import DiffusionFamily
from unirl.observability.run_folder import RunFolder
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, WeightedScorer
from unirl.rollout.trainside import Trainside
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.planner import DiffusionGeometry
from unirl.trainer.diffusion import DiffusionConfig, DiffusionEvalConfig, DiffusionTrainConfig, DiffusionTrainer
from unirl.trainer.rl import DataConfig
from unirl.trainer.run import LoggingConfig, RunConfig
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import ListedSteps, NoSteps

pytestmark = pytest.mark.slow

STEPS, UPDATES = 3, 2
ADAPTER = LoRA(rank=2, alpha=4)
ALGORITHMS: dict[str, DiffusionAlgorithm] = {
    "grpo": FlowGRPO(anchor="replay"),
    "grpo from the rollout": FlowGRPO(anchor="rollout"),
    "dppo": FlowDPPO(anchor="replay"),
    "nft": DiffusionNFT(),
}
# The largest |ratio - 1| before any update: nothing where pi_old is the very forward, rounding where it is another.
FIRST_DEVIATION = {"grpo": 0.0, "grpo from the rollout": 2e-5, "dppo": 0.0}


@dataclasses.dataclass(frozen=True)
class Brightness(Scorer):
    """Mean level of a picture or a video."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float(np.mean(sample.frames)) / 255 for sample in samples]


@dataclasses.dataclass(frozen=True, eq=False)
class CasePrompts(PromptSource):
    prompts: Media

    def rows(self) -> tuple[PromptRow, ...]:
        texts = self.prompts.required_texts
        sources = self.prompts.sources or [[] for _ in texts]
        return tuple(
            PromptRow(text, pictures=tuple(Given(picture) for picture in pictures))
            for text, pictures in zip(texts, sources, strict=True)
        )


class Witness(Remote):
    """Sees the weights that no update may move: all frozen modules, and the policy as the reference."""

    def __init__(self, backend: FSDPBackend) -> None:
        self._backend = backend

    @remote(Dispatch.RANK_ZERO)
    def still(self) -> dict[str, torch.Tensor]:
        bundle = self._backend.stage.bundle
        with self._backend.reference():
            return {
                f"{part}.{name}": parameter.detach().clone()
                for part, module in (("policy", bundle.transformer), *bundle.frozen.items())
                for name, parameter in module.named_parameters()
                if "lora_" not in name
            }


@dataclasses.dataclass(frozen=True)
class Run:
    """metrics, versions: after each step; before, after: trainable weights; moved: frozen weights that changed"""

    metrics: list[dict[str, float]]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    versions: list[int]
    moved: list[str]


def configured(
    family: DiffusionFamily,
    prompts: Media,
    sampling: DiffusionSamplingParams,
    algorithm: DiffusionAlgorithm,
    *,
    replay_batch: int | None = None,
    **backend: Any,
) -> DiffusionConfig:
    """backend: settings of BackendConfig beside the optimizer and, for DiffusionNFT, the EMA that it samples with."""
    nft = algorithm.needs.ema_rollout
    ema = EMA(decay=0.5, warmup="constant", unit="rollout") if nft else None
    source = CasePrompts(prompts)
    return DiffusionConfig(
        run=RunConfig(name="run", steps=STEPS, seed=0),
        placement=Placement(device="cpu"),
        logging=LoggingConfig(trackers=()),
        model=family,
        data=DataConfig(source, prompts_per_step=len(prompts), samples_per_prompt=2),
        sampling=dataclasses.replace(sampling, sde=NoSteps() if nft else ListedSteps((0, 2))),
        rollout=Trainside(weights="ema" if nft else "live"),
        reward=RewardConfig({"brightness": WeightedScorer(Brightness())}),
        algorithm=algorithm,
        train=DiffusionTrainConfig(
            DiffusionBackendConfig(optimizer=AdamW(lr=1e-3), ema=ema, **backend),
            DiffusionGeometry(num_updates_per_batch=UPDATES, replay_batch=replay_batch),
        ),
        eval=DiffusionEvalConfig(source, samples_per_prompt=2),
    )


def trained(config: DiffusionConfig) -> Run:
    trainer = DiffusionTrainer(config)
    with config.placement.slab() as slab:
        trainer.setup(slab)
        witness = slab.spawn(Witness, trainer.backend)
        before, still = weights(trainer), witness.still()
        metrics, versions = [], []
        for number in range(STEPS):
            metrics.append(values(trainer.step(number)))
            versions.append(trainer.backend.state()["version"])
        now = witness.still()
        moved = [name for name, value in still.items() if not torch.equal(value, now[name])]
        return Run(metrics, before, weights(trainer), versions, moved)


def weights(trainer: DiffusionTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.backend.state()["parameters"].items()}


def check(run: Run, silent: tuple[str, ...]) -> None:
    """What holds for every algorithm, family and dtype."""
    for line in run.metrics:
        assert all(math.isfinite(value) for value in line.values()), line
        assert (line["reward/invalid"], line["advantage/constant_groups"], line["train/skipped"]) == (0, 0, 0)
    assert run.versions == [1, 2, 3]
    assert run.moved == []
    unmoved = [name for name, value in run.before.items() if torch.equal(value, run.after[name])]
    assert all(any(ending in name for ending in silent) for name in unmoved), unmoved


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_steps_of_each_algorithm_move_the_adapter_and_nothing_else(
    case: Case, checkpoint: Path, algorithm: str
) -> None:
    # Two rows at one step are a forward of another size than the rollout's four, which rounds as it likes.
    replay_batch = 1 if algorithm == "grpo from the rollout" else None
    settings = {"replay_batch": replay_batch, "lora": ADAPTER}
    config = configured(case.family(checkpoint), case.prompts, case.sampling, ALGORITHMS[algorithm], **settings)
    run = trained(config)
    check(run, case.silent)
    if algorithm in FIRST_DEVIATION:
        first = [line["train/first_ratio_deviation"] for line in run.metrics]
        assert max(first) <= FIRST_DEVIATION[algorithm]
        assert max(line["train/ratio_deviation"] for line in run.metrics) > 0
    if config.algorithm.needs.reference:
        assert min(line["train/kl"] for line in run.metrics) > 0


def named(*names: str) -> list[Case]:
    return [case for name in names for case in ALL if case.name == name]


# A picture, an edit of one, a video and a video with sound.
@pytest.mark.parametrize("case", named("sd3", "flux2 klein edit", "wan 2.1", "ltx2"), ids=str)
@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_in_bfloat16_the_adapter_is_trained_in_float32_and_the_first_ratio_is_one(
    case: Case, checkpoint: Path, algorithm: str
) -> None:
    family, settings = case.family(checkpoint), {"lora": ADAPTER, "compute_dtype": "bfloat16"}
    run = trained(configured(family, case.prompts, case.sampling, ALGORITHMS[algorithm], **settings))
    check(run, case.silent)
    assert {value.dtype for value in run.after.values()} == {torch.float32}
    if algorithm == "grpo":
        assert [line["train/first_ratio_deviation"] for line in run.metrics] == [0.0] * STEPS


@pytest.mark.parametrize("case", named("sana"), ids=str)
@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_without_an_adapter_all_weights_train_and_the_reference_stands_still(
    case: Case, checkpoint: Path, algorithm: str
) -> None:
    run = trained(configured(case.family(checkpoint), case.prompts, case.sampling, ALGORITHMS[algorithm]))
    check(run, case.silent)
    assert min(line["train/kl"] for line in run.metrics) > 0


@pytest.mark.parametrize(
    ("case", "cause"),
    [(flux3.FLOW_MAP, "is a flow map"), *((case, "mean-flow") for case in MEAN_FLOW)],
    ids=lambda value: str(value),
)
def test_a_model_of_whole_steps_is_trained_by_no_algorithm(case: Case, cause: str, tmp_path: Path) -> None:
    family = case.family(case.write(tmp_path / "model"))
    for algorithm in ALGORITHMS.values():
        level = 0.0 if algorithm.needs.ema_rollout else 0.7
        sampling = dataclasses.replace(case.sampling, noise_level=level)
        with pytest.raises(ValueError, match=cause):
            trained(configured(family, case.prompts, sampling, algorithm, lora=ADAPTER))


@pytest.mark.parametrize("case", named("sd3", "wan 2.1", "ltx2"), ids=str)
def test_evaluations_write_pictures_clips_and_sounds_that_open_and_repeat_until_the_weights_move(
    case: Case, checkpoint: Path, tmp_path: Path
) -> None:
    config = configured(case.family(checkpoint), case.prompts, case.sampling, ALGORITHMS["grpo"], lora=ADAPTER)
    trainer, folder = DiffusionTrainer(config), RunFolder(tmp_path, "run")
    with config.placement.slab() as slab:
        trainer.setup(slab)
        first, again = trainer.evaluate(), trainer.evaluate()
        for number in range(STEPS):
            trainer.step(number)
        last = trainer.evaluate()
    assert first is not None
    assert again is not None
    assert last is not None
    assert torch.equal(first.rewards, again.rewards)
    assert not torch.equal(first.rewards, last.rewards)
    first.save_media(folder, 0)
    last.save_media(folder, STEPS)
    written = {path.name for path in folder.samples.iterdir()}
    clips = [kind for kind, value in (("webp", last.media.videos), ("wav", last.media.audio)) if value is not None]
    evaluations = [f"eval_{step:06d}" for step in (0, STEPS)]
    assert written == {"before.safetensors", "before_after.png"} | {f"{name}.png" for name in evaluations} | {
        f"{name}_prompt_{prompt}.{kind}" for name in evaluations for prompt in range(2) for kind in clips
    }
    check_files(folder.samples, last.media, case.sampling)


def check_files(samples: Path, media: Media, sampling: DiffusionSamplingParams) -> None:
    """Grids are not of one colour; a clip has the frames of its video, and a sound their duration."""
    for path in samples.glob("*.png"):
        assert len(np.unique(np.asarray(Image.open(path)))) > 10, path
    for path in samples.glob("*.webp"):
        with Image.open(path) as clip:
            assert (clip.height, clip.width) == (sampling.height, sampling.width)
            assert clip.__dict__["n_frames"] == sampling.frames
    for path in samples.glob("*.wav"):
        assert media.audio is not None
        with wave.open(str(path)) as sound:
            assert (sound.getnchannels(), sound.getnframes()) == tuple(media.audio.shape[1:])
            assert sound.getframerate() == media.audio_rate
            assert any(sound.readframes(sound.getnframes()))
