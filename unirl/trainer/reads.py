"""Whether the scorers of a run can read what its model makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unirl.data.prompts import PromptRow
from unirl.models.base import Family
from unirl.reward.scorer import Scorer
from unirl.reward.service import RewardConfig
from unirl.types.kinds import Read
from unirl.types.sampling import SamplingParams

_PLURALS: dict[Read, str] = {
    "picture": "pictures",
    "video": "videos",
    "frames": "pictures or videos",
    "sound": "sound",
    "text": "texts",
    "source": "source pictures",
}


def check_reads(reward: RewardConfig, model: Family, sampling: SamplingParams, rows: Sequence[PromptRow]) -> None:
    """ValueError for a scorer that would find nothing to score in the samples of `model` for these prompts."""
    made: set[Read] = {*model.made(sampling)}
    if made & {"picture", "video"}:
        made.add("frames")
    scorers = {name: weighted.scorer for name, weighted in reward.scorers.items()}
    for name, scorer in scorers.items():
        lacking = _listed(scorer.needs - made - {"source"})
        if lacking:
            own = _listed(model.made(sampling))
            raise ValueError(
                f"scorer {name}: {type(scorer).__name__} reads {lacking}, and {type(model).__name__} makes {own}: take "
                f"a scorer of {own}, or a model that makes {lacking}"
            )
        if "source" in scorer.needs:
            _refuse_other_than_one(name, scorer, [row for row in rows if reward.scorers[name].applies(row.metadata)])


def _refuse_other_than_one(name: str, scorer: Scorer, rows: Iterable[PromptRow]) -> None:
    for row in rows:
        if len(row.pictures) != 1:
            raise ValueError(
                f"scorer {name}: {type(scorer).__name__} reads the one picture that a prompt comes with, and "
                f"{row.prompt!r} comes with {len(row.pictures)}: give each prompt its picture, or take another scorer"
            )


def _listed(kinds: Iterable[Read]) -> str:
    return " and ".join(sorted(_PLURALS[kind] for kind in kinds))
