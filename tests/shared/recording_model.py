"""A model whose every generation is on record, to hold against what a session says was sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from afm.errors import EngineError
from afm.harness import Session
from afm.models import FinishReason, Generation, SamplingParams, TokenModel
from afm.models.base import StreamingModel
from afm.models.tokenizer import ChatTokenizer

MOST_OF_ENGINE = 16
"""Tokens that an engine samples for one reply: a random one seldom ends by itself."""


class RecordingModel(TokenModel):
    """Says texts in turn, token by token; where there is none, a real engine samples, or random ids are said.

    Args:
        texts: ``None`` among them leaves that reply to the engine.
    """

    def __init__(
        self,
        codec: ChatTokenizer,
        texts: Sequence[str | None] = (),
        *,
        seed: int = 0,
        engine: StreamingModel | None = None,
    ) -> None:
        super().__init__(codec, name="tiny", context_tokens=100_000)
        self.texts = list(texts)
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.logprobs: list[tuple[float, ...]] = []
        self.params: list[SamplingParams] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.waiting = asyncio.Event()
        self.gone = asyncio.Event()
        """Set when a generation is cancelled."""
        self.begun = self.cancelled = 0
        self.failures: list[EngineError] = []
        """Raised in turn, each in place of a generation."""
        self._engine = engine
        self._random = random.Random(seed)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        return await self.stream(prompt_ids, params, lambda _: None)

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[int], None]
    ) -> Generation:
        params.check()
        self.params.append(params)
        if self.failures:
            raise self.failures.pop(0)
        text = self.texts.pop(0) if self.texts else None
        if text is None and self._engine is not None:
            short = replace(params, max_new_tokens=min(params.max_new_tokens, MOST_OF_ENGINE))
            generation = await self._engine.stream(prompt_ids, short, on_token)
            self._keep(prompt_ids, generation)
            return generation
        ids, finish = self._next(text, params)
        self.begun += 1
        try:
            for token in ids:
                on_token(token)
                if not self.hold.is_set():
                    self.waiting.set()
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.gone.set()
            raise
        generation = Generation(ids, tuple(-token / 1000 for token in ids), finish)
        self._keep(prompt_ids, generation)
        return generation

    def _keep(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        self.sampled.append((tuple(prompt_ids), generation.token_ids))
        self.logprobs.append(generation.logprobs)

    def _next(self, text: str | None, params: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
        if text is not None:
            ids = [*self.codec.encode(text), self.codec.end_id]
        else:
            ids = [self._random.randrange(self.codec.size) for _ in range(self._random.randrange(1, 6))]
            if self.codec.end_id in ids:
                ids = ids[: ids.index(self.codec.end_id) + 1]
        for length in range(1, len(ids) + 1):
            if any(stop in self.codec.decode(ids[:length]) for stop in params.stop):
                return tuple(ids[:length]), FinishReason.STOP
        if len(ids) > params.max_new_tokens:
            return tuple(ids[: params.max_new_tokens]), FinishReason.LENGTH
        return tuple(ids), FinishReason.END_OF_TEXT

    async def close(self) -> None: ...


def wrong_tokens(session: Session, model: RecordingModel) -> int:
    """Trained tokens of a session that were not sampled behind what is in front of them, or not trained once."""
    sampled = [(*pair, logprobs) for pair, logprobs in zip(model.sampled, model.logprobs, strict=True)]
    left = list(sampled)
    wrong = 0
    for trajectory in session.trajectories():
        assert len(trajectory.response_ids) == len(trajectory.response_mask) == len(trajectory.logprobs)
        sequence = (*trajectory.prompt_ids, *trajectory.response_ids)
        begin = len(trajectory.prompt_ids)
        inside = [0] * len(trajectory.response_ids)
        for turn in trajectory.turns:
            place = slice(turn.begin, turn.end)
            ids = trajectory.response_ids[place]
            inside[place] = [int(turn.trained)] * len(ids)
            known = (sequence[: begin + turn.begin], ids, trajectory.logprobs[place])
            among = left if turn.trained else sampled
            wrong += 0 if known in among else len(ids)
            if turn.trained and known in left:
                left.remove(known)
        wrong += sum(a != b for a, b in zip(inside, trajectory.response_mask, strict=True))
    return wrong + sum(len(ids) for _, ids, _ in left)
