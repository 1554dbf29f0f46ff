"""Record the conversations of one episode of an external program as sampled tokens.

A program (a harness) asks for text and sends its whole history with every request. A :class:`Session` finds its own
sampled messages in that history and continues with their sampled ids. Only new messages are encoded. So each trajectory
(:class:`~afm.harness.history.Sampled`) holds exactly the tokens that the model read and wrote, and its mask marks
sampled tokens only.

::

    session = Session("episode-7", model, ChatRenderer(tokenizer), limits=SessionLimits(max_tokens=4096), seed=1)
    async with HarnessServer() as server:           # afm.harness.server, for many sessions
        url = server.open(session)                  # http://127.0.0.1:PORT/s/episode-7/v1 for the program
        ...                                         # the program runs; or: await session.ask(ModelRequest(...))
        trajectories = await server.end(session.key)     # or: await session.close()

An episode has several trajectories if its history branches. :class:`~afm.harness.history.Branch` lists the reasons.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afm.errors import DataError, EngineError, RefusedError
from afm.harness.history import History, Sampled
from afm.harness.rendering import ChatRenderer, TextCall, VisibleText, split_calls, until_stop
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest, ReplyCall, RequestRefusedError
from afm.models.base import Generation, SamplingParams, StreamingModel, TokenModel
from afm.models.tokenizer import ChatTokenizer, IncrementalDecoder
from afm.seeds import derive_seed, generation_seed


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session. ``None`` means no limit.

    Attributes:
        max_tokens: Tokens of prompt and response of one sequence. The model's context also limits them.
        max_calls: Number of requests.
        max_seconds: Seconds from the start of the session, after which running generations are cancelled.
    """

    max_tokens: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None


OnText = Callable[[int, str], None]
"""Receives the number of a choice and the next piece of its text."""
OnReply = Callable[[ModelReply], None]
"""Receives a reply before it is stored."""


