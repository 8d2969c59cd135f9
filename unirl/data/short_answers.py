"""Questions whose answer is one word: rules can verify both that it is right and that it is short."""

from __future__ import annotations

import dataclasses
from typing import Literal

from unirl.data.prompts import PromptRow, PromptSource

# A question and what it is asked of: "thing answer" pairs.
_FACTS = (
    (
        "What is the capital of {}?",
        "France Paris, Italy Rome, Spain Madrid, Japan Tokyo, China Beijing, Russia Moscow, Germany Berlin, "
        "Greece Athens, Egypt Cairo, England London, Ireland Dublin, Portugal Lisbon, Austria Vienna, Norway Oslo, "
        "Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Poland Warsaw, Hungary Budapest, Cuba Havana, "
        "Canada Ottawa, Australia Canberra, Thailand Bangkok, Turkey Ankara, Iran Tehran, Iraq Baghdad, Kenya Nairobi, "
        "Belgium Brussels, Netherlands Amsterdam, Peru Lima, Chile Santiago, Ukraine Kiev, Vietnam Hanoi, "
        "Indonesia Jakarta, Scotland Edinburgh, Bulgaria Sofia",
    ),
    (
        "On which continent is {}?",
        "France Europe, Egypt Africa, China Asia, Brazil America, Germany Europe, Kenya Africa, India Asia, "
        "Canada America, Spain Europe, Nigeria Africa, Japan Asia, Mexico America, Sweden Europe, Morocco Africa, "
        "Thailand Asia, Argentina America",
    ),
    (
        "What is the opposite of {}?",
        "hot cold, up down, big small, fast slow, light dark, good bad, happy sad, old young, rich poor, wet dry, "
        "full empty, early late, open closed, hard soft, left right, day night, high low, strong weak, tall short, "
        "clean dirty, black white, true false, thick thin, near far, loud quiet, love hate, war peace, win lose",
    ),
    (
        "What is the plural of {}?",
        "cat cats, dog dogs, mouse mice, child children, foot feet, tooth teeth, box boxes, man men, woman women, "
        "baby babies, leaf leaves, city cities, knife knives, goose geese, bus buses, book books",
    ),
    (
        "What color is {}?",
        "grass green, snow white, blood red, coal black, butter yellow, milk white, spinach green, gold yellow, "
        "ketchup red, salt white, chocolate brown, cotton white",
    ),
    (
        "What is the past tense of {}?",
        "go went, eat ate, run ran, see saw, take took, write wrote, sing sang, drink drank, give gave, come came, "
        "swim swam, buy bought, think thought, walk walked, play played, break broke",
    ),
)
_ASKED = "Answer with one word."
_HELD_OUT = 4  # every fourth row is held out


@dataclasses.dataclass(frozen=True)
class ShortAnswers(PromptSource):
    """Prompts such as "What is the capital of France? Answer with one word."; the metadata has the answer, "Paris".

    part: 93 rows to train on, or the 31 others
    """

    part: Literal["train", "held_out"] = "train"

    def __post_init__(self) -> None:
        if self.part not in ("train", "held_out"):
            raise ValueError(f"part must be train or held_out, got {self.part!r}")

    def rows(self) -> tuple[PromptRow, ...]:
        pairs = [(question, *fact.split()) for question, facts in _FACTS for fact in facts.split(", ")]
        rows = [
            PromptRow(f"{question.format(thing)} {_ASKED}", {"answer": answer}) for question, thing, answer in pairs
        ]
        held_out = self.part == "held_out"
        return tuple(row for number, row in enumerate(rows) if (number % _HELD_OUT == 0) == held_out)
