"""Sample and Part: a lineage of batches, from prompts to what was generated from them.

Two prompts, three images each::

    parts[0]  ids r0.p0, r0.p1                               media.texts = the prompts
    parts[1]  ids r0.p0/0, r0.p0/1, r0.p0/2, r0.p1/0, ...    sampling, segment, conditions, media.images, rewards

An engine takes a Sample whose last Part (the frontier) is unfilled and returns the Sample with that Part filled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any, Literal, Self

import torch

from unirl.types.advantages import Scale, combine_rewards, group_relative, packed_gae
from unirl.types.batch import Rows, dense, listed, mapped, nested, shared
from unirl.types.condition import Conditions, PromptTokens
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sample_id import ancestor_id, child_id, depth, depths, parent_ids
from unirl.types.sampling import DiffusionSamplingParams, SamplingParams
from unirl.types.segment import CleanLatents, LatentSegment, TextSegment


@dataclasses.dataclass(frozen=True, eq=False)
class Part(Rows):
    """One level of a Sample: N rows of the same depth, siblings next to each other in parent order.

    Set when the Part is made:
      ids:        N lineage ids
      sampling:   how the rows are generated; None exactly when they are given (prompts)
      metadata:   N dicts that travel with the prompt row (answers, routing)
    Set by the engine:
      media:      what a person would see
      segment:    what the stage recorded
      conditions: what replay needs beside the segment
      version:    `(N,)` int64, the weights that made each row
    Set by the reward service and by compute_advantages:
      rewards, reward_components, advantages: `(N,)` float32 each; advantages of a critic are the segment's, per token
    """

    ids: list[str] = listed()
    metadata: list[dict[str, Any]] = listed()
    sampling: SamplingParams | None = shared(None)
    media: Media | None = nested(None, heavy=(Media,))
    segment: LatentSegment | TextSegment | CleanLatents | None = nested(None, heavy=(LatentSegment, CleanLatents))
    conditions: Conditions | PromptTokens | None = nested(None, heavy=(Conditions, PromptTokens))
    version: torch.Tensor | None = dense(None)
    rewards: torch.Tensor | None = dense(None)
    reward_components: dict[str, torch.Tensor] | None = mapped(None)
    advantages: torch.Tensor | None = dense(None)

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        if len(depths(self.ids)) > 1:
            raise ValueError(f"the ids of a Part must have one depth, got {self.ids}")
        if len(set(self.ids)) < len(self.ids):
            raise ValueError(f"an id stands twice in a Part: {self.ids}")
        if isinstance(self.segment, LatentSegment) and isinstance(self.sampling, DiffusionSamplingParams):
            made, asked = self.segment.num_steps, self.sampling.steps
            if made != asked:
                raise ValueError(f"the trajectory has {made} steps, {asked} were asked for")

    @property
    def generated(self) -> bool:
        """True for rows that an engine makes."""
        return self.sampling is not None

    @property
    def prompt_ids(self) -> list[str]:
        """The id of the prompt of each row: its parent's, of a given row its own."""
        return parent_ids(self.ids) if self.generated else self.ids

    @property
    def filled(self) -> bool:
        """True when content is there."""
        return self.media is not None

    @property
    def diffusion_sampling(self) -> DiffusionSamplingParams:
        """How the rows of a diffusion model are generated."""
        assert isinstance(self.sampling, DiffusionSamplingParams), "a diffusion stage works on what it generates"
        return self.sampling

    @property
    def guidance_branches(self) -> Conditions:
        """The conditions of a diffusion model."""
        assert isinstance(self.conditions, Conditions), "a diffusion model needs its encoded prompts"
        return self.conditions

    def fork(self, branch: int, sampling: SamplingParams) -> Part:
        """An unfilled Part of `branch` children of every row."""
        if branch < 1:
            raise ValueError(f"branch must be at least 1, got {branch}")
        ids = [child_id(parent, j) for parent in self.ids for j in range(branch)]
        metadata = [row for row in self.metadata for _ in range(branch)]
        return Part(ids=ids, metadata=metadata, sampling=sampling)

    def fill(
        self,
        *,
        media: Media,
        segment: LatentSegment | TextSegment | None,
        conditions: Conditions | PromptTokens | None,
        version: int,
    ) -> Part:
        """This Part with what an engine made."""
        if not self.generated or self.filled:
            raise ValueError("only an unfilled generated Part can be filled")
        versions = torch.full((len(self),), version, dtype=torch.int64)
        return dataclasses.replace(self, media=media, segment=segment, conditions=conditions, version=versions)

    def with_targets(self, *, segment: CleanLatents | TextSegment, conditions: Conditions | PromptTokens) -> Part:
        """This given Part with what supervised training needs of its media."""
        return dataclasses.replace(self, segment=segment, conditions=conditions)

    def with_rewards(self, scores: Scores) -> Part:
        """This Part with a reward for every row."""
        return dataclasses.replace(self, rewards=scores.total, reward_components=scores.components)

    @property
    def valid(self) -> torch.Tensor:
        """`(N,)` bool: rows whose reward is finite; the others carry no gradient. Supervised rows are all valid."""
        return torch.ones(len(self), dtype=torch.bool) if self.rewards is None else torch.isfinite(self.rewards)

    def compute_advantages(
        self,
        scope: Literal["group", "prompt", "global"] = "group",
        scale: Scale = "group_std",
        *,
        combine: Literal["weighted_sum", "per_component"] = "weighted_sum",
        weights: dict[str, float] | None = None,
        eps: float = 1e-6,
    ) -> Part:
        """Rewards relative to their scope.

        scope:   siblings of one parent, all descendants of one prompt, or all rows
        combine: normalise the (weighted) reward, or normalise each component and add up those of non-zero weight by
                 `weights`
        """
        if self.rewards is None:
            raise ValueError("compute_advantages needs rewards: call with_rewards first")
        groups = self.groups(scope)
        if combine == "weighted_sum" and weights is not None:
            raise ValueError(
                "weights are for combine='per_component': the rewards of a weighted sum carry theirs already"
            )
        if combine == "weighted_sum":
            advantages = group_relative(self.rewards, groups, scale=scale, eps=eps)
        else:
            if not self.reward_components or weights is None:
                raise ValueError("combine='per_component' needs reward components and their weights")
            # A row with one missing component is invalid as a whole and leaves the statistics of all of them.
            valid, columns = self.valid, self.reward_components
            columns = {name: torch.where(valid, column, torch.nan) for name, column in columns.items()}
            parts = {name: group_relative(column, groups, scale=scale, eps=eps) for name, column in columns.items()}
            advantages = combine_rewards(parts, weights).to(torch.float32)
        return dataclasses.replace(self, advantages=advantages)

    def compute_gae(self, *, gamma: float, lam: float, whiten: bool) -> Part:
        """Advantages and returns of the tokens of responses, from the values of a critic.

        The reward of a row stands at its last trained token. Rows without a finite reward get 0.
        whiten: the advantages of all trained tokens of rows with a reward get mean 0 and standard deviation 1
        """
        segment = self.segment
        if self.rewards is None or not isinstance(segment, TextSegment) or segment.values is None:
            raise ValueError("compute_gae needs responses with rewards and with the values of a critic")
        advantages, returns = packed_gae(
            self.rewards.to(segment.values.device),
            segment.values,
            segment.loss_mask,
            segment.lengths,
            gamma=gamma,
            lam=lam,
            whiten=whiten,
        )
        return dataclasses.replace(self, segment=dataclasses.replace(segment, advantages=advantages, returns=returns))

    def groups(self, scope: Literal["group", "prompt", "global"]) -> list[str]:
        """The name of the group of each row."""
        if scope == "group":
            return parent_ids(self.ids)
        if scope == "prompt":
            return [ancestor_id(sample_id, 0) for sample_id in self.ids]
        return [""] * len(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """An ordered lineage of Parts: every id of part i has its parent in part i - 1."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a Sample needs at least one Part")
        for level, part in enumerate(self.parts):
            if part.ids and depth(part.ids[0]) != level:
                raise ValueError(f"part {level} of a Sample has ids of depth {depth(part.ids[0])}: {part.ids[0]!r}")
            if level:
                self._check_parents(self.parts[level - 1], part)

    @staticmethod
    def _check_parents(parents: Part, children: Part) -> None:
        runs = [parent for parent, _ in itertools.groupby(parent_ids(children.ids))]
        present = set(runs)
        missing = present.difference(parents.ids)
        if missing:
            raise ValueError(f"parents {sorted(missing)} are not in the Part above")
        if runs != [parent for parent in parents.ids if parent in present]:
            raise ValueError("siblings must stand next to each other, in the order of their parents")

    @property
    def roots(self) -> Part:
        """The prompts."""
        return self.parts[0]

    @property
    def frontier(self) -> Part:
        """The last Part: what is generated now, or was generated last."""
        return self.parts[-1]

    def fork(self, branch: int, sampling: SamplingParams) -> Sample:
        """A request for `branch` children of every frontier row."""
        return Sample((*self.parts, self.frontier.fork(branch, sampling)))

    def with_frontier(self, part: Part) -> Sample:
        """This Sample with its last Part replaced by the same rows in a later state."""
        if part.ids != self.frontier.ids:
            raise ValueError("the new frontier must hold the same rows in the same order")
        return Sample((*self.parts[:-1], part))

    def parent_rows(self) -> torch.Tensor:
        """For each frontier row, the row of its parent in the Part above: `(N,)` int64."""
        if len(self.parts) < 2:
            raise ValueError("the frontier of this Sample are its roots, which have no parents")
        row_of = {sample_id: row for row, sample_id in enumerate(self.parts[-2].ids)}
        return torch.tensor([row_of[parent] for parent in parent_ids(self.frontier.ids)], dtype=torch.long)

    def propagate_rewards(self, how: Literal["mean", "max", "sum"]) -> Sample:
        """Rewards of the Part above the frontier from its finite children; a parent without one is invalid (NaN)."""
        rewards = self.frontier.rewards
        if rewards is None:
            raise ValueError("propagate_rewards needs rewards at the frontier")
        rows = self.parent_rows()
        parent_rewards = torch.full((len(self.parts[-2]),), torch.nan)
        for row in range(len(parent_rewards)):
            children = rewards[(rows == row) & torch.isfinite(rewards)].double()
            if len(children):
                reduced = {"mean": children.mean, "max": children.max, "sum": children.sum}[how]()
                parent_rewards[row] = reduced.to(parent_rewards.dtype)
        parent = dataclasses.replace(self.parts[-2], rewards=parent_rewards)
        return Sample((*self.parts[:-2], parent, self.frontier))

    def split(self, counts: list[int]) -> list[Sample]:
        """Consecutive pieces of `counts` roots each, with all their descendants."""
        # Every piece has all levels, be they empty, so that pieces join again.
        levels = [self.roots.split(counts)]
        for part in self.parts[1:]:
            children = Counter(parent_ids(part.ids))
            levels.append(part.split([sum(children[parent] for parent in above.ids) for above in levels[-1]]))
        return [Sample(parts) for parts in zip(*levels, strict=True)]

    @classmethod
    def concat(cls, samples: list[Self]) -> Self:
        """Join Samples of the same depth."""
        if len({len(sample.parts) for sample in samples}) > 1:
            raise ValueError(f"cannot join Samples of {[len(sample.parts) for sample in samples]} Parts")
        levels = zip(*(sample.parts for sample in samples), strict=True)
        return cls(tuple(Part.concat(list(parts)) for parts in levels))
