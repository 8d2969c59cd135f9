"""ARPipeline: a request Sample in, a Sample filled with text out."""

from __future__ import annotations

import dataclasses
import reprlib

import torch

from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.writer import end_tokens
from unirl.types.condition import PromptTokens
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment


@dataclasses.dataclass(frozen=True)
class ARPipeline:
    """Tokenize, write, read. batch_size: rows written at a time; None takes all at once."""

    stage: ARStage
    batch_size: int | None = None

    def __call__(self, sample: Sample, *, version: int) -> Sample:
        """Fill the frontier of `sample`; `version` names the weights that do it."""
        part, above = sample.frontier, sample.parts[-2].media
        assert above is not None, "the part above a request carries its prompts"
        with torch.no_grad():
            assert isinstance(part.sampling, ARSamplingParams), "an ARPipeline writes what ARSamplingParams ask for"
            prompts = self._prompts(above, part.sampling).select(sample.parent_rows())
            size = self.batch_size or len(part)
            pieces = [
                self._fill(part.select(rows), prompts.select(rows), version)
                for rows in torch.arange(len(part)).split(size)
            ]
            return sample.with_frontier(Part.concat(pieces))

    def refuse(self, prompts: Media, sampling: ARSamplingParams) -> None:
        """ValueError for prompts that the model cannot take or that leave no room for a response, and for stops that
        never come. Without prompts, for the latter alone.
        """
        end_tokens(self.stage.family, self.stage.bundle, sampling)
        if prompts.required_texts:
            self._prompts(prompts, sampling)

    def _prompts(self, prompts: Media, sampling: ARSamplingParams) -> PromptTokens:
        family, bundle = self.stage.family, self.stage.bundle
        tokens, context = family.tokenize(bundle, prompts), family.context_length(bundle)
        longest = int(tokens.lengths.argmax())
        length, room = int(tokens.lengths[longest]), sampling.max_new_tokens
        if length + room > context:
            raise ValueError(
                f"the prompt {reprlib.repr(prompts.required_texts[longest])} has {length} tokens: with "
                f"sampling.max_new_tokens={room} more it does not fit the model's context of {context}; shorten it, or "
                f"take at most {max(context - length, 0)}"
            )
        return tokens

    def _fill(self, part: Part, prompts: PromptTokens, version: int) -> Part:
        assert isinstance(part.sampling, ARSamplingParams)
        segment = self.stage.rollout(part, prompts)
        texts = read(self.stage.family, self.stage.bundle, segment, part.sampling)
        return part.fill(media=Media(texts=texts), segment=segment, conditions=prompts, version=version)


def read(family: LanguageFamily, bundle: Bundle, segment: TextSegment, sampling: ARSamplingParams) -> list[str]:
    """The text of each response, up to its first stop string or its end token."""
    # Special tokens are left out by decoding: only an end token that is none has to be taken out here.
    read_ends = {*end_tokens(family, bundle, sampling)} - {*family.special_tokens(bundle).values()}

    def shown(row: list[int]) -> str:
        text = family.decode(bundle, row)
        found = [text.find(stop) for stop in sampling.stop if stop in text]
        if found:
            return text[: min(found)]
        return family.decode(bundle, row[:-1]) if row[-1] in read_ends else text

    return [shown(tokens.tolist()) for tokens in segment.tokens.split(segment.lengths.tolist())]
