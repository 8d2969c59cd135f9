"""DiffusionPipeline: a request Sample in, a filled Sample out."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.diffusion_stage import DiffusionStage
from unirl.types.condition import Conditions, Embedding
from unirl.types.sample import Part, Sample


@dataclasses.dataclass(frozen=True)
class DiffusionPipeline:
    """Encode, walk, decode. batch_size: rows in one forward (twice that with guidance); None takes all at once."""

    stage: DiffusionStage
    batch_size: int | None = None

    def __call__(self, sample: Sample, *, version: int) -> Sample:
        """Fill the frontier of `sample`; `version` names the weights that do it."""
        part, rows = sample.frontier, sample.parent_rows()
        texts = sample.parts[-2].media
        assert texts is not None and texts.texts is not None, "the part above an image request carries its prompts"
        with torch.no_grad():
            conditions = self.encode([texts.texts[row] for row in rows.tolist()], part)
            sizes = _batches(len(part), self.batch_size)
            pieces = zip(part.split(sizes), conditions.split(sizes), strict=True)
            return sample.with_frontier(Part.concat([self._fill(piece, own, version) for piece, own in pieces]))

    def encode(self, prompts: list[str], part: Part) -> Conditions:
        """Conditions of N prompts for the rows of `part`; each distinct prompt, and the negative one, is encoded once."""
        assert part.sampling is not None, "only a generated part has conditions"
        family, bundle = self.stage.family, self.stage.bundle
        distinct = list(dict.fromkeys(prompts))
        row_of = {prompt: row for row, prompt in enumerate(distinct)}
        positive = family.encode(bundle, distinct).select([row_of[prompt] for prompt in prompts])
        negative: Embedding | None = None
        if part.sampling.guidance != 1:
            negative = family.encode(bundle, [part.sampling.negative_prompt]).select([0] * len(prompts))
        return Conditions(positive=positive, negative=negative)

    def _fill(self, part: Part, conditions: Conditions, version: int) -> Part:
        segment = self.stage.rollout(part, conditions)
        media = self.stage.family.decode(self.stage.bundle, segment.final)
        return part.fill(media=media, segment=segment, conditions=conditions, version=version)


def _batches(count: int, size: int | None) -> list[int]:
    size = size or count
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])