class Session:
    """The conversations of one episode.

    The sampled tokens of a request are stored when its generation ends. A cancelled request stores nothing.

    Args:
        key: Identifies the session in URLs and authorises its requests.
        model: Model that samples. If it is not ``cancellable``, :meth:`close` waits for running generations.
        renderer: Renderer of the model's chats. ``None`` allows completions only.
        limits: Limits of the session.
        sampling: Temperature, top-p, top-k and most tokens of every generation. They replace those of the requests.
            ``None`` keeps those of the requests.
        seed: Seeds the generations in order, as :func:`afm.rollout.run_episode` does. ``None`` keeps the seeds of the
            requests.

    Attributes:
        limits: Limits of the session, which may be changed before the first request.
        calls: Number of accepted requests.
        refused: Number of refused requests, by code.
        cancelled: Number of requests whose client disconnected.
        reward: Reward that the program reported (``POST .../reward``).
        ended: Whether the session refuses further requests.
    """

    def __init__(
        self,
        key: str,
        model: TokenModel,
        renderer: ChatRenderer | None,
        *,
        limits: SessionLimits | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
    ) -> None:
        self.key, self.model = key, model
        self._history = History(renderer, model.encode, model.decode)
        self.limits = limits or SessionLimits()
        self._sampling, self._seed = sampling, seed
        self._begun = time.monotonic()
        self._generations = 0
        self._running: set[asyncio.Task[Generation]] = set()
        self.calls = self.cancelled = 0
        self.refused: Counter[str] = Counter()
        self._unanswered: dict[tuple[tuple[int, ...], int], list[_Ticket]] = {}
        """Requests without an answer, by prompt and ``n``. The same request sent again takes one of these tickets."""
        self.reward: float | None = None
        self.ended = False

    async def ask(
        self, request: ModelRequest, on_text: OnText | None = None, on_reply: OnReply | None = None
    ) -> ModelReply:
        """Answer one request.

        Args:
            request: The program's request.
            on_text: Receives the text during sampling if the model can stream, otherwise at the end.
            on_reply: Receives the reply before it is stored. If it fails, nothing is stored.

        Raises:
            RequestRefusedError: The session has ended, a limit is reached, or the request is invalid.
            EngineError: The engine failed.
        """
        try:
            return await self._ask(request, on_text, on_reply)
        except RequestRefusedError as error:
            self.refused[error.code] += 1
            raise
        except DataError as error:
            self.refused["request"] += 1
            raise RequestRefusedError(400, "request", error.message) from None
        except RefusedError as error:
            self.refused["engine"] += 1
            raise RequestRefusedError(400, "engine", str(error)) from error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    @property
    def error(self) -> EngineError | None:
        """The engine's failure of a request that was never answered, if there is one. The program got status 502."""
        tickets = (ticket for waiting in self._unanswered.values() for ticket in waiting)
        return next((ticket.error for ticket in tickets if ticket.error is not None), None)

    def trajectories(self) -> list[Sampled]:
        """Return the trajectories so far. Each sampled token is trained in the first trajectory that contains it."""
        return self._history.trajectories()

    async def close(self) -> list[Sampled]:
        """End the session and its running generations. Return the trajectories of the finished generations."""
        self.ended = True
        running = list(self._running)
        if self.model.cancellable:
            for task in running:
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return self.trajectories()

    async def _ask(
        self, request: ModelRequest, on_text: OnText | None, on_reply: OnReply | None
    ) -> ModelReply:
        self._check_open()
        self._check_text(request)
        request.check()
        place = self._history.place(request)
        before = [] if place.parent is None else place.parent.ids()
        prompt = (*before, *place.context)
        params = self._params(request, len(prompt))
        same = (prompt, request.n)
        waiting = self._unanswered.get(same) if self._unanswered else None
        ticket = waiting.pop() if waiting else self._next_ticket(request)
        feeds = [_Feed(self.model.decode, request, number, on_text) for number in range(request.n)]
        seeded = [replace(params, seed=seed) for seed in ticket.seeds]
        work = [self._generate(prompt, *each) for each in zip(seeded, feeds, strict=True)]
        try:
            async with asyncio.timeout(self._seconds_left()) as timer:
                generations = await _all(work)
        except TimeoutError:
            if timer.expired():
                raise self._over() from None
            raise
        except (EngineError, asyncio.CancelledError) as error:
            failure = error if isinstance(error, EngineError) else ticket.error
            self._unanswered.setdefault(same, []).append(replace(ticket, error=failure))
            raise
        if self.ended:
            raise self._over()
        choices = tuple(self._choice(request, *each, ticket.call) for each in enumerate(generations))
        reply = ModelReply(ticket.call, self.model.name, prompt, choices)
        if on_reply is not None:
            on_reply(reply)
        for feed, choice in zip(feeds, choices, strict=True):
            feed.finish(choice.text)
            self._history.add(request, place, choice, ticket.call)
        return reply

    def _check_open(self) -> None:
        if self.ended or ((left := self._seconds_left()) is not None and left <= 0):
            raise self._over()

    def _check_text(self, request: ModelRequest) -> None:
        """Refuse token ids outside the vocabulary, and texts that cannot fit, before they are encoded."""
        codec, characters = self.model.codec, request.characters
        if not isinstance(codec, ChatTokenizer):
            return
        ids = request.prompt if request.prompt is not None and not isinstance(request.prompt, str) else ()
        unknown = next((place for place, token in enumerate(ids) if not 0 <= token < codec.size), None)
        if unknown is not None:
            raise DataError(
                f"prompt: token id {ids[unknown]} at index {unknown} is not in the vocabulary; "
                f"expected 0 to {codec.size - 1}"
            )
        most = self._most_tokens * codec.longest_token
        if characters > most:
            message = f"the request has {characters:,} characters; a sequence of {self._most_tokens} tokens has at most {most:,}"
            raise RequestRefusedError(400, "context_length_exceeded", message)

    @property
    def _most_tokens(self) -> int:
        """Most tokens of prompt and response together."""
        return min(self.limits.max_tokens or self.model.context_tokens, self.model.context_tokens)

    def _over(self) -> RequestRefusedError:
        self.ended = True
        return RequestRefusedError(410, "session_over", f"session {self.key!r} has ended")

    def _seconds_left(self) -> float | None:
        most = self.limits.max_seconds
        return None if most is None else self._begun + most - time.monotonic()

    def _params(self, request: ModelRequest, prompt_tokens: int) -> SamplingParams:
        most = self._most_tokens
        room = most - prompt_tokens
        if room < 1:
            message = f"the prompt has {prompt_tokens} tokens; expected fewer than {most}, the limit of prompt and response together"
            raise RequestRefusedError(400, "context_length_exceeded", message)
        if request.json_schema is not None and not self.model.constrains:
            raise DataError(
                f"the request asks for JSON of a schema, but {self.model.name} does not constrain sampling: in training, "
                "the model has to choose every token itself. Ask for JSON in a message, or use a tool"
            )
        own = self._sampling
        limits = [room, *(value for value in (request.max_tokens, own and own.max_new_tokens) if value)]
        source = own or request
        return SamplingParams(
            min(limits),
            temperature=source.temperature,
            top_p=source.top_p,
            top_k=source.top_k,
            stop=request.stop,
            json_schema=request.json_schema,
        )

    def _next_ticket(self, request: ModelRequest) -> _Ticket:
        if self.limits.max_calls is not None and self.calls >= self.limits.max_calls:
            message = f"the session has had {self.calls} requests, which is its limit (harness.max_requests)"
            raise RequestRefusedError(400, "max_calls", message)
        call, self.calls = self.calls, self.calls + 1
        first, self._generations = self._generations, self._generations + request.n
        if self._seed is not None:
            own = self._seed
            return _Ticket(call, tuple(generation_seed(own, first + number) for number in range(request.n)))
        seed = request.seed
        return _Ticket(call, tuple(None if seed is None else seed + number for number in range(request.n)))

    async def _generate(self, prompt: Sequence[int], params: SamplingParams, feed: _Feed) -> Generation:
        """Run one generation in its own task, so that :meth:`close` can wait for one that cannot be cancelled."""
        if feed.on_text is not None and isinstance(self.model, StreamingModel):
            work = self.model.stream(prompt, params, feed.take)
        else:
            work = self.model.generate(prompt, params)
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await (task if self.model.cancellable else asyncio.shield(task))
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self.ended and own is not None and not own.cancelling():
                raise self._over() from None
            raise

    def _choice(self, request: ModelRequest, number: int, generation: Generation, call: int) -> ModelChoice:
        raw, found = self.model.decode(generation.token_ids), tuple[TextCall, ...]()
        text = until_stop(raw, request.stop)
        if request.tools:
            text, found = split_calls(text, [tool["function"]["name"] for tool in request.tools])
        calls = tuple(
            ReplyCall(f"c{derive_seed(self.key, call, number, place):08x}", made.name, made.arguments)
            for place, made in enumerate(found)
        )
        return ModelChoice(text, raw, calls, generation)


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Number of a request in its session, and the seeds of its generations. A request sent again keeps both.

    Attributes:
        error: The engine's failure, if the engine did not answer.
    """

    call: int
    seeds: tuple[int | None, ...]
    error: EngineError | None = None


class _Feed:
    """Passes the text of one choice on during sampling."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        request: ModelRequest,
        number: int,
        on_text: OnText | None,
    ) -> None:
        self.on_text, self._number, self._shown = on_text, number, ""
        self._decoder = IncrementalDecoder(decode)
        self._visible = VisibleText(request.stop, tools=bool(request.tools))

    def take(self, token: int) -> None:
        """Take the next token."""
        self._show(self._visible.feed(self._decoder.feed([token])))

    def finish(self, text: str) -> None:
        """Pass on the rest of the final text."""
        self._show(text[len(self._shown) :])

    def _show(self, piece: str) -> None:
        if piece and self.on_text is not None:
            self._shown += piece
            self.on_text(self._number, piece)


async def _all(work: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Return all results. If one fails, cancel the others."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
