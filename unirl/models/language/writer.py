"""Writer: what has been generated so far, and which rows are still being written."""

from __future__ import annotations

import torch

from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.draw import draw, uniforms
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

# Finished rows leave when they are this share of the rows: to copy the cache whenever one ends would cost more.
_LEAVING = 0.25
_BYTES_OF_A_CHARACTER = 4


class Writer:
    """Draws a token for each row at a time until every response has ended.

    step:   tokens drawn so far
    latest: `(B,)`, the last token of each row that is still in the batch
    left:   of the rows that were in the batch before the last token, the ones that still are; None where all stay
    """

    def __init__(self, ids: list[str], sampling: ARSamplingParams, family: LanguageFamily, bundle: Bundle) -> None:
        self._sampling, self._family, self._bundle = sampling, family, bundle
        self._uniforms = uniforms(ids, sampling)
        ends = (*family.end_tokens(bundle), *sampling.stop_token_ids)
        self._ends = torch.tensor(ends, dtype=torch.long)
        count, room = self._uniforms.shape
        self._tokens = torch.zeros(count, room, dtype=torch.long)
        self._log_probs = torch.zeros(count, room)
        self._lengths = torch.zeros(count, dtype=torch.long)
        self._ended = torch.zeros(count, dtype=torch.bool)
        self._support: list[list[torch.Tensor]] = [[] for _ in ids]
        self._rows = torch.arange(count)
        self.step = 0
        self.latest, self.left = torch.empty(0, dtype=torch.long), None

    def write(self, logits: torch.Tensor) -> bool:
        """Draw the next token of each row in the batch from `logits` `(B, V)`. True when all responses have ended."""
        rows, step = self._rows, self.step
        drawn = draw(logits, self._uniforms[rows, step], self._sampling)
        tokens = drawn.tokens.cpu()
        writing = ~self._ended[rows]
        own = rows[writing]
        self._tokens[own, step] = tokens[writing]
        self._log_probs[own, step] = drawn.log_probs.cpu()[writing]
        self._lengths[own] = step + 1
        if drawn.kept is not None:
            for row, kept in zip(own.tolist(), drawn.kept.cpu()[writing], strict=True):
                self._support[row].append(kept.nonzero()[:, 0])
        self._ended[own] = torch.isin(tokens[writing], self._ends)
        if self._sampling.stop:
            for row in own.tolist():
                self._ended[row] |= self._stopped(row)
        self.step += 1
        self._leave(drawn.tokens)
        return len(self._rows) == 0 or self.step == self._sampling.max_new_tokens

    def segment(self) -> TextSegment:
        """The responses, packed."""
        written = torch.arange(self.step) < self._lengths[:, None]
        tokens = self._tokens[:, : self.step][written]
        sizes = [torch.tensor([len(kept) for kept in row], dtype=torch.long) for row in self._support]
        truncated = self._sampling.truncated_support and self._sampling.temperature > 0
        return TextSegment(
            tokens=tokens,
            log_probs=self._log_probs[:, : self.step][written],
            loss_mask=torch.ones(len(tokens), dtype=torch.bool),
            lengths=self._lengths,
            truncated=~self._ended,
            support=torch.cat([kept for row in self._support for kept in row]) if truncated else None,
            support_sizes=torch.cat(sizes) if truncated else None,
            support_total=torch.stack([own.sum() for own in sizes]) if truncated else None,
        )

    def _leave(self, tokens: torch.Tensor) -> None:
        """Set `latest` and `left`; once a part of the rows has ended, they leave."""
        running = ~self._ended[self._rows]
        gone = len(running) - int(running.sum())
        self.left = None
        if gone == len(running) or gone > _LEAVING * len(running):
            self.left = running.nonzero()[:, 0]
            self._rows = self._rows[self.left]
            tokens = tokens[self.left.to(tokens.device)]
        self.latest = tokens

    def _stopped(self, row: int) -> bool:
        """Whether a stop string stands at the end of what was written, with the last token."""
        longest = max(len(text.encode()) for text in self._sampling.stop)
        length = int(self._lengths[row])
        tail = self._tokens[row, max(length - longest - _BYTES_OF_A_CHARACTER, 0) : length].tolist()
        text = self._family.decode(self._bundle, tail)
        return any(stop in text for stop in self._sampling.stop)
