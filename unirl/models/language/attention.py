"""Attention over packed rows: no padding outside of it, and a prompt that siblings share goes through the model once.

A `Layout` says which rows the tokens of a forward belong to. It travels through a transformers model as an argument
that every attention module hands on (`install` names the function that takes it), so any model of the library that
supports attention backends runs packed, in rollout and in replay, without a line of its own.

Shapes: B rows of a forward, T tokens each, H query heads, K key heads, D width of a head.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch

_NAME = "unirl_packed"
_NEVER = 2**40  # a place behind every query
_WORTH_A_GROUP = 2**20  # scores of a head: as long as it takes to start the operations of one more group


class Layout(ABC):
    """How the tokens of one forward see each other."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """query: `(B, H, T, D)`; key, value: `(B, K, T, D)`; window: tokens that a token sees, itself included.

        Returns `(B, H, T, D)`.
        """

    @abstractmethod
    def shape(self, tokens: int) -> tuple[int, int]:
        """(B, T) of a forward of so many tokens."""

    @abstractmethod
    def to(self, device: torch.device) -> Layout:
        """This layout, for a forward on `device`."""


def install(text_model: Any) -> None:
    """Have the attention modules of a transformers model take a `layout`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    text_model.config._attn_implementation = _NAME  # noqa: SLF001 - the setter would change the towers beside it


