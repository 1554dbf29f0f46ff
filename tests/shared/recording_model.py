"""A model whose every generation is on record, to hold against what a session says was sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from afm.errors import EngineError
from afm.harness import Session
from afm.models import FinishReason, Generation, SamplingParams, TokenModel
from afm.models.tokenizer import ChatTokenizer


class RecordingModel(TokenModel):
    """Says texts in turn, or random ids of its vocabulary when they are used up, token by token."""

    def __init__(self, codec: ChatTokenizer, texts: Sequence[str] = (), *, seed: int = 0) -> None:
        super().__init__(codec, name="tiny", context_tokens=100_000)
        self.texts = list(texts)
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.params: list[SamplingParams] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.waiting = asyncio.Event()
        self.begun = self.cancelled = 0
        self.failures: list[EngineError] = []
        """Raised in turn, each in place of a generation."""
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
        ids, finish = self._next(params)
        self.begun += 1
        try:
            for token in ids:
                on_token(token)
                if not self.hold.is_set():
                    self.waiting.set()
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.sampled.append((tuple(prompt_ids), ids))
        return Generation(ids, tuple(-token / 1000 for token in ids), finish)

    def _next(self, params: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
        if self.texts:
            ids = [*self.codec.encode(self.texts.pop(0)), self.codec.end_id]
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
    left = list(model.sampled)
    wrong = 0
    for trajectory in session.trajectories():
        assert len(trajectory.response_ids) == len(trajectory.response_mask) == len(trajectory.logprobs)
        sequence = (*trajectory.prompt_ids, *trajectory.response_ids)
        begin = len(trajectory.prompt_ids)
        inside = [0] * len(trajectory.response_ids)
        for turn in trajectory.turns:
            ids = trajectory.response_ids[turn.begin : turn.end]
            inside[turn.begin : turn.end] = [int(turn.trained)] * len(ids)
            logprobs = trajectory.logprobs[turn.begin : turn.end]
            wrong += sum(value != -token / 1000 for token, value in zip(ids, logprobs, strict=True))
            if turn.trained:
                sampled = (sequence[: begin + turn.begin], ids)
                wrong += 0 if sampled in left else len(ids)
                if sampled in left:
                    left.remove(sampled)
        wrong += sum(a != b for a, b in zip(inside, trajectory.response_mask, strict=True))
    return wrong + sum(len(ids) for _, ids in left)
