"""Computing the states of prompts before their rows join a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from afm.models.cache import RowCache

if TYPE_CHECKING:
    from torch import Tensor

    from afm.models.prefix import States

_TOKENS_AT_ONCE = 8192

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Continuation:
    """A row whose first tokens were computed before.

    Attributes:
        row: Its index in the cache.
        known: States of the tokens computed before.
        new: The tokens that follow them.
    """

    row: int
    known: States
    new: tuple[int, ...]

    @property
    def known_tokens(self) -> int:
        """Tokens computed before."""
        return int(self.known[0][0].shape[1])


class Prefiller:
    """Fills joined rows of a cache.

    Padding stands behind the tokens, where causal attention keeps it out of their sight.
    """

    def __init__(self, model: Any, pad_id: int, device: Any) -> None:
        self._model = model
        self._pad_id = pad_id
        self._device = device

    def fresh(self, cache: RowCache, places: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """Compute prompts from nothing; ``places`` are the rows of each."""
        prompts = sorted((prompt for prompt in places if prompt), key=len)
        for chunk in _chunks(prompts, [len(prompt) for prompt in prompts]):
            layers = self._forward(chunk, past=None)
            by_length: dict[int, tuple[list[int], list[int]]] = {}
            for source, prompt in enumerate(chunk):
                sources, rows = by_length.setdefault(len(prompt), ([], []))
                sources += [source] * len(places[prompt])
                rows += places[prompt]
            for index, layer in enumerate(layers):
                for length, (sources, rows) in by_length.items():
                    keys, values = layer.keys[sources, :, :length], layer.values[sources, :, :length]
                    cache.fill(index, keys, values, rows)

    def continued(self, cache: RowCache, rows: Sequence[Continuation]) -> None:
        """Compute what is new in ``rows``."""
        for item in rows:
            if not item.new:
                for index, (keys, values) in enumerate(item.known):
                    cache.fill(index, keys[None], values[None], [item.row])
        rows = sorted((item for item in rows if item.new), key=lambda item: item.known_tokens + len(item.new))
        for chunk in _chunks(rows, [item.known_tokens + len(item.new) for item in rows]):
            self._continue(cache, chunk)

    def _continue(self, cache: RowCache, rows: Sequence[Continuation]) -> None:
        known = [item.known_tokens for item in rows]
        longest = max(known)
        past = [
            (
                _left_padded([item.known[layer][0] for item in rows], longest),
                _left_padded([item.known[layer][1] for item in rows], longest),
            )
            for layer in range(len(rows[0].known))
        ]
        layers = self._forward([item.new for item in rows], past=past, known=known)
        for index, layer in enumerate(layers):
            for source, item in enumerate(rows):
                span = slice(longest - known[source], longest + len(item.new))
                keys, values = layer.keys[source, None, :, span], layer.values[source, None, :, span]
                cache.fill(index, keys, values, [item.row])

    def _forward(
        self,
        prompts: Sequence[Sequence[int]],
        past: Sequence[tuple[Tensor, Tensor]] | None,
        known: Sequence[int] = (),
    ) -> Any:
        """The cached layers after ``prompts``, which follow ``known`` tokens of ``past`` each."""
        import torch
        from transformers import DynamicCache

        width = max(map(len, prompts))
        padded = [[*prompt, *[self._pad_id] * (width - len(prompt))] for prompt in prompts]
        cache = DynamicCache()
        extra: dict[str, Any] = {}
        if past is not None:
            for layer, (keys, values) in enumerate(past):
                cache.update(keys, values, layer)
            known_BT = torch.tensor(known, device=self._device).unsqueeze(1)
            new_T = torch.arange(width, device=self._device)
            extra["position_ids"] = known_BT + new_T
            extra["attention_mask"] = _mask(known_BT, past[0][0].shape[2], new_T)
        self._model(
            input_ids=torch.tensor(padded, device=self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        return cache.layers


def _mask(known_BT: Tensor, past_width: int, new_T: Tensor) -> Tensor:
    """Who sees whom, of shape [rows, 1, new, past + new]: the row's own past, and nothing that comes later."""
    import torch

    ages_T = torch.arange(past_width, 0, -1, device=new_T.device)
    past_BT = ages_T <= known_BT
    past = past_BT[:, None, None, :].expand(-1, 1, len(new_T), -1)
    new = (new_T[None, :] <= new_T[:, None])[None, None].expand(len(known_BT), 1, -1, -1)
    return torch.cat([past, new], dim=-1)


def _left_padded(states: Sequence[Tensor], width: int) -> Tensor:
    """States of shape [heads, tokens, size] side by side, their last tokens in one column, zeros before."""
    heads, _, size = states[0].shape
    padded = states[0].new_zeros((len(states), heads, width, size))
    for row, item in enumerate(states):
        padded[row, :, width - item.shape[1] :] = item
    return padded


def _chunks(items: Sequence[T], lengths: Sequence[int]) -> Iterator[list[T]]:
    """Cut ``items``, sorted by length, into batches of a bounded number of padded tokens (one item at least)."""
    chunk: list[T] = []
    for item, length in zip(items, lengths, strict=True):
        if chunk and (len(chunk) + 1) * length > _TOKENS_AT_ONCE:
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk
