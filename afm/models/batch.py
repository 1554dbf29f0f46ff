"""The rows that an engine generates together: they join, take steps of one token, and leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from afm.errors import ConfigError, EngineError
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.cache import RowCache
from afm.models.prefill import Continuation, Prefiller
from afm.models.prefix import PrefixStore
from afm.models.sampling import BatchSampler, Draw
from afm.models.stop import StopMatcher

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Request:
    """One generation on its way: what was asked, and what is sampled so far."""

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
        """The result so far."""
        return Generation(tuple(self.token_ids), tuple(self.logprobs), finish)


class RunningBatch:
    """Requests that share one forward a token.

    A prompt is prefilled without its last token, which then goes through the same step as everybody
    else's last token: sampling happens in one place, and padding never reaches a result.
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
        self._direct_mask = getattr(model.config, "_attn_implementation", "") == "sdpa"
        self._eos_ids = eos_ids
        self._prefiller = Prefiller(model, pad_id, self._device)
        self._prefixes = PrefixStore(prefix_tokens)
        self._version = 0
        self._stops = stops
        self._cache = RowCache()
        self._rows: list[Request] = []
        self._sampler: BatchSampler | None = None
        self._inputs_BT: Tensor | None = None
        self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The rows in flight."""
        return tuple(self._rows)

    def admit(self, requests: Sequence[Request]) -> None:
        """Prefill ``requests`` and let them join.

        Equal prompts are computed once, and what a finished row left of a prompt's beginning not again.
        """
        self._forget_inputs()
        begin = self._cache.join([len(request.prompt_ids) - 1 for request in requests])
        fresh: dict[tuple[int, ...], list[int]] = {}
        continued: list[Continuation] = []
        for row, request in enumerate(requests, begin):
            request.watched = self._eos_ids | self._stops.watch(request.params.stop)
            request.version = self._version
            self._rows.append(request)
            prompt = request.prompt_ids[:-1]
            length, known = self._prefixes.take(prompt)
            if length:
                self.reused_tokens += length
                continued.append(Continuation(row, known, prompt[length:]))
            else:
                fresh.setdefault(prompt, []).append(row)
        self._prefiller.fresh(self._cache, fresh)
        self._prefiller.continued(self._cache, continued)

    def step(self) -> list[tuple[Request, FinishReason]]:
        """Sample one token for every row; returns the rows that are finished, already removed."""
        logits_BV = self._forward()
        if self._sampler is None:
            draws = [Draw(row.params, row.key, len(row.token_ids)) for row in self._rows]
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
            if reason is FinishReason.STOP:
                self._keep(index, row)
        self._remove([index for index, _, _ in finished])
        return [(row, reason) for _, row, reason in finished]

    def _keep(self, index: int, row: Request) -> None:
        """Save a row that stopped at a string: its episode probably goes on, and soon."""
        if self._direct_mask and row.version == self._version:
            ids = (*row.prompt_ids, *row.token_ids[:-1])
            self._prefixes.put(ids, self._cache.states(index))

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

    def _finish_reason(self, row: Request, token: int) -> FinishReason | None:
        if token in self._eos_ids:
            return FinishReason.END_OF_TEXT
        if token in row.watched and self._stops.completed(row.token_ids, row.params.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.token_ids) >= row.params.max_new_tokens else None

    def drop(self, requests: Collection[Request]) -> None:
        """Remove ``requests`` without a result; those that are not here are ignored."""
        self._remove([index for index, row in enumerate(self._rows) if row in requests])

    def forget_prefixes(self) -> None:
        """States computed so far are of other weights: rows in flight go on with them, new rows must not."""
        self._version += 1
        self._prefixes.clear()

    def clear(self) -> None:
        """Remove everything and free the memory."""
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
