"""Which prompts with pictures a run takes."""

from __future__ import annotations

import dataclasses

import pytest

from unirl.config.run import load_recipe
from unirl.data.prompts import PromptRow, PromptSource
from unirl.data.shape_edits import DrawnShape
from unirl.models.tiny_language import TinyLM

SHAPE = DrawnShape("red", "circle", side=32)


@dataclasses.dataclass(frozen=True)
class Uneven(PromptSource):
    """A picture, two and none."""

    def rows(self) -> tuple[PromptRow, ...]:
        return tuple(PromptRow(f"{count} pictures", {"answer": count}, (SHAPE,) * count) for count in (1, 2, 0))


def test_a_language_model_takes_any_number_with_each_prompt() -> None:
    config = load_recipe("ar/tiny_qwen3_vl", ["run.seed=0"])
    data = dataclasses.replace(config.data, prompts=Uneven())
    assert dataclasses.replace(config, data=data).data.prompts == Uneven()


def test_a_diffusion_model_takes_the_same_number_with_each_prompt() -> None:
    config = load_recipe("diffusion/tiny_qwen_image_edit", ["run.seed=0"])
    data = dataclasses.replace(config.data, prompts=Uneven())
    with pytest.raises(ValueError, match=r"the same number of pictures, got \[0, 1, 2\]"):
        dataclasses.replace(config, data=data)


def test_a_model_that_sees_nothing_takes_none_to_train_or_to_evaluate() -> None:
    config = load_recipe("ar/tiny_qwen3_vl", ["run.seed=0"])
    with pytest.raises(ValueError, match=r"TinyLM sees no pictures.*'How many .* take a VisionLanguage"):
        dataclasses.replace(config, model=TinyLM())
    data = dataclasses.replace(config.data, prompts=Uneven())
    with pytest.raises(ValueError, match=r"TinyLM sees no pictures.*'1 pictures' comes with some"):
        dataclasses.replace(config, model=TinyLM(), data=data, eval=None)
