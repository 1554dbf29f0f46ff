"""Key and value states of the rows that generate together, and of texts with which later prompts begin."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    States = list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, of shape [heads, tokens, head size]."""

_FEWEST_SHARED = 8  # fewer tokens are not worth a forward of their own
_FEWEST_SPARE, _SPARE_SHARE = 8, 0.125
"""Spare columns: the larger of a number and a share of the width. With short texts, gaps between the rows' memory slow
attention down on a CPU (measured: 1.5 times at batch 128 with 64 spare columns). With long texts, copying everything at
every eighth token does (measured: a quarter of a step at 60 rows of 430 tokens)."""


ROWS_ATTENTION = "afm_rows"


def use_rows_attention(model: Any) -> None:
    """Let a model with SDPA attention use :func:`rows_attention` for single tokens on a CPU."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ROWS_ATTENTION, rows_attention)
    AttentionMaskInterface.register(ROWS_ATTENTION, sdpa_mask)
    model.set_attn_implementation(ROWS_ATTENTION)


def rows_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend from one token per row, in float32. More tokens are left to SDPA (transformers protocol).

    SDPA repeats the keys of grouped heads if there is a mask, and is slow in bfloat16. For one token of 64 rows with 100
    cached tokens, it took 3.7 ms a layer in float32 and 6.6 ms in bfloat16, where this takes 0.7 and 0.9 ms.

    Args:
        query: Shape [rows, heads, 1, head size].
        key: Shape [rows, key heads, tokens, head size], like ``value``.
        attention_mask: Shape [rows, 1, 1, tokens], true where a row attends.

    Returns:
        The weighted values, of shape [rows, 1, heads, head size], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, new, size = query.shape
    if new > 1 or (attention_mask is not None and attention_mask.dtype.is_floating_point):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return result
    grouped = query.reshape(rows, key.shape[1], -1, size).float()
    scores = grouped @ key.float().transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    mixed = scores.softmax(dim=-1) @ value.float()
    return mixed.to(query.dtype).reshape(rows, 1, heads, -1), None


class RowCache:
    """A growable cache in which the newest token of every row is in the same column.

    Implements the part of the transformers cache protocol that a decoder's forward uses: ``update``,
    ``get_seq_length``, ``get_mask_sizes``. Tokens are written in place into spare columns, where
    ``DynamicCache`` would copy everything at each token. Row ``b`` holds real tokens in columns
    ``first[b]`` to ``end``; columns before ``min(first)`` are never read.

    Buffers have the shape [rows, heads, columns, head size], zeroed: a masked column still takes part in
    the weighted sum with weight 0, and 0 times a stray NaN would be NaN.
    """

    is_compileable = False

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._row_capacity = 0
        self._column_capacity = 0
        self.first: list[int] = []
        self._start = 0
        self._end = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first)

    @property
    def width(self) -> int:
        """Columns in use."""
        return self._end - self._start

    def lengths(self) -> list[int]:
        """Number of cached tokens per row, which is also the position of each row's next token."""
        return [self._end - first for first in self.first]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use (transformers protocol)."""
        return self.width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that the next forward attends to, and their offset (transformers protocol)."""
        return self.width + query_length, 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write the states of one new token per row; returns all states of the layer (transformers protocol)."""
        if layer_idx == len(self._keys):
            self._keys.append(self._buffer(keys))
            self._values.append(self._buffer(values))
        rows, start, end = self.rows, self._start, self._end
        cached_keys, cached_values = self._keys[layer_idx], self._values[layer_idx]
        cached_keys[:rows, :, end : end + 1] = keys
        cached_values[:rows, :, end : end + 1] = values
        return cached_keys[:rows, :, start : end + 1], cached_values[:rows, :, start : end + 1]

    def open_column(self) -> None:
        """Make room for one more token per row. Call it before each forward."""
        if self._end == self._column_capacity:
            self._lay_out(self.rows, self.width)

    def close_column(self) -> None:
        """Count the token that the forward has just written."""
        self._end += 1

    def join(self, lengths: Sequence[int]) -> int:
        """Append rows for ``lengths`` tokens. Returns the index of the first new row."""
        begin = self.rows
        rows, width = begin + len(lengths), max(self.width, *lengths)
        if rows > self._row_capacity or width > self._end or self._end == self._column_capacity:
            self._lay_out(rows, width)
        self.first.extend(self._end - length for length in lengths)
        self._start = min(self.first)
        return begin

    def fill(self, layer: int, keys: Tensor, values: Tensor, targets: Sequence[int]) -> None:
        """Copy prefilled states into joined rows of one length.

        Args:
            layer: Layer index.
            keys: Shape [rows, heads, length, head size], one row per target.
            values: Same shape.
            targets: Row indices of this cache.
        """
        if layer == len(self._keys):
            self._keys.append(self._buffer(keys))
            self._values.append(self._buffer(values))
        begin = self._end - keys.shape[2]
        rows = list(targets)
        self._keys[layer][rows, :, begin : self._end] = keys
        self._values[layer][rows, :, begin : self._end] = values

    def states(self, row: int) -> States:
        """Return copies of a row's keys and values, one pair per layer, each of shape [heads, tokens, head size]."""
        span = slice(self.first[row], self._end)
        return [
            (keys[row, :, span].clone(), values[row, :, span].clone())
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def remove(self, row: int) -> None:
        """Drop a row. The last row takes its index."""
        last = self.rows - 1
        if row != last:
            begin, end = self.first[last], self._end
            for buffer in (*self._keys, *self._values):
                buffer[row, :, begin:end] = buffer[last, :, begin:end]
            self.first[row] = self.first[last]
        self.first.pop()
        self._start = min(self.first, default=0)
        if not self.first:
            self._end = 0

    def clear(self) -> None:
        """Drop all rows and free the memory."""
        self.__init__()  # type: ignore[misc]

    def _buffer(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros((self._row_capacity, heads, self._column_capacity, size))

    def _lay_out(self, rows: int, width: int) -> None:
        """Move all states to buffers for at least ``rows`` rows, in which ``width`` columns end at ``end``."""
        old_rows, start, end = self.rows, self._start, self._end
        used = end - start
        self._row_capacity = max(self._row_capacity, 1 << (rows - 1).bit_length())
        self._column_capacity = width + max(_FEWEST_SPARE, int(_SPARE_SHARE * width))
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                new = old.new_empty((self._row_capacity, old.shape[1], self._column_capacity, old.shape[3]))
                new[:, :, : width - used] = 0
                new[:, :, width:] = 0
                new[old_rows:, :, width - used : width] = 0
                new[:old_rows, :, width - used : width] = old[:old_rows, :, start:end]
                buffers[layer] = new
        self.first = [first + width - end for first in self.first]
        self._start, self._end = width - used, width


class PrefixStore:
    """The states of recent prompts and of rows that stopped, up to a total number of tokens.

    A prompt that begins like one of them is computed from where they differ: the same agent's prompt, the next sample of
    a group, the next turn of an episode.

    Args:
        max_tokens: Maximum total of tokens. The texts that were not used for the longest time are dropped first. 0 keeps
            none.

    Attributes:
        tokens: Current total of tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._states: dict[tuple[int, ...], States] = {}
        # No text begins another one, so the one that is most like a prompt is next to the prompt's place.
        self._sorted: list[tuple[int, ...]] = []
        self.tokens = 0

    def put(self, token_ids: tuple[int, ...], states: Callable[[], States]) -> None:
        """Store the states of ``token_ids``, which ``states`` returns, in place of those of its beginning."""
        if not 0 < len(token_ids) <= self._max_tokens:
            return
        for known in self._next_to(token_ids):
            if known[: len(token_ids)] == token_ids:
                return
            if token_ids[: len(known)] == known:
                self._drop(known)
        insort(self._sorted, token_ids)
        self._states[token_ids] = states()
        self.tokens += len(token_ids)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._states)))

    def find(self, prompt_ids: tuple[int, ...]) -> tuple[int, States]:
        """Return how many of the first tokens of ``prompt_ids`` have known states (0 for none), and these states."""
        length, best = 0, prompt_ids
        for known in self._next_to(prompt_ids):
            pairs = enumerate(zip(known, prompt_ids, strict=False))
            shared = next((at for at, (a, b) in pairs if a != b), min(len(known), len(prompt_ids)))
            length, best = max((length, best), (shared, known))
        if length < min(_FEWEST_SHARED, len(prompt_ids)) or not length:
            return 0, []
        states = self._states[best] = self._states.pop(best)
        return length, [(keys[:, :length], values[:, :length]) for keys, values in states]

    def clear(self) -> None:
        """Drop all rows. Required after a change of weights."""
        self.__init__(self._max_tokens)  # type: ignore[misc]

    def _next_to(self, token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        place = bisect(self._sorted, token_ids)
        return self._sorted[max(0, place - 1) : place + 1]

    def _drop(self, key: tuple[int, ...]) -> None:
        del self._states[key], self._sorted[bisect(self._sorted, key) - 1]
        self.tokens -= len(key)
