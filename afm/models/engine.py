"""Continuous batching over a Hugging Face causal language model, in a thread of this process.

Requests join and leave between tokens, so a short generation never waits for a long one. Used by
:class:`afm.models.load.TransformersModel` and as the rollout engine of reinforcement learning.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from afm.errors import ConfigError, EngineError, suggestion
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.batch import GenerationRequest, RunningBatch, score_tokens
from afm.models.sampling import stream_key
from afm.models.tokenizer import StopMatcher

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS_AT_A_TIME = 16
"""Number of tokens of one request that are reported before the event loop does other work."""

T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was created. ``reused_tokens`` are prompt tokens that were not computed again."""

    steps: int = 0
    sampled_tokens: int = 0
    reused_tokens: int = 0


class BatchEngine:
    """Generates for many callers at once with one model.

    Use it from asyncio. Every method may be called from any event loop. Only the engine's own thread uses the model's
    forward, its weights and the cache.

    With equal seeds a request gives equal tokens in any batch, up to the rounding of batched matrix products (about 1e-6
    in a log-probability).

    Args:
        model: A decoder in evaluation mode that takes transformers' ``past_key_values``, with rotary or
            other relative positions (rows are left-padded; explicit positions are passed). On a CPU, the engine
            changes its SDPA attention.
        eos_ids: Tokens that end a text.
        pad_id: Any valid id, for padding. It is never attended to.
        decode: Returns the text of token ids, for stop strings.
        vocabulary_size: Ids below it can be decoded and may appear in a prompt.
        max_batch: Number of rows that generate together. Further requests wait.
        device: Device to move the model to. ``None`` does not move it.
        threads: CPU threads of the forward. ``None`` keeps torch's setting.
        seed: Makes requests without a seed reproducible, in the order of their arrival.
        prefix_tokens: Number of cached tokens of prompts and of rows that stopped at a string, so that prompts with the
            same beginning and further turns compute only new tokens. 0 switches the cache off.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Iterable[int],
        pad_id: int,
        decode: Callable[[Sequence[int]], str],
        vocabulary_size: int,
        max_batch: int = 64,
        device: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        prefix_tokens: int = 16_384,
    ) -> None:
        if max_batch < 1:
            raise ConfigError(f"max_batch is {max_batch}, expected at least 1")
        self._model = model.eval() if device is None else model.eval().to(device)
        self._weights: dict[str, Tensor] = dict(model.state_dict())
        self._vocabulary_size = vocabulary_size
        self._max_batch = max_batch
        self._threads = threads
        self._random = random.Random(seed)
        self._batch = RunningBatch(
            model,
            eos_ids=frozenset(eos_ids),
            pad_id=pad_id,
            stops=StopMatcher(decode, vocabulary_size),
            prefix_tokens=prefix_tokens,
        )
        self._changed = threading.Condition()
        self._waiting: deque[GenerationRequest] = deque()
        self._cancelled: deque[GenerationRequest] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._paused = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.stats = EngineStats()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Continue ``prompt_ids``. Cancelling the caller frees the row at the next token.

        Args:
            prompt_ids: At least one id.
            params: How to sample.
            on_token: Called in this event loop with each token as it is sampled.

        Raises:
            ConfigError: ``params`` are invalid.
            EngineError: The prompt is invalid, the model failed, or the engine was closed.
        """
        params.check()
        prompt = self._checked(prompt_ids)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        feed = _TokenFeed(on_token) if on_token else None
        request = GenerationRequest(prompt, params, stream_key(seed), Future(), feed.put if feed else None)
        request.future.add_done_callback(lambda _: self._forget(request))
        with self._changed:
            self._start()
            self._waiting.append(request)
            self._changed.notify()
        answer = asyncio.wrap_future(request.future)
        return await (feed.until(answer) if feed else answer)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each id after the first, given those before it, at temperature 1.

        Rows in flight wait during this call.

        Raises:
            EngineError: An id is invalid, the model failed, or the engine was closed.
        """
        ids = self._checked(token_ids)
        try:
            return await self._between_steps(lambda: score_tokens(self._model, ids))
        except Exception as error:
            raise _as_engine_error(error) from error

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(token_ids)
        if not ids or min(ids) < 0 or max(ids) >= self._vocabulary_size:
            raise EngineError(
                f"the prompt of {len(ids)} tokens cannot be fed to the model: expected at least one id, "
                f"each from 0 to {self._vocabulary_size - 1}"
            )
        return ids

    def pause(self) -> None:
        """Admit no waiting request until :meth:`resume`. Rows in flight continue."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Admit waiting requests again."""
        with self._changed:
            self._paused = False
            self._changed.notify()

    async def abort_all(self) -> int:
        """End every request, including waiting ones, with ``ABORTED`` and the tokens so far. Returns their number."""
        return await self._between_steps(self._abort_all)

    async def update_weights(self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> int:
        """Overwrite weights between two tokens. Returns the number of tensors.

        Rows in flight continue with the new weights and the states of the old ones. Finish or abort them first if that
        matters. Nothing is written if a name or shape is wrong.

        Raises:
            EngineError: Unknown name or wrong shape.
        """
        named = dict(named_tensors)
        return await self._between_steps(lambda: self._write_weights(named))

    async def read_weights(self, read: Callable[[Mapping[str, Tensor]], T]) -> T:
        """Return the result of ``read`` on the weights by name, between two tokens. It must not change them."""
        return await self._between_steps(lambda: read(self._weights))

    async def close(self) -> None:
        """Fail all open requests, stop the thread and free the cache. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _start(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="afm-engine", daemon=True)
            self._thread.start()

    async def _between_steps(self, command: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who runs in another thread
                done.set_exception(error)

        with self._changed:
            self._start()
            self._commands.append(run)
            self._changed.notify()
        return await asyncio.shield(asyncio.wrap_future(done))

    def _forget(self, request: GenerationRequest) -> None:
        if not request.future.cancelled():
            return
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify()

    def _work(self) -> None:
        import torch

        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._turn():
                pass

    def _turn(self) -> bool:
        """Wait for work and run commands, or one token for every row. Returns False to end the thread."""
        with self._changed:
            while not self._has_work():
                self._changed.wait()
            closed = self._closed
            commands = list(self._commands)
            self._commands.clear()
            gone = set(self._cancelled)
            self._cancelled.clear()
            if gone:
                self._waiting = deque(request for request in self._waiting if request not in gone)
            admitted = [] if commands else self._next_requests()
        for command in commands:
            command()
        if closed:
            self._fail(EngineError("the engine was closed while requests were waiting"))
            return False
        try:
            self._advance(admitted, gone)
        except Exception as error:  # noqa: BLE001 - the thread's border: callers get it as EngineError
            self._fail(_as_engine_error(error), admitted)
        return True

    def _has_work(self) -> bool:
        admissible = self._waiting and not self._paused and len(self._batch) < self._max_batch
        return bool(self._closed or self._commands or self._cancelled or len(self._batch) or admissible)

    def _next_requests(self) -> list[GenerationRequest]:
        if self._paused:
            return []
        free = min(self._max_batch - len(self._batch), len(self._waiting))
        return [self._waiting.popleft() for _ in range(free)]

    def _advance(self, admitted: list[GenerationRequest], gone: set[GenerationRequest]) -> None:
        if gone:
            self._batch.drop(gone)
        if admitted:
            self._batch.admit(admitted)
            self.stats.reused_tokens = self._batch.reused_tokens
        if not len(self._batch):
            return
        self.stats.steps += 1
        self.stats.sampled_tokens += len(self._batch)
        for request, reason in self._batch.step():
            _deliver(request, request.generation(reason))

    def _abort_all(self) -> int:
        requests = self._take_all()
        for request in requests:
            _deliver(request, request.generation(FinishReason.ABORTED))
        return len(requests)

    def _fail(self, error: EngineError, admitted: Sequence[GenerationRequest] = ()) -> None:
        for request in {*self._take_all(), *admitted}:
            _deliver(request, error)

    def _take_all(self) -> list[GenerationRequest]:
        with self._changed:
            requests = [*self._batch.requests, *self._waiting]
            self._waiting.clear()
        self._batch.clear()
        return requests

    def _write_weights(self, named: Mapping[str, Tensor]) -> int:
        import torch

        for name, tensor in named.items():
            if name not in self._weights:
                raise EngineError(f"the model has no weight {name!r}; {suggestion(name, self._weights)}")
            if tensor.shape != self._weights[name].shape:
                raise EngineError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, "
                    f"expected {tuple(self._weights[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in named.items():
                self._weights[name].copy_(tensor)
        self._batch.forget_prefixes()
        return len(named)


def _deliver(request: GenerationRequest, outcome: Generation | EngineError) -> None:
    try:
        if isinstance(outcome, Generation):
            request.future.set_result(outcome)
        else:
            request.future.set_exception(outcome)
    except InvalidStateError:
        return  # the caller gave up in the meantime


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"the model's forward failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _TokenFeed:
    """Calls ``on_token`` in the event loop of its creator, a few tokens at a time, so that the loop can do other work.

    One queued call per token would delay everything after it, such as a cancellation, until the last token is reported.
    """

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[int] = deque()
        self._planned = False

    def put(self, token: int) -> None:
        """Add a token. Called in the engine's thread."""
        self._tokens.append(token)
        if not self._planned and not self._loop.is_closed():
            self._planned = True
            self._loop.call_soon_threadsafe(self._hand_on)

    async def until(self, done: Awaitable[T]) -> T:
        """Return the result of ``done`` after all its tokens. If it fails or is cancelled, the rest is dropped."""
        try:
            result = await done
        except BaseException:
            self._on_token = _forget
            raise
        while self._tokens:
            self._on_token(self._tokens.popleft())
        return result

    def _hand_on(self) -> None:
        for _ in range(min(_TOKENS_AT_A_TIME, len(self._tokens))):
            self._on_token(self._tokens.popleft())
        self._planned = False
        if (
            self._tokens
        ):  # the engine's thread may also have scheduled it since the line above, which is harmless
            self._planned = True
            self._loop.call_soon(self._hand_on)


def _forget(token: int) -> None:
    """Drop a token of an abandoned request."""
