"""DiffusionPipeline: a request Sample in, a filled Sample out."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.diffusion_stage import DiffusionStage
from unirl.types.batch import piece_sizes
from unirl.types.condition import Conditions
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class DiffusionPipeline:
    """Encode, walk, decode. batch_size: rows in one forward (twice that with guidance); None takes all at once."""

    stage: DiffusionStage
    batch_size: int | None = None

    def __call__(self, sample: Sample, *, version: int) -> Sample:
        """Fill the frontier of `sample`; `version` names the weights that do it."""
        part, above = sample.frontier, sample.parts[-2].media
        assert above is not None, "the part above a request carries its prompts"
        with torch.no_grad():
            conditions = self.encode(above.select(sample.parent_rows()), part.diffusion_sampling)
            sizes = piece_sizes(len(part), self.batch_size)
            pieces = zip(part.split(sizes), conditions.split(sizes), strict=True)
            return sample.with_frontier(Part.concat([self._fill(piece, own, version) for piece, own in pieces]))

    def refuse(self, prompts: Media, sampling: DiffusionSamplingParams) -> None:
        """ValueError for prompts that the model cannot take."""
        self.stage.family.refuse(prompts.required_texts, sampling)

    def encode(self, prompts: Media, sampling: DiffusionSamplingParams) -> Conditions:
        """Conditions of N prompts, of which each distinct one is encoded once, and the negative one beside it."""
        family, bundle = self.stage.family, self.stage.bundle
        first_rows, row_of = _distinct(prompts)
        distinct = prompts.select(first_rows)
        positive = family.encode(bundle, distinct, sampling).select(row_of)
        if not family.guided(sampling.guidance):
            return Conditions(positive=positive)
        negative = dataclasses.replace(distinct, texts=[sampling.negative_prompt] * len(distinct))
        first_rows, row_of_negative = _distinct(negative)
        encoded = family.encode_negative(bundle, negative.select(first_rows), sampling)
        return Conditions(positive=positive, negative=encoded.select([row_of_negative[row] for row in row_of]))

    def _fill(self, part: Part, conditions: Conditions, version: int) -> Part:
        segment = self.stage.rollout(part, conditions)
        media = self.stage.family.decode(self.stage.bundle, segment.final, part.diffusion_sampling)
        return part.fill(media=media, segment=segment, conditions=conditions, version=version)


def _distinct(prompts: Media) -> tuple[list[int], list[int]]:
    """The first row of each distinct prompt, and for every row which of those it is.

    Source pictures are told apart by identity: siblings carry the very pictures of their parent.
    """
    sources = prompts.sources or [[] for _ in prompts.required_texts]
    keys = [(text, *map(id, pictures)) for text, pictures in zip(prompts.required_texts, sources, strict=True)]
    number = {key: position for position, key in enumerate(dict.fromkeys(keys))}
    return [keys.index(key) for key in number], [number[key] for key in keys]
