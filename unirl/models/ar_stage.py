"""The one ARStage: rollout and replay of any causal language model."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.attention import DecodeLayout, PackedLayout
from unirl.models.language.log_probs import Support, token_log_probs
from unirl.models.language.writer import Writer
from unirl.types.condition import PromptTokens
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

_FIRST_ROOM = 256  # tokens that a rollout has memory for at first; few write as many as they may


@dataclasses.dataclass(frozen=True)
class TokenReplay:
    """What replay says of the T tokens of the responses; 0 at tokens outside of the loss mask.

    log_probs: `(T,)` float32, with a graph
    entropy:   `(T,)` float32 of the distribution of each token, without one
    values:    `(T,)` float32 of the critic before each token, with a graph; None where there is no critic
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ARStage:
    """The trainable unit of a language model. compute_dtype: of the forward; below float32 it runs under autocast."""

    family: LanguageFamily
    bundle: Bundle
    compute_dtype: torch.dtype

    def rollout(self, part: Part, prompts: PromptTokens) -> TextSegment:
        """Generate the rows of an unfilled `part`, with a row of `prompts` each; siblings read theirs once."""
        assert isinstance(part.sampling, ARSamplingParams), "an ARStage generates what ARSamplingParams ask for"
        asked = _Asked.of(part, prompts)
        layout = PackedLayout.of_prompts(asked.prompts.lengths, keeping=True)
        positions, following = self.family.positions(self.bundle, asked.prompts)
        hidden = self._forward(asked.prompts.tokens, positions, layout, asked.prompts.pictures)
        logits = self._logits(hidden[asked.ends.to(hidden.device)])[asked.parents.to(hidden.device)]
        most = part.sampling.max_new_tokens - 1
        cache = layout.key_values(asked.parents, room=min(most, _FIRST_ROOM))
        following, axes = following[asked.parents], positions.shape[-1]
        writer = Writer(part.ids, part.sampling, self.family, self.bundle)
        read = self.family.token_step(self.bundle)
        while not writer.write(logits):
            if writer.left is not None:
                cache.keep(writer.left, columns=cache.start + writer.step - 1)
                following = following[writer.left]
            step = writer.step - 1
            cache.reserve(step + 1, most)
            places = (following + step)[:, None].expand(-1, axes)
            with self._autocast():
                hidden = read(writer.latest, places, DecodeLayout(cache, step))
            logits = self._logits(hidden)
        return writer.segment()

    def replay(self, part: Part) -> TokenReplay:
        """Score the responses of a filled `part`, packed in one forward."""
        return TokenReplay(*self.bundle.run(lambda: self._scored(part, *self._read(part))))

    def values(self, part: Part) -> torch.Tensor:
        """`TokenReplay.values` of a filled `part`, without the work of its log-probs."""
        assert isinstance(part.segment, TextSegment), "values are those of the responses of a rollout"
        mask = part.segment.loss_mask
        values = self.bundle.run(lambda: self._valued(mask, *self._read(part)))
        assert values is not None, "the stage was made without a critic"
        return values

    def _read(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `(T', D)` of what is read, and `(T,)`, which of them predicts each token of the responses."""
        assert isinstance(part.segment, TextSegment), "replay needs the responses of the rollout"
        assert isinstance(part.conditions, PromptTokens), "replay needs the prompts of the rollout"
        segment, asked = part.segment, _Asked.of(part, part.conditions)
        lengths = segment.lengths.cpu()
        ends, starts = lengths.cumsum(0), lengths.cumsum(0) - lengths
        read = torch.ones(int(lengths.sum()), dtype=torch.bool)
        read[ends - 1] = False  # the last token of a response is scored and never read
        layout = PackedLayout(asked.prompts.lengths, lengths - 1, asked.parents)
        positions = self.family.packed_positions(self.bundle, asked.prompts, layout)
        device = self.bundle.device
        tokens = torch.cat([asked.prompts.tokens.to(device), segment.tokens[read.to(device)]])
        hidden = self._forward(tokens, positions, layout, asked.prompts.pictures)
        # Token k of a response is predicted where token k - 1 is read, the first one at the end of the prompt.
        source = torch.full((len(read),), len(asked.prompts.tokens) - 1)
        source[read.roll(1)] += torch.arange(1, int(read.sum()) + 1)
        source[starts] = asked.ends[asked.parents]
        return hidden, source.to(device)

    def _scored(
        self, part: Part, hidden: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The fields of a TokenReplay."""
        segment = part.segment
        assert isinstance(segment, TextSegment)
        sampling, mask = part.sampling, segment.loss_mask
        with self._autocast():
            log_probs, entropy = token_log_probs(
                hidden[source[mask]],
                lambda rows: self.family.logits(self.bundle, rows),
                segment.tokens[mask],
                temperature=sampling.temperature if isinstance(sampling, ARSamplingParams) else 1.0,
                vocabulary=self.family.vocabulary(self.bundle),
                support=_support(segment),
            )
        empty = torch.zeros(len(mask), device=hidden.device)
        values = self._valued(mask, hidden, source)
        return empty.masked_scatter(mask, log_probs), empty.masked_scatter(mask, entropy), values

    def _valued(self, mask: torch.Tensor, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
        if self.bundle.critic is None:
            return None
        values = self.bundle.critic(hidden[source[mask]].float())[:, 0]
        return torch.zeros(len(mask), device=hidden.device).masked_scatter(mask, values)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: PackedLayout,
        pictures: list[dict[str, torch.Tensor]] | None,
    ) -> torch.Tensor:
        """Of a packed row. tokens: `(T,)`; positions: `(T, C)`; `(T, D)`."""
        with self._autocast():
            return self.family.read_tokens(self.bundle, tokens, positions, layout, pictures=pictures)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            return self.family.logits(self.bundle, hidden).float()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.bundle.device.type, self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The distinct prompts of N rows. parents: `(N,)`, which one each row answers; ends: `(P,)`, their last columns."""

    prompts: PromptTokens
    parents: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, part: Part, prompts: PromptTokens) -> _Asked:
        """Siblings have the prompt of their parent, so the first of them stands for all."""
        names = part.prompt_ids
        number = {name: place for place, name in enumerate(dict.fromkeys(names))}
        distinct = prompts.select([names.index(name) for name in number]).to("cpu")
        parents = torch.tensor([number[name] for name in names])
        return cls(distinct, parents, distinct.lengths.cumsum(0) - 1)


def _support(segment: TextSegment) -> Support | None:
    """What the trained tokens were drawn from; None for the whole vocabulary."""
    if segment.support is None or segment.support_sizes is None:
        return None
    trained = segment.loss_mask.repeat_interleave(segment.support_sizes)
    return Support(segment.support[trained], segment.support_sizes[segment.loss_mask])