def _attention(  # noqa: PLR0913 - the library calls it so
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout,
    scaling: float,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention function; dropout is among the arguments, and modules are in eval mode."""
    output = layout.attend(module.layer_idx, query, key, value, scale=scaling, window=sliding_window)
    return output.transpose(1, 2), None


@dataclasses.dataclass
class KeyValues:
    """Keys and values of N rows in every layer, `(N, K, S, D)` each: S columns, prompts end at column `start`.

    lengths: `(N,)` of the prompts, which stand right before `start`
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: torch.Tensor
    start: int

    def keep(self, rows: torch.Tensor, columns: int) -> None:
        """Only these rows, in rising order, stay; so many columns of them are filled."""
        for layer in range(len(self.keys)):  # one at a time: two whole caches never exist
            self.keys[layer] = _moved_up(self.keys[layer], rows, columns)
            self.values[layer] = _moved_up(self.values[layer], rows, columns)
        self.lengths = self.lengths[rows.to(self.lengths.device)]

    def reserve(self, room: int, most: int) -> None:
        """Columns for so many generated tokens: where they do not suffice twice as many as there are, up to `most`."""
        there = self.keys[0].shape[2] - self.start
        if room > there:
            columns = self.start + min(max(2 * there, room), most)
            for layer in range(len(self.keys)):
                self.keys[layer] = _roomy(self.keys[layer], columns)
                self.values[layer] = _roomy(self.values[layer], columns)


@dataclasses.dataclass(frozen=True)
class _Group:
    """N packed rows of similar length as attention takes them, padded to the longest: T queries that see S keys.

    queries, keys:             `(N, T)`, `(N, S)`: the column of each token, 0 in the padding
    real:                      the tokens among the flattened padded queries
    query_places, key_places:  `(N or 1, ...)`: where each stands in its row, padded keys behind all of it
    causal:                    keys are the queries, so that no mask is needed to hide padding
    """

    queries: torch.Tensor
    keys: torch.Tensor
    real: torch.Tensor
    query_places: torch.Tensor
    key_places: torch.Tensor
    causal: bool

    @classmethod
    def of_rows(cls, columns: torch.Tensor, lengths: torch.Tensor) -> _Group:
        """Each row sees itself. columns: `(N, T or more)`; lengths: `(N,)`"""
        columns = columns[:, : int(lengths.max())]
        places = torch.arange(columns.shape[1])[None]
        return cls(columns, columns, (places < lengths[:, None]).flatten().nonzero()[:, 0], places, places, causal=True)

    @classmethod
    def behind(cls, prompt: _Group, own: _Group, lengths: torch.Tensor) -> _Group:
        """Each row of `own` behind its row of `prompt`, which has `lengths` `(N,)` tokens."""
        before, after = prompt.query_places, lengths[:, None] + own.query_places
        seen = torch.where(before < lengths[:, None], before, _NEVER)
        keys = torch.cat([prompt.queries, own.queries], dim=1)
        return cls(own.queries, keys, own.real, after, torch.cat([seen, after], dim=1), causal=False)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """True where a query sees a key, `(N or 1, 1, T, S)`; None where it is the causal one."""
        if self.causal and (window is None or window >= self.keys.shape[1]):
            return None
        queries, keys = self.query_places[:, :, None], self.key_places[:, None]
        seen = keys <= queries if window is None else (keys <= queries) & (queries - keys < window)
        return seen[:, None].to(self.keys.device)

    def to(self, device: torch.device) -> _Group:
        """What a forward indexes by on `device`."""
        moved = {name: self.__dict__[name].to(device) for name in ("queries", "keys", "real")}
        return dataclasses.replace(self, **moved)


class PackedLayout(Layout):
    """P prompts end to end, then N responses end to end, in one row of tokens (B = 1).

    A token of a prompt sees its prompt up to itself; one of a response sees its whole prompt and its response up to
    itself. With prompts of 3 and 2 tokens, and responses of 2, 1 and 2 to them (parents 0 0 1)::

        tokens   a a a b b | c c d e e
        columns  0 1 2 3 4   5 6 7 8 9

    prompts: `(P,)` lengths; responses: `(N,)` lengths; parents: `(N,)`, the prompt of each response
    """

    def __init__(self, prompts: torch.Tensor, responses: torch.Tensor, parents: torch.Tensor) -> None:
        self.prompts, self.responses, self.parents = prompts, responses, parents
        # On the CPU: all figures of the layout are known before the forward, without waiting for a device.
        self._columns = _columns(prompts, first=0)
        columns = _columns(responses, first=int(prompts.sum()))
        self._groups = [_Group.of_rows(self._columns[rows], prompts[rows]) for rows in _similar(prompts)]
        for rows in _similar(prompts[parents] + responses):
            asked, written = parents[rows], responses[rows]
            if written.any():
                prompt = _Group.of_rows(self._columns[asked], prompts[asked])
                own = _Group.of_rows(columns[rows], written)
                self._groups.append(_Group.behind(prompt, own, prompts[asked]))
        attended = torch.cat([group.queries.flatten()[group.real] for group in self._groups])
        self._order = None if bool((attended.diff() == 1).all()) else attended.argsort()
        self.windows: set[int | None] = set()  # that the layers of a forward asked for
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def places(self) -> torch.Tensor:
        """`(sum of responses,)`: 0, 1, 2 ... along each response."""
        return _count(self.responses)

    def shape(self, tokens: int) -> tuple[int, int]:
        return 1, tokens

    @classmethod
    def of_prompts(cls, lengths: torch.Tensor, *, keeping: bool = False) -> PackedLayout:
        """Of prompts without responses. keeping: it remembers keys and values of the forward for `key_values`."""
        none = torch.zeros(0, dtype=torch.long)
        layout = cls(lengths, none, none)
        layout._kept = [] if keeping else None
        return layout

    def to(self, device: torch.device) -> PackedLayout:
        """This layout with what a forward indexes by on `device`."""
        self._groups = [group.to(device) for group in self._groups]
        self._order = None if self._order is None else self._order.to(device)
        return self

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.windows.add(window)
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))  # (T, heads, D)
        if self._kept is not None:
            self._kept.append((keys, values))
        outputs = []
        for number, group in enumerate(self._groups):
            mask, seen = self._mask(number, window), (_at(keys, group.keys), _at(values, group.keys))
            output = _attend(_at(queries, group.queries), *seen, mask, scale=scale)
            outputs.append(output.flatten(0, 1)[group.real])
        packed = torch.cat(outputs)
        if self._order is not None:
            packed = packed.index_select(0, self._order)
        return packed.transpose(0, 1)[None]

    def key_values(self, rows: torch.Tensor, room: int) -> KeyValues:
        """What the forward kept, for N rows that answer the prompts `rows` `(N,)` with room for so many tokens."""
        assert self._kept is not None, "a layout that was not told to keep has nothing to give"
        longest = self._columns.shape[1]
        # Prompts stand at the end of their columns: what is generated follows at once, in the same column in all rows.
        shift = (longest - self.prompts)[:, None]
        source = (torch.arange(longest) - shift).clamp(min=0)
        columns = self._columns.gather(1, source)[rows].to(self._kept[0][0].device)
        keys = [_roomy(keys[columns].transpose(1, 2), longest + room) for keys, _ in self._kept]
        values = [_roomy(values[columns].transpose(1, 2), longest + room) for _, values in self._kept]
        return KeyValues(keys, values, self.prompts[rows], start=longest)

    def _mask(self, number: int, window: int | None) -> torch.Tensor | None:
        """Of a group; made once for all layers with such a window."""
        if (number, window) not in self._masks:
            self._masks[number, window] = self._groups[number].mask(window)
        return self._masks[number, window]


