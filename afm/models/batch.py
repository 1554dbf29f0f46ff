"""Rows that an engine generates together. They join, advance one token per step, and leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from afm.errors import ConfigError, EngineError
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.cache import ROWS_ATTENTION, PrefixStore, RowCache, use_rows_attention
from afm.models.sampling import BatchSampler, Draw
from afm.models.tokenizer import StopMatcher

if TYPE_CHECKING:
    from torch import Tensor

    from afm.models.cache import States

_TOKENS_AT_ONCE = 8192
_SCORED_AT_ONCE = 512
"""Number of tokens whose logits over the whole vocabulary are in memory at the same time."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One generation in progress: the request, and the sampled tokens so far."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: int
    future: Future[Generation]
    on_token: Callable[[int], None] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    watched: frozenset[int] = frozenset()
    version: int = 0

    def generation(self, finish: FinishReason) -> Generation:
        """Return the result so far."""
        return Generation(tuple(self.token_ids), tuple(self.logprobs), finish)


class RunningBatch:
    """Requests that share one forward pass per token.

    A prompt is prefilled without its last token, which is then processed in the same step as the last tokens of all
    other rows. So sampling happens in one place, and padding never reaches a result.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: frozenset[int],
        pad_id: int,
        stops: StopMatcher,
        prefix_tokens: int = 0,
    ) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ConfigError(
                f"the model has layers of the kinds {sorted(kinds)}; this engine computes full_attention only. "
                "Serve the model with vLLM and give the server's address"
            )
        self._model = model
        self._device = next(model.parameters()).device
        self._direct_mask = getattr(model.config, "_attn_implementation", "") in ("sdpa", ROWS_ATTENTION)
        if self._direct_mask and self._device.type == "cpu":
            use_rows_attention(model)
        self._eos_ids = eos_ids
        self._prefiller = Prefiller(model, pad_id, self._device)
        self._prefixes = PrefixStore(prefix_tokens if self._direct_mask else 0)
        self._version = 0
        self._stops = stops
        self._cache = RowCache()
        self._rows: list[GenerationRequest] = []
        self._sampler: BatchSampler | None = None
        self._inputs_BT: Tensor | None = None
        self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """The rows in flight."""
        return tuple(self._rows)

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Prefill ``requests`` and add them to the batch.

        Equal prompts are computed once. A beginning whose states are known is not computed again.
        """
        self._forget_inputs()
        begin = self._cache.join([len(request.prompt_ids) - 1 for request in requests])
        places: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(requests, begin):
            request.watched = self._eos_ids | self._stops.watch(request.params.stop)
            request.version = self._version
            self._rows.append(request)
            places.setdefault(request.prompt_ids[:-1], []).append(row)
        fresh: dict[tuple[int, ...], list[int]] = {}
        continued: list[Continuation] = []
        for prompt, rows in places.items():
            length, known = self._prefixes.find(prompt)
            self.reused_tokens += length * len(rows)
            if length:
                continued.append(Continuation(rows, known, prompt[length:]))
            else:
                fresh[prompt] = rows
        self._prefiller.fresh(self._cache, fresh)
        self._prefiller.continued(self._cache, continued)
        for prompt, rows in places.items():
            self._prefixes.put(prompt, partial(self._cache.states, rows[0]))

    def step(self) -> list[tuple[GenerationRequest, FinishReason]]:
        """Sample one token for every row. Returns the finished rows, which are removed."""
        logits_BV = self._forward()
        if self._sampler is None:
            draws = [
                Draw(row.params, row.key, len(row.prompt_ids) + len(row.token_ids)) for row in self._rows
            ]
            self._sampler = BatchSampler(draws, self._device)
        tokens_B, logprobs_B = self._sampler.sample(logits_BV)
        self._inputs_BT = tokens_B.unsqueeze(1)
        finished = []
        for index, (row, token, logprob) in enumerate(
            zip(self._rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        ):
            if not isfinite(logprob):
                raise EngineError(
                    f"the model's output is not finite (log-probability {logprob} for token {token} after "
                    f"{len(row.prompt_ids) + len(row.token_ids)} tokens); its weights are probably broken"
                )
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if row.on_token is not None:
                row.on_token(token)
            if token in row.watched or len(row.token_ids) >= row.params.max_new_tokens:
                reason = self._finish_reason(row, token)
                if reason is not None:
                    finished.append((index, row, reason))
        for index, row, reason in finished:
            if reason is FinishReason.STOP and row.version == self._version:
                ids = (*row.prompt_ids, *row.token_ids[:-1])  # its episode will probably continue
                self._prefixes.put(ids, partial(self._cache.states, index))
        self._remove([index for index, _, _ in finished])
        return [(row, reason) for _, row, reason in finished]

    def _forward(self) -> Tensor:
        import torch

        if self._inputs_BT is None:
            last = [[(row.token_ids or row.prompt_ids)[-1]] for row in self._rows]
            self._inputs_BT = torch.tensor(last, device=self._device)
        cache = self._cache
        cache.open_column()
        lengths = cache.lengths()
        positions_BT = torch.tensor(lengths, device=self._device).unsqueeze(1)
        mask = None
        if min(lengths) < cache.width:
            ages_T = torch.arange(cache.width, -1, -1, device=self._device)
            mask = ages_T <= positions_BT
            if self._direct_mask:
                mask = mask[:, None, None, :]
        output = self._model(
            input_ids=self._inputs_BT,
            attention_mask=mask,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.close_column()
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _finish_reason(self, row: GenerationRequest, token: int) -> FinishReason | None:
        if token in self._eos_ids:
            return FinishReason.END_OF_TEXT
        if token in row.watched and self._stops.completed(row.token_ids, row.params.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.token_ids) >= row.params.max_new_tokens else None

    def drop(self, requests: Collection[GenerationRequest]) -> None:
        """Remove ``requests`` without a result. Unknown requests are ignored."""
        self._remove([index for index, row in enumerate(self._rows) if row in requests])

    def forget_prefixes(self) -> None:
        """Drop cached states after a change of weights. Rows in flight continue with theirs."""
        self._version += 1
        self._prefixes.clear()

    def clear(self) -> None:
        """Remove all rows and free the memory."""
        self._rows.clear()
        self._cache.clear()
        self._prefixes.clear()
        self._forget_inputs()

    def _remove(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        for index in reversed(indices):
            self._cache.remove(index)
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last
        self._forget_inputs()

    def _forget_inputs(self) -> None:
        self._sampler = None
        self._inputs_BT = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Rows with one prompt, whose first tokens are already computed.

    Attributes:
        rows: Indices in the cache.
        known: States of the computed tokens.
        new: Tokens that follow them.
    """

    rows: Sequence[int]
    known: States
    new: tuple[int, ...]

    @property
    def known_tokens(self) -> int:
        """Number of computed tokens."""
        return int(self.known[0][0].shape[1])


class Prefiller:
    """Fills joined rows of a cache.

    Padding comes after the tokens, where causal attention hides it from them.
    """

    def __init__(self, model: Any, pad_id: int, device: Any) -> None:
        self._model = model
        self._pad_id = pad_id
        self._device = device

    def fresh(self, cache: RowCache, places: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """Compute whole prompts. ``places`` are the rows of each prompt."""
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

    def continued(self, cache: RowCache, prompts: Sequence[Continuation]) -> None:
        """Compute the new tokens of ``prompts``."""
        for item in prompts:
            if not item.new:
                for index, (keys, values) in enumerate(item.known):
                    cache.fill(index, keys[None], values[None], item.rows)
        rest = sorted(
            (item for item in prompts if item.new), key=lambda item: item.known_tokens + len(item.new)
        )
        for chunk in _chunks(rest, [item.known_tokens + len(item.new) for item in rest]):
            self._continue(cache, chunk)

    def _continue(self, cache: RowCache, prompts: Sequence[Continuation]) -> None:
        known = [item.known_tokens for item in prompts]
        longest = max(known)
        past = [
            (
                _left_padded([item.known[layer][0] for item in prompts], longest),
                _left_padded([item.known[layer][1] for item in prompts], longest),
            )
            for layer in range(len(prompts[0].known))
        ]
        layers = self._forward([item.new for item in prompts], past=past, known=known)
        for index, layer in enumerate(layers):
            for source, item in enumerate(prompts):
                span = slice(longest - known[source], longest + len(item.new))
                keys, values = layer.keys[source, None, :, span], layer.values[source, None, :, span]
                cache.fill(index, keys, values, item.rows)

    def _forward(
        self,
        prompts: Sequence[Sequence[int]],
        past: Sequence[tuple[Tensor, Tensor]] | None,
        known: Sequence[int] = (),
    ) -> Any:
        """Return the cached layers after ``prompts``, each of which follows ``known`` tokens of ``past``."""
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


def score_tokens(model: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of each id after the first, given those before it, at temperature 1."""
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    ids_T = torch.tensor(token_ids, device=device)
    cache = DynamicCache()
    scores: list[float] = []
    for begin in range(0, len(token_ids) - 1, _SCORED_AT_ONCE):
        end = min(begin + _SCORED_AT_ONCE, len(token_ids) - 1)
        positions_BT = torch.arange(begin, end, device=device)[None]
        output = model(
            input_ids=ids_T[None, begin:end],
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[0].float()
        targets_T = ids_T[begin + 1 : end + 1]
        logprobs_T = logits.gather(1, targets_T[:, None])[:, 0] - logits.logsumexp(dim=1)
        scores += logprobs_T.tolist()
    return tuple(scores)


def _mask(known_BT: Tensor, past_width: int, new_T: Tensor) -> Tensor:
    """Return the attention mask of shape [rows, 1, new, past + new]: a row's own past, and no later token."""
    import torch

    ages_T = torch.arange(past_width, 0, -1, device=new_T.device)
    past_BT = ages_T <= known_BT
    past = past_BT[:, None, None, :].expand(-1, 1, len(new_T), -1)
    new = (new_T[None, :] <= new_T[:, None])[None, None].expand(len(known_BT), 1, -1, -1)
    return torch.cat([past, new], dim=-1)


def _left_padded(states: Sequence[Tensor], width: int) -> Tensor:
    """Stack states of shape [heads, tokens, size], padded with zeros on the left."""
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
