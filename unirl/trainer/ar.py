"""ARTrainer: rollout -> reward -> advantage -> replay, loss, step, of a language model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from unirl.algorithms.token_base import TokenAlgorithm
from unirl.data.prompts import PromptRow, plain_texts
from unirl.distributed.group.placement import Slab
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import LanguageFamily
from unirl.train.backend.config import ARBackendConfig
from unirl.train.critic import Critic
from unirl.train.stack.planner import TokenGeometry
from unirl.trainer.evaluation import Evaluation, judge
from unirl.trainer.responses import OVERLONG, ResponseConfig, response_metrics
from unirl.trainer.rl import REWARD_FIGURES, AdvantageConfig, RLConfig, RLTrainer, check_groups
from unirl.trainer.text_evaluation import TextEvalConfig
from unirl.types.media import Media
from unirl.types.metric import Metrics, merge
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams


@dataclasses.dataclass(frozen=True)
class ARTrainConfig:
    """backend: weights and optimizer; geometry: how a rollout is cut into updates and micro-batches."""

    backend: ARBackendConfig
    geometry: TokenGeometry = dataclasses.field(default_factory=TokenGeometry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ARConfig(RLConfig):
    """An RL run of a language model. Contradictions between nodes are refused here, before any weight loads."""

    model: LanguageFamily
    sampling: ARSamplingParams
    algorithm: TokenAlgorithm
    train: ARTrainConfig
    responses: ResponseConfig = dataclasses.field(default_factory=ResponseConfig)
    eval: TextEvalConfig | None = None
    domain: Literal["ar"] = "ar"

    def __post_init__(self) -> None:
        self._check_advantages()
        self.responses.check(self.data.samples_per_prompt, self.sampling)
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 takes the likeliest token always: all samples of a group are one text, and "
                "there is no probability to train on; set it above 0 (eval.temperature=0 is for evaluations)"
            )
        if self.rollout.weights != "live":
            name = type(self.algorithm).__name__
            raise ValueError(f"{name} samples with the live weights: set rollout.weights=live, got ema")
        rows = self.check_rollout([*REWARD_FIGURES, OVERLONG])
        self._check_pictures(rows if self.eval is None else (*rows, *self.eval.prompts.rows()))
        if self.eval is not None:
            self.eval.check(self.model, self.sampling, self.reward, self.run)

    def _check_pictures(self, rows: tuple[PromptRow, ...]) -> None:
        seen = [row.prompt for row in rows if row.pictures]
        if seen and not self.model.reads_pictures:
            raise ValueError(
                f"{type(self.model).__name__} sees no pictures, and the prompt {seen[0]!r} comes with some: take a "
                "VisionLanguage, or leave pictures out of the prompts"
            )

    def _check_advantages(self) -> None:
        name, values, advantage = type(self.algorithm).__name__, self.algorithm.needs.values, self.advantage
        if values is None:
            check_groups(self.data, advantage)
            if self.train.backend.critic:
                raise ValueError(f"{name} learns no values: leave train.backend.critic at false")
            if self.responses.max_draws and advantage.scope == "global":
                raise ValueError(
                    "with advantage.scope=global groups of equal rewards teach as well: leave responses.max_draws at "
                    f"0, got {self.responses.max_draws}"
                )
            if self.responses.max_draws and advantage.combine == "per_component":
                raise ValueError(
                    "responses.max_draws judges groups by the reward, and with advantage.combine=per_component groups "
                    "of equal rewards teach as well: set combine=weighted_sum, or leave max_draws at 0, got "
                    f"{self.responses.max_draws}"
                )
            if self.responses.overlong is not None and advantage.combine == "per_component":
                raise ValueError(
                    "responses.overlong is added to the reward, which advantage.combine=per_component does not look "
                    "at: set combine=weighted_sum, or leave overlong out"
                )
            return
        if not self.train.backend.critic:
            raise ValueError(f"{name} learns values: set train.backend.critic=true")
        if advantage != AdvantageConfig():
            raise ValueError(
                f"{name} takes its advantages from its critic (algorithm.gae), so advantage has no effect: leave it "
                f"out, got {advantage}"
            )
        if self.responses.max_draws:
            raise ValueError(
                f"with a critic groups of equal rewards teach as well: leave responses.max_draws at 0, got "
                f"{self.responses.max_draws}"
            )


class ARTrainer(RLTrainer):
    """Reinforcement learning of a language model."""

    def __init__(self, config: ARConfig) -> None:
        super().__init__(config)
        self.config = config

    def setup(self, slab: Slab) -> None:
        train = self.config.train
        self.spawn_sampler(slab, ARPipeline)
        self._refuse_prompts()
        self.spawn_learner(slab)
        self.critic = slab.spawn(Critic, self.backend, train.geometry) if train.backend.critic else None

    def _refuse_prompts(self) -> None:
        """What does not fit the model is told of now, not by the step that draws them; those with pictures are then."""
        config = self.config
        rows = [*self.prompts.source, *(() if config.eval is None else config.eval.prompts.rows())]
        self.rollout.refuse(Media(texts=plain_texts(rows)), config.sampling)

    def step(self, number: int) -> Metrics:
        config = self.config
        part, drawn = config.responses.gathered(config.data.prompts_per_step, functools.partial(self._scored, number))
        part = self._with_advantages(config.responses.shaped(part, config.sampling))
        metrics = self.train(part, number)
        return merge([self.reward_metrics(part), response_metrics(part), drawn, metrics])

    def _scored(self, number: int, extra: int, count: int) -> Part:
        """Responses to `count` prompts with their rewards; `extra` numbers the further draws of rollout `number`."""
        return self.scored(self.prompts.draw(number, extra, count=count))

    def _with_advantages(self, part: Part) -> Part:
        """Relative to the group, or from the values of a critic."""
        gae = self.config.algorithm.needs.values
        if gae is None:
            return self.config.advantage.of(part, self.config.reward)
        assert self.critic is not None
        with self.timer("values"):
            return gae.of(self.critic.valued(part))

    def evaluate(self) -> Evaluation | None:
        config = self.config.eval
        if config is None:
            return None
        sample = self.rollout.generate(config.request(self.config.sampling))
        scores = self.judges.score(sample)
        return config.passed(judge(sample, scores, config), scores)
