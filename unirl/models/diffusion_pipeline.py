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
        part, above = sample.frontier, sample.parts[-2].media
        assert part.sampling is not None, "a request says how it is to be made"
        assert above is not None, "the part above an image request carries its prompts"
        assert above.texts is not None, "the part above an image request carries its prompts"
        prompts = [above.texts[row] for row in sample.parent_rows().tolist()]
        with torch.no_grad():
            guided = part.sampling.guidance != 1
            conditions = self.encode(prompts, negative_prompt=part.sampling.negative_prompt if guided else None)
            sizes = _batches(len(part), self.batch_size)
            pieces = zip(part.split(sizes), conditions.split(sizes), strict=True)
            return sample.with_frontier(Part.concat([self._fill(piece, own, version) for piece, own in pieces]))

    def encode(self, prompts: list[str], *, negative_prompt: str | None) -> Conditions:
        """Conditions of N prompts; each distinct prompt, and the negative one, is encoded once. None: no guidance."""
        family, bundle = self.stage.family, self.stage.bundle
        distinct = list(dict.fromkeys(prompts))
        row_of = {prompt: row for row, prompt in enumerate(distinct)}
        positive = family.encode(bundle, distinct).select([row_of[prompt] for prompt in prompts])
        negative: Embedding | None = None
        if negative_prompt is not None:
            negative = family.encode(bundle, [negative_prompt]).select([0] * len(prompts))
        return Conditions(positive=positive, negative=negative)

    def _fill(self, part: Part, conditions: Conditions, version: int) -> Part:
        segment = self.stage.rollout(part, conditions)
        media = self.stage.family.decode(self.stage.bundle, segment.final)
        return part.fill(media=media, segment=segment, conditions=conditions, version=version)


def _batches(count: int, size: int | None) -> list[int]:
    size = size or count
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])