class DecodeLayout(Layout):
    """One new token of each row (T = 1), after what is in the cache. step: tokens that were generated before it."""

    def __init__(self, cache: KeyValues, step: int) -> None:
        self._cache, self._step = cache, step
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def shape(self, tokens: int) -> tuple[int, int]:
        return tokens, 1

    def to(self, device: torch.device) -> DecodeLayout:
        return self

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        column = self._cache.start + self._step
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[:, :, column], values[:, :, column] = key[:, :, 0], value[:, :, 0]
        mask = self._mask(column + 1, window, query.dtype)
        # All query heads of a key head ask the same keys: they stand in line as if they were tokens.
        rows, heads = key.shape[:2]
        if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
            return torch.nn.functional.scaled_dot_product_attention(
                query.reshape(rows, heads, -1, query.shape[-1]),
                keys[:, :, : column + 1],
                values[:, :, : column + 1],
                mask,
                scale=scale,
            ).view(query.shape)
        # By hand: of so few queries the library's kernel takes longer, and in float32 the scores lose nothing.
        keys, values = (states.flatten(0, 1)[:, : column + 1] for states in (keys, values))
        scores = torch.bmm((query * scale).reshape(rows * heads, -1, query.shape[-1]), keys.mT)
        if mask is not None:
            scores = (scores.view(rows, heads, -1, column + 1) + mask).flatten(0, 1)
        return torch.bmm(scores.softmax(-1), values).view(query.shape)

    def _mask(self, columns: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to the scores, `(B, 1, 1, columns)`; a bool mask would be turned into it in every layer."""
        if window not in self._masks:
            first = self._cache.start - self._cache.lengths
            if window is not None:
                first = first.clamp(min=columns - window)
            hidden = torch.arange(columns) < first[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
            self._masks[window] = mask.to(self._cache.keys[0].device) if bool(hidden.any()) else None
        return self._masks[window]


def _roomy(states: torch.Tensor, columns: int) -> torch.Tensor:
    """`states` `(N, K, S, D)` in new memory for so many columns."""
    full = states.new_empty(*states.shape[:2], columns, states.shape[3])
    full[:, :, : states.shape[2]] = states
    return full


def _moved_up(states: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """`states[rows]` in the memory of `states`, of which so many columns are filled."""
    kept = states[: len(rows)]
    kept[:, :, :columns] = states[:, :, :columns][rows.to(states.device)]
    return kept


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Padded rows `(rows, tokens, heads, D)` in and out; causal without a mask."""
    output = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    return output.transpose(1, 2)


def _at(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`states[columns]`, whose backward is much faster as an index_select."""
    return states.index_select(0, columns.flatten()).unflatten(0, columns.shape)


def _similar(lengths: torch.Tensor) -> list[torch.Tensor]:
    """The rows in groups, a new one where the rows that follow in falling order are half as long and worth it."""
    if len(lengths) == 0:
        return []
    order = lengths.argsort(descending=True, stable=True)
    groups, longest = [0], int(lengths[order[0]])
    for place, length in enumerate(lengths[order].tolist()):
        if 2 * length <= longest and (len(order) - place) * longest**2 > _WORTH_A_GROUP:
            groups.append(place)
            longest = length
    return [rows.sort().values for rows in order.tensor_split(groups[1:])]


def _real(lengths: torch.Tensor) -> torch.Tensor:
    """`(N, longest)`: True where a padded row holds a token."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest) < lengths[:, None]


def _columns(lengths: torch.Tensor, first: int) -> torch.Tensor:
    """`(N, longest)`: the column of each token where rows stand end to end from `first`; 0 in the padding."""
    starts = first + lengths.cumsum(0) - lengths
    real = _real(lengths)
    return torch.where(real, starts[:, None] + torch.arange(real.shape[1]), 0)


def _count(lengths: torch.Tensor) -> torch.Tensor:
    """`(sum L,)`: 0, 1, 2 ... of each row."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts
