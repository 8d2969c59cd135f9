"""Writer: what has been generated so far, and which rows are still being written."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.draw import draw, uniforms
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

# Rows that have ended leave the batch when they have cost this share of a forward: to copy the cache costs as much.
_LEAVING = 0.25
_BYTES_OF_A_CHARACTER = 4


def end_tokens(family: LanguageFamily, bundle: Bundle, sampling: ARSamplingParams) -> tuple[int, ...]:
    """What ends a response: the model's own, `stop_token_ids`, and the special tokens among the strings of `stop`.

    ValueError for a string of `stop` that has a special token within it, and for tokens that the model does not have.
    """
    vocabulary = family.vocabulary(bundle)
    beyond = [token for token in sampling.stop_token_ids if token >= vocabulary]
    if beyond:
        raise ValueError(
            f"sampling.stop_token_ids={beyond} are no tokens of the model, whose ids are 0 to {vocabulary - 1}: no "
            "response would end there"
        )
    special = family.special_tokens(bundle)
    for stop in sampling.stop:
        within = next((name for name in special if name in stop and stop not in special), None)
        if within is not None:
            raise ValueError(
                f"sampling.stop holds {stop!r}, which no text has: {within!r} is a special token, and texts are read "
                f"without these; stop at {within!r} alone"
            )
    named = (special[stop] for stop in sampling.stop if stop in special)
    return (*family.end_tokens(bundle), *sampling.stop_token_ids, *named)


class Writer:
    """Draws a token for each row at a time until every response has ended.

    step:   tokens drawn so far
    latest: `(B,)`, the last token of each row that is still in the batch
    left:   of the rows that were in the batch before the last token, the ones that still are; None where all stay
    """

    def __init__(self, ids: list[str], sampling: ARSamplingParams, family: LanguageFamily, bundle: Bundle) -> None:
        self._sampling, self._family, self._bundle = sampling, family, bundle
        count, room = len(ids), sampling.max_new_tokens
        self._ends = torch.tensor(end_tokens(family, bundle, sampling), dtype=torch.long)
        # What stands behind the end of a response is left out by its length.
        self._tokens = torch.zeros(count, room, dtype=torch.long)
        self._log_probs = torch.zeros(count, room)
        self._lengths = torch.zeros(count, dtype=torch.long)
        self._supports: list[_Supports] = []
        # Of the rows in the batch:
        self._rows, self._uniforms = torch.arange(count), uniforms(ids, sampling)
        self._running = torch.ones(count, dtype=torch.bool)
        self._idle = 0  # forwards of rows that had ended, since rows left
        self.step = 0
        self.latest, self.left = torch.empty(0, dtype=torch.long), None

    def write(self, logits: torch.Tensor) -> bool:
        """Draw the next token of each row in the batch from `logits` `(B, V)`. True when all responses have ended."""
        drawn = draw(logits, self._uniforms[:, self.step], self._sampling)
        tokens = drawn.tokens.cpu()
        self._tokens[self._rows, self.step] = tokens
        self._log_probs[self._rows, self.step] = drawn.log_probs.cpu()
        if drawn.kept is not None:
            kept = drawn.kept.cpu()[self._running]
            self._supports.append(_Supports(self._rows[self._running], kept.sum(1), kept.nonzero()[:, 1]))
        self.step += 1
        ended = self._running & torch.isin(tokens, self._ends)
        if self._sampling.stop:
            ended |= self._running & torch.tensor([self._stopped(row) for row in self._rows.tolist()])
        self._lengths[self._rows[ended]] = self.step
        self._running &= ~ended
        self._leave(drawn.tokens)
        return not len(self._rows) or self.step == self._sampling.max_new_tokens

    def segment(self) -> TextSegment:
        """The responses, packed."""
        truncated = self._lengths == 0
        lengths = torch.where(truncated, self.step, self._lengths)
        written = torch.arange(self.step) < lengths[:, None]
        tokens = self._tokens[:, : self.step][written]
        support = _Supports.in_order(self._supports) if self._supports else None
        return TextSegment(
            tokens=tokens,
            log_probs=self._log_probs[:, : self.step][written],
            loss_mask=torch.ones(len(tokens), dtype=torch.bool),
            lengths=lengths,
            truncated=truncated,
            support=None if support is None else support.tokens,
            support_sizes=None if support is None else support.sizes,
            support_total=None if support is None else support.total(len(lengths)),
        )

    def _leave(self, tokens: torch.Tensor) -> None:
        """Set `latest` and `left`; once they have cost enough, the rows that have ended leave."""
        self.left, self.latest = None, tokens
        running = int(self._running.sum())
        self._idle += len(self._rows) - running
        if running == 0 or self._idle > _LEAVING * len(self._rows):
            self.left = self._running.nonzero()[:, 0]
            self._rows, self._uniforms = self._rows[self.left], self._uniforms[self.left]
            self._running = self._running[self.left]
            self.latest, self._idle = tokens[self.left.to(tokens.device)], 0

    def _stopped(self, row: int) -> bool:
        """Whether a stop string stands at the end of what was written, with the last token."""
        longest = max(len(text.encode()) for text in self._sampling.stop)
        tail = self._tokens[row, max(self.step - longest - _BYTES_OF_A_CHARACTER, 0) : self.step].tolist()
        text = self._family.decode(self._bundle, tail)
        return any(stop in text for stop in self._sampling.stop)


@dataclasses.dataclass(frozen=True)
class _Supports:
    """What some tokens were drawn from. rows: `(M,)` of the tokens; sizes: `(M,)`; tokens: `(sum S,)`"""

    rows: torch.Tensor
    sizes: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def in_order(cls, steps: list[_Supports]) -> _Supports:
        """Those of all steps, row after row."""
        rows, order = torch.cat([step.rows for step in steps]).sort(stable=True)
        pieces = [piece for step in steps for piece in step.tokens.split(step.sizes.tolist())]
        sizes = torch.cat([step.sizes for step in steps])[order]
        return cls(rows, sizes, torch.cat([pieces[place] for place in order.tolist()]))

    def total(self, count: int) -> torch.Tensor:
        """`(N,)`: the sizes of each of `count` rows together."""
        return torch.zeros(count, dtype=torch.long).index_add(0, self.rows, self.sizes)
