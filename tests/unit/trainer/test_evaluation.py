from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from unirl.data.prompts import ListedPrompts
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement
from unirl.models.tiny import TinySD3
from unirl.observability.run_folder import RunFolder
from unirl.reward.scorer import Scorer, ScorerInput, SetMeasure
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.sde.noise import initial_noise
from unirl.trainer.diffusion import DiffusionEvalConfig
from unirl.trainer.evaluation import Evaluation, judge
from unirl.trainer.run import RunConfig
from unirl.types.media import Media
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import WindowSteps

PROMPTS = ListedPrompts(("a seven", "a zero"))
SAMPLING = DiffusionSamplingParams(steps=6, height=8, width=8, seed=3, sde=WindowSteps(size=2), same_initial_noise=True)


@dataclasses.dataclass(frozen=True)
class Level(Scorer):
    """The grey level, NaN for a white picture."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        levels = [float(sample.picture.mean()) / 255 for sample in samples]
        return [math.nan if level == 1 else level for level in levels]


@dataclasses.dataclass(frozen=True)
class Count(SetMeasure):
    def measure(self, samples: list[ScorerInput]) -> dict[str, float]:
        return {"samples": float(len(samples))}


LEVEL = RewardConfig(scorers={"level": WeightedScorer(Level(), weight=2.0)})


def test_an_evaluation_is_due_before_training_at_its_multiples_and_at_the_end() -> None:
    config = DiffusionEvalConfig(PROMPTS, every=3)
    assert [done for done in range(11) if config.due(done, 10)] == [0, 3, 6, 9, 10]
    assert [done for done in range(6) if DiffusionEvalConfig(PROMPTS, every=50).due(done, 5)] == [0, 5]


def test_the_request_is_the_same_every_time_and_deterministic() -> None:
    config = DiffusionEvalConfig(PROMPTS, samples_per_prompt=3)
    one, two = config.request(SAMPLING).frontier, config.request(SAMPLING).frontier
    assert one.sampling == two.sampling
    assert one.ids == two.ids == [f"r0.p{row}/{child}" for row in range(2) for child in range(3)]
    assert one.diffusion_sampling.resolve_sde_indices(0) == ()
    assert (one.diffusion_sampling.steps, one.diffusion_sampling.height, one.diffusion_sampling.guidance) == (6, 8, 1.0)


def noise(sample: Sample) -> torch.Tensor:
    part = sample.frontier
    return initial_noise(
        part.ids, (4,), part.diffusion_sampling.seed, same_in_group=part.diffusion_sampling.same_initial_noise
    )


def test_its_noise_is_another_than_that_of_training_and_follows_the_seed_of_the_run() -> None:
    config = DiffusionEvalConfig(PROMPTS, samples_per_prompt=3)
    request = config.request(SAMPLING)
    training = Sample((request.roots,)).fork(3, SAMPLING)
    assert training.frontier.ids == request.frontier.ids
    rows = torch.cat([noise(request), noise(training), noise(config.request(dataclasses.replace(SAMPLING, seed=4)))])
    # Training shares its x_T in a group (2 of them); an evaluation without noise in its steps must not.
    assert len(torch.unique(rows, dim=0)) == 6 + 2 + 6


def test_held_out_scorers_judge_beside_the_reward_and_take_no_part_in_it() -> None:
    judges = DiffusionEvalConfig(PROMPTS, scorers={"other": Level()}).judges(LEVEL)
    assert judges.weights == {"level": 2.0, "other": 0.0}


def filled(levels: list[float]) -> Sample:
    """Grey pictures of these levels, the first half of the first prompt."""
    request = DiffusionEvalConfig(PROMPTS, samples_per_prompt=len(levels) // 2).request(SAMPLING)
    images = torch.tensor(levels)[:, None, None, None].expand(-1, 3, 8, 8)
    return request.with_frontier(
        request.frontier.fill(media=Media(images=images), segment=None, conditions=None, version=0)
    )


def evaluated(levels: list[float], **settings: Any) -> Evaluation:
    config = DiffusionEvalConfig(PROMPTS, samples_per_prompt=len(levels) // 2, **settings)
    with Placement(device="cpu").slab() as slab:
        judges: Handle[RewardService] = slab.spawn(RewardService, config.judges(LEVEL))
        sample = filled(levels)
        return judge(sample, judges.score(sample), config)


def test_figures_are_means_over_the_samples_that_could_be_scored_and_the_others_are_counted() -> None:
    found = evaluated([0.2, 0.4, 0.6, 1.0], scorers={"other": Level()}, measures={"count": Count()})
    level = (51 + 102 + 153) / 3 / 255  # as uint8
    assert found.metrics == {
        "eval/reward": pytest.approx(2 * level),
        "eval/level": pytest.approx(level),
        "eval/other": pytest.approx(level),
        "eval/count/samples": 4.0,
        "eval/invalid": 1.0,
    }
    assert "eval/invalid" not in evaluated([0.2, 0.4]).metrics


def test_the_first_pictures_of_each_prompt_are_kept_with_their_rewards() -> None:
    found = evaluated([0.0, 0.2, 0.4, 0.2, 0.6, 0.8], shown=2)
    assert found.prompts == ["a seven", "a zero"]
    assert found.media.images is not None
    assert found.media.images[:, 0, 0, 0].tolist() == pytest.approx([0.0, 0.2, 0.2, 0.6])
    assert found.rewards.tolist() == pytest.approx([0.0, 0.4, 0.4, 1.2])
    assert evaluated([0.0, 0.2, 0.4, 0.6], shown=9).rewards.shape == (4,)


def test_grids_are_written_and_the_pictures_before_training_stay_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    evaluated([0.1, 0.3, 0.5, 0.7]).save_media(folder, 0)
    assert not folder.before_after.exists()
    before = (folder.samples / "before.safetensors").read_bytes()
    evaluated([0.9, 0.9, 0.9, 0.9]).save_media(folder, 5)
    assert (folder.samples / "before.safetensors").read_bytes() == before
    assert sorted(path.name for path in folder.samples.glob("*.png")) == [
        "before_after.png",
        "eval_000000.png",
        "eval_000005.png",
    ]
    with Image.open(folder.before_after) as both, Image.open(folder.samples / "eval_000005.png") as one:
        assert both.height > one.height


@pytest.mark.parametrize(
    ("settings", "run", "told"),
    [
        ({"scorers": {"level": Level()}}, {}, r"eval\.scorers \['level'\] carry the name of a reward scorer"),
        ({"scorers": {"reward": Level()}}, {}, r"scorers named \['reward'\]"),
        ({"scorers": {"invalid": Level()}}, {}, r"scorers named \['invalid'\]"),
        ({}, {"keep_best": 1, "best_metric": "eval/levle"}, "did you mean eval/level"),
        ({"measures": {"count": Count()}}, {"keep_best": 1, "best_metric": "eval/counts/a"}, r"eval/count/\.\.\."),
        ({"every": 20}, {"keep_best": 1, "save_every": 30}, "make one a multiple of the other"),
        ({"prompts": ListedPrompts(("an eleven",))}, {}, r"uses \['an', 'eleven'\]"),
    ],
)
def test_an_evaluation_that_does_not_fit_its_run_is_refused(
    settings: dict[str, Any], run: dict[str, Any], told: str
) -> None:
    model = TinySD3(vocabulary=("a", "seven", "zero"))
    with pytest.raises(ValueError, match=told):
        DiffusionEvalConfig(**{"prompts": PROMPTS, **settings}).fit(model, SAMPLING, LEVEL, RunConfig("x", 9, 0, **run))


@pytest.mark.parametrize("best", ["eval/reward", "eval/level", "eval/other", "eval/count/samples"])
def test_every_figure_of_the_evaluation_may_choose_the_best_checkpoint(best: str) -> None:
    config = DiffusionEvalConfig(PROMPTS, every=25, scorers={"other": Level()}, measures={"count": Count()})
    model = TinySD3(vocabulary=("a", "seven", "zero"))
    config.fit(model, SAMPLING, LEVEL, RunConfig("x", 9, 0, keep_best=1, best_metric=best))


def test_checkpoints_cannot_be_compared_without_an_evaluation() -> None:
    RunConfig("x", 9, 0).refuse_best_without_evaluation()
    with pytest.raises(ValueError, match="keep_best=2 compares checkpoints by eval/reward"):
        RunConfig("x", 9, 0, keep_best=2).refuse_best_without_evaluation()
