"""At load: do packed forwards and decoding give what the model's own forward gives? It may do more than it shows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from unirl.models.base import Bundle, LanguageFamily
from unirl.models.language.attention import DecodeLayout, PackedLayout
from unirl.models.language.config_facts import refuse_unshown
from unirl.types.condition import PromptTokens

# Of the norm of the logits. Rounding stays far below, a soft cap or a sink that is left out far above.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
_RESPONSES, _PARENTS = (2, 4, 3), (0, 1, 1)


def refuse_other_forwards(
    family: LanguageFamily,
    bundle: Bundle,
    prompts: PromptTokens,
    *,
    own: Callable[[torch.Tensor, int], torch.Tensor],
    install: Callable[[], None],
    avoid: tuple[int, ...] = (),
) -> None:
    """Install the packed attention; ValueError where packed or decoded rows have not the logits that they have alone.

    prompts: two of them; own: a row `(1, T)` and the number of the prompt that it answers to logits `(1, T, V)`, by
    the model's own forward; avoid: tokens that no response may hold
    """
    model: Any = bundle.transformer
    written = trial_tokens(sum(_RESPONSES), family.vocabulary(bundle), avoid)
    responses, rows = written.split(_RESPONSES), prompts.tokens.split(prompts.lengths.tolist())
    device = bundle.device
    with torch.no_grad():
        expected = []
        for parent, response in zip(_PARENTS, responses, strict=True):
            row = torch.cat([rows[parent], response])[None].to(device)
            expected.append(own(row, parent)[0, -len(response) :].float())
        install()
        trial = _Trial(family, bundle, prompts, responses)
        try:
            packed, windows = trial.packed()
            ways = {"run packed": packed, "decode": trial.decoded()}
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            # Whatever a forward that was written for other attention functions does with this one.
            raise ValueError(f"{type(model).__name__} does not take packed attention ({error})") from error
    wanted = torch.cat(expected)
    for way, logits in ways.items():
        difference = float((logits.float() - wanted).norm() / wanted.norm())
        if not difference <= _TOLERANCE[str(model.dtype).removeprefix("torch.")]:
            raise ValueError(
                f"{type(model).__name__} does not {way}: its logits differ from those of its own forward by "
                f"{difference:.1e} of their norm. Models whose attention has more than a causal mask and a window "
                "(soft caps, sinks, linear attention) or that change their logits after the head are not supported"
            )
    refuse_unshown(model.config.get_text_config(), windows)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Two prompts and the responses to them, of _RESPONSES tokens."""

    family: LanguageFamily
    bundle: Bundle
    prompts: PromptTokens
    responses: tuple[torch.Tensor, ...]

    def packed(self) -> tuple[torch.Tensor, set[int | None]]:
        """Logits after each token of the responses, in one forward: as in replay; and the windows it asked for."""
        layout = PackedLayout(self.prompts.lengths, torch.tensor(_RESPONSES), torch.tensor(_PARENTS))
        positions = self.family.packed_positions(self.bundle, self.prompts, layout)
        hidden = self._read(torch.cat([self.prompts.tokens, *self.responses]), positions, layout)
        return self.family.logits(self.bundle, hidden[-sum(_RESPONSES) :]), layout.windows

    def decoded(self) -> torch.Tensor:
        """The same, a token of each response at a time: as in a rollout."""
        layout, parents = PackedLayout.of_prompts(self.prompts.lengths, keeping=True), torch.tensor(_PARENTS)
        positions, following = self.family.positions(self.bundle, self.prompts)
        self._read(self.prompts.tokens, positions, layout)
        cache = layout.key_values(parents, room=max(_RESPONSES))
        filler = float(self.responses[0][0])
        filled = torch.nn.utils.rnn.pad_sequence(list(self.responses), batch_first=True, padding_value=filler)
        logits, read = [], self.family.token_step(self.bundle)
        for step, latest in enumerate(filled.mT):
            places = (following[parents] + step)[:, None].expand(-1, positions.shape[-1])
            hidden = read(latest, places, DecodeLayout(cache, step))
            logits.append(self.family.logits(self.bundle, hidden))
        real = torch.arange(max(_RESPONSES)) < torch.tensor(_RESPONSES)[:, None]
        return torch.stack(logits, dim=1)[real.to(self.bundle.device)]

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        return self.family.read_tokens(self.bundle, tokens, positions, layout, pictures=self.prompts.pictures)


def trial_tokens(count: int, vocabulary: int, avoid: tuple[int, ...] = ()) -> torch.Tensor:
    """`(count,)` tokens all over the vocabulary, none of them to `avoid`."""
    drawn = ((number * 7919 + 11) % vocabulary for number in itertools.count())
    return torch.tensor(list(itertools.islice((token for token in drawn if token not in avoid), count)))
