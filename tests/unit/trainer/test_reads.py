"""Which scorers a run takes: those that can read what its model makes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import unirl.reward.scorers
from unirl.config.run import load_recipe
from unirl.data.prompts import ListedPrompts, PromptRow, PromptSource
from unirl.data.shape_edits import DrawnShape
from unirl.reward.chat import Chat
from unirl.reward.scorer import Scorer
from unirl.reward.scorers.clap import CLAPScore
from unirl.reward.scorers.edit_reward import EditReward
from unirl.reward.scorers.function import FunctionScorer
from unirl.reward.scorers.jpeg import JpegIncompressibility
from unirl.reward.scorers.judge import Judge
from unirl.reward.scorers.length import Length
from unirl.reward.scorers.pick_score import PickScore, VideoPickScore
from unirl.reward.scorers.video_align import VideoAlign
from unirl.reward.service import RewardConfig, WeightedScorer

CHAT = Chat(url="http://127.0.0.1:8000/v1", model="m")
SEEING = Judge(CHAT, template="How well does it show {prompt}?", frames=1)
ANY = FunctionScorer("statistics:fmean")
FIRST_FRAME = DrawnShape("red", "circle", side=32)


@dataclasses.dataclass(frozen=True)
class Pictured(PromptSource):
    """Two prompts that come with so many pictures."""

    count: int

    def rows(self) -> tuple[PromptRow, ...]:
        return tuple(PromptRow(f"prompt {row}", {}, (FIRST_FRAME,) * self.count) for row in range(2))


def recipe(name: str, *settings: str) -> Any:
    return load_recipe(name, ["run.seed=0", *settings])


def rewarded(config: Any, scorer: Scorer, **changes: Any) -> Any:
    return dataclasses.replace(config, reward=RewardConfig({"own": WeightedScorer(scorer)}), eval=None, **changes)


@pytest.mark.parametrize(
    ("name", "scorer", "settings"),
    [
        ("diffusion/tiny_sd3", PickScore(), ()),
        ("diffusion/tiny_sd3", VideoPickScore(), ()),
        ("diffusion/tiny_sd3", SEEING, ()),
        ("diffusion/tiny_sd3", ANY, ()),
        ("diffusion/tiny_wan21", VideoAlign(), ()),
        ("diffusion/tiny_wan21", JpegIncompressibility(), ()),
        ("diffusion/tiny_wan21", PickScore(), ("sampling.frames=1",)),
        ("diffusion/tiny_hunyuan_video_15", VideoAlign(), ()),
        ("diffusion/tiny_ltx2", CLAPScore(), ()),
        ("diffusion/tiny_ltx2", VideoAlign(), ()),
        ("diffusion/tiny_qwen_image_edit", EditReward(), ()),
        ("ar/sort", Length(most=5), ()),
        ("ar/sort", Judge(CHAT), ()),
        ("ar/sort", ANY, ()),
    ],
)
def test_a_run_takes_a_scorer_that_reads_what_its_model_makes(name, scorer, settings):
    assert rewarded(recipe(name, *settings), scorer).reward.scorers["own"].scorer is scorer


@pytest.mark.parametrize(
    ("name", "scorer", "settings", "message"),
    [
        (
            "diffusion/tiny_sd3",
            Length(most=5),
            (),
            "own: Length reads texts, and SD3 makes pictures: take a scorer of pictures, or",
        ),
        ("diffusion/tiny_sd3", Judge(CHAT), (), "own: Judge reads texts, and SD3 makes pictures"),
        ("diffusion/tiny_sd3", CLAPScore(), (), "own: CLAPScore reads sound, and SD3 makes pictures"),
        ("diffusion/tiny_sd3", VideoAlign(), (), "own: VideoAlign reads videos, and SD3 makes pictures"),
        ("diffusion/tiny_wan21", CLAPScore(), (), "own: CLAPScore reads sound, and Wan21 makes videos"),
        ("diffusion/tiny_wan21", PickScore(), (), "own: PickScore reads pictures, and Wan21 makes videos"),
        ("diffusion/tiny_wan21", VideoAlign(), ("sampling.frames=1",), "reads videos, and Wan21 makes pictures"),
        ("diffusion/tiny_ltx2", Length(most=5), (), "own: Length reads texts, and LTX2 makes sound and videos"),
        ("ar/sort", PickScore(), (), "own: PickScore reads pictures, and TinyLM makes texts"),
        ("ar/sort", JpegIncompressibility(), (), "reads pictures or videos, and TinyLM makes texts"),
        ("diffusion/tiny_sd3", EditReward(), (), "own: EditReward reads the one picture .* comes with 0: give each"),
    ],
)
def test_a_run_refuses_a_scorer_that_would_find_nothing_to_score(name, scorer, settings, message):
    config = recipe(name, *settings)
    with pytest.raises(ValueError, match=message):
        rewarded(config, scorer)


@pytest.mark.parametrize("count", [0, 2])
def test_a_scorer_of_edits_is_refused_where_prompts_come_with_none_or_two(count):
    config = recipe("diffusion/tiny_qwen_image_edit")
    data = dataclasses.replace(config.data, prompts=Pictured(count), prompts_per_step=2)
    with pytest.raises(ValueError, match=rf"own: EditReward reads the one picture .* 'prompt 0' comes with {count}"):
        rewarded(config, EditReward(), data=data)


def test_a_scorer_that_is_only_logged_and_one_that_is_held_out_are_looked_at_as_well():
    config = recipe("diffusion/digits")
    logged = {**config.reward.scorers, "own": WeightedScorer(Length(most=5), required=False)}
    with pytest.raises(ValueError, match="scorer own: Length reads texts"):
        dataclasses.replace(config, reward=RewardConfig(logged))
    held_out = dataclasses.replace(config.eval, scorers={"own": Length(most=5)})
    with pytest.raises(ValueError, match="scorer own: Length reads texts"):
        dataclasses.replace(config, eval=held_out)
    edits = recipe("diffusion/qwen_image_edit_flow_grpo")
    other = dataclasses.replace(edits.eval, scorers={"own": EditReward()}, prompts=ListedPrompts(("a cat",)))
    with pytest.raises(ValueError, match=r"scorer own: EditReward reads the one picture .* 'a cat' comes with 0"):
        dataclasses.replace(edits, eval=other)


@pytest.mark.parametrize("name", ["sft/digits", "sft/sort"])
def test_the_evaluation_of_supervised_training_is_looked_at_as_well(name):
    config = recipe(name)
    wrong = Length(most=5) if name == "sft/digits" else PickScore()
    evaluation = dataclasses.replace(config.eval, scorers={"own": wrong})
    with pytest.raises(ValueError, match=f"scorer own: {type(wrong).__name__} reads"):
        dataclasses.replace(config, eval=evaluation)


def test_every_scorer_states_what_it_reads_but_those_that_cannot_know():
    modules = [
        importlib.import_module(f"unirl.reward.scorers.{found.name}")
        for found in pkgutil.iter_modules(unirl.reward.scorers.__path__)
    ]
    scorers = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    silent = {
        cls.__name__ for cls in scorers if issubclass(cls, Scorer) and not cls.reads and not inspect.isabstract(cls)
    }
    assert silent == {"FunctionScorer", "RemoteScorer", "Judge"}
