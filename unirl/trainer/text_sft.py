"""TextSFTTrainer: supervised fine-tuning of a language model on conversations."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Literal

from unirl.algorithms.token_sft import TokenSFT
from unirl.data.conversations import ConversationSampler, ConversationSource, as_conversations
from unirl.data.overlap import warn_of_overlap
from unirl.data.prompts import PromptRow, PromptSource, plain_texts
from unirl.distributed.group.placement import Slab
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import LanguageFamily
from unirl.observability.judges import EVAL
from unirl.reward.service import RewardConfig
from unirl.rollout.supervised_text import ConversationEncoder, Survey, TokenLimit
from unirl.train.held_out import HeldOutLoss
from unirl.trainer.ar import ARTrainConfig
from unirl.trainer.evaluation import Evaluation, judge
from unirl.trainer.run import RunConfig
from unirl.trainer.sft import SFTTrainer, SupervisedConfig
from unirl.trainer.text_evaluation import TextEvalConfig
from unirl.types.conversation import Conversation
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TextSFTDataConfig:
    """records; batch_size: conversations a step; limit: how long they may be, and which turns are trained."""

    records: ConversationSource
    batch_size: int
    limit: TokenLimit = dataclasses.field(default_factory=TokenLimit)

    def __post_init__(self) -> None:
        there = self.records.count()
        if self.batch_size < 1 or (there is not None and self.batch_size > there):
            known = "1 or more" if there is None else f"1 to {there}"
            raise ValueError(f"batch_size={self.batch_size} does not fit the conversations there are: take {known}")


@dataclasses.dataclass(frozen=True)
class NoPrompts(PromptSource):
    """Of an evaluation that does not sample."""

    def rows(self) -> tuple[PromptRow, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class TextSFTEvalConfig(TextEvalConfig):
    """Evaluation by the loss of held-out conversations, by sampling, or by both.

    records: of which `eval/loss` and `eval/perplexity` are; None measures neither
    prompts: to sample responses to, which `reward` scores: the scorers whose weighted sum is `eval/reward`
    """

    prompts: PromptSource = dataclasses.field(default_factory=NoPrompts)
    records: ConversationSource | None = None
    reward: RewardConfig | None = None

    def __post_init__(self) -> None:
        TextEvalConfig.__post_init__(self)
        if bool(self.prompts.rows()) != (self.reward is not None):
            raise ValueError("prompts are sampled and a reward scores the samples: give both, or neither")
        if self.reward is None and self.records is None:
            raise ValueError("there is nothing to evaluate: give records, or prompts and a reward, or eval: null")
        idle = [name for name in ("scorers", "measures", "pass_at") if self.__dict__[name] and self.reward is None]
        if idle:
            raise ValueError(f"{' and '.join(idle)} tell of samples, and there are none: give prompts and a reward")

    def fit(self, model: LanguageFamily, sampling: ARSamplingParams, run: RunConfig) -> None:
        """ValueError where this evaluation does not fit the rest of the run."""
        if self.reward is None:
            run.refuse_best_without_evaluation()
        else:
            self.check(model, sampling, self.reward, run)
            self.judges(self.reward).refuse_names(["loss", "perplexity"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSFTConfig(SupervisedConfig):
    """Supervised fine-tuning of a language model."""

    model: LanguageFamily
    data: TextSFTDataConfig
    train: ARTrainConfig
    sampling: ARSamplingParams
    algorithm: TokenSFT = dataclasses.field(default_factory=TokenSFT)
    eval: TextSFTEvalConfig | None = None
    domain: Literal["text_sft"] = "text_sft"

    def __post_init__(self) -> None:
        self.check_records(self.data.batch_size)
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        else:
            self.eval.fit(self.model, self.sampling, self.run)


class TextSFTTrainer(SFTTrainer):
    """Cross entropy of given responses."""

    def __init__(self, config: TextSFTConfig) -> None:
        super().__init__(config)
        self.config = config

    def load(self) -> None:
        held_out = None if self.config.eval is None else self.config.eval.records
        self.loaded = self.config.data.records.rows()
        self.loaded_held_out = () if held_out is None else held_out.rows()
        evaluated = {repr(conversation): conversation[0].text for conversation in self.loaded_held_out}
        if evaluated:
            warn_of_overlap("eval.records", evaluated, [repr(conversation) for conversation in self.loaded])

    def prepare(self, slab: Slab) -> ConversationSampler:
        config = self.config
        self.encoder = slab.spawn(ConversationEncoder, self.backend, config.data.limit)
        kept = self._kept(self.loaded, "data.records")
        self.held_out: Part | None = None
        if self.loaded_held_out:
            held_out = self._kept(self.loaded_held_out, "eval.records")
            self.held_out = self.encoder.encode(as_conversations(held_out, 0))
            self.loss = slab.spawn(
                HeldOutLoss,
                self.backend,
                config.train.geometry,
                rows=config.data.batch_size,
                weights=config.shown_weights,
            )
        if config.eval is not None and config.eval.reward is not None:
            self.spawn_judged(slab, ARPipeline, config.eval, config.eval.reward)
            self.sampler.refuse(Media(texts=plain_texts(config.eval.prompts.rows())), config.sampling)
        return ConversationSampler(kept, config.data.batch_size, config.run.seed)

    def evaluate(self) -> Evaluation | None:
        config = self.config.eval
        if config is None:
            return None
        figures: dict[str, float] = {}
        if self.held_out is not None:
            loss = values(self.loss.measure(self.held_out))["loss"]
            figures = {f"{EVAL}loss": loss, f"{EVAL}perplexity": math.exp(min(loss, 700.0))}
        if config.reward is None:
            return Evaluation.of_figures(figures)
        sample = self.sampler.generate(config.request(self.config.sampling))
        scores = self.judges.score(sample)
        found = config.passed(judge(sample, scores, config), scores)
        return dataclasses.replace(found, metrics={**figures, **found.metrics})

    def _kept(self, conversations: tuple[Conversation, ...], name: str) -> tuple[Conversation, ...]:
        """Those that the limit lets through; what it changes is counted in the log."""
        survey: Survey = self.encoder.survey(as_conversations(conversations, 0))
        limit = self.config.data.limit
        try:
            kept = survey.kept(limit).tolist()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not kept:
            raise ValueError(f"{name}: each conversation has more than {limit.named(survey.context)} tokens")
        if len(kept) < len(conversations):
            dropped = len(conversations) - len(kept)
            logger.warning("%s: %d of %d conversations are too long: dropped", name, dropped, len(conversations))
        cut = int((survey.lengths[kept] > limit.within(survey.context)).sum())
        if cut:
            logger.warning("%s: %d of %d conversations are truncated", name, cut, len(kept))
        open_ended = int((~survey.ends).sum())
        if open_ended:
            logger.warning(
                "%s: %d of %d conversations do not end with an end token of the model: it does not learn to stop there",
                name,
                open_ended,
                len(conversations),
            )
        return tuple(conversations[row] for row in kept)
