"""Score free-text answers with a judge model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import Field

from afm.errors import RewardError
from afm.rewards.base import Part, Sample
from afm.rewards.judge_endpoint import JudgeEndpoint, ReplyClient
from afm.rewards.judge_prompt import (
    SCHEMA,
    TEXT_SCHEMA,
    Case,
    JudgeText,
    Ruling,
    bystander,
    decoy,
    messages,
    read_ruling,
    shown_rationale,
)
from afm.rewards.text_match import AnswerScorer, ExactMatch, normalised
from afm.sqlite import SharedFile

NO_JUDGE = "no judge is configured: exact match"
"""The evidence of verdicts that no model gave."""

_SHOWN = 120
_CACHE_VERSION = 1
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, judgement TEXT, rationale TEXT, at REAL)"
)


class WithoutEndpoint(StrEnum):
    """What judges when no endpoint is configured."""

    EXACT_MATCH = "exact_match"
    ABSTAIN = "abstain"


class JudgeSettings(JudgeEndpoint):
    """The ``judge`` section of a reward file. The key comes only from the environment."""

    without_endpoint: WithoutEndpoint = WithoutEndpoint.EXACT_MATCH
    """What judges when neither the file nor the environment names an endpoint: ``exact_match`` (the
    evidence shows it) or ``abstain``."""
    control: bool = True
    """Whether to judge each accepted answer again, against a wrong gold answer. If it is accepted there too, it scores 0."""
    prompt: Path | None = None
    """Your own text with ``{question}``, ``{gt_answer}`` and ``{pred_answer}``, or a YAML ``{system,
    user}``, in place of the built-in one, for evaluation as published (docs/evaluation.md). It has no guard, and
    every answer goes to the judge."""
    max_answer_chars: int = Field(default=1000, ge=1)
    """A longer answer scores 0 without asking the judge, because a list of everything answers nothing."""
    cache: Path | None = None
    """SQLite file of verdicts, keyed by address and whole request. Processes share it. Failures are not stored."""
    price_per_million_tokens: float | None = Field(default=None, ge=0, le=1e9)
    """US dollars. With it, ``afm doctor`` estimates the cost of a step of reinforcement learning, and an evaluation
    with ``prices`` reports the cost of the judge. No verdict depends on it."""


class ModelJudge(AnswerScorer):
    """Scores 1 if a model finds the final answer equal in meaning to a gold answer, else 0. It abstains if the model fails.

    An answer that matches a gold answer exactly is right without a request. :mod:`afm.rewards.judge_prompt` describes
    how an answer is kept from steering the judge.

    Raises:
        ConfigError: The environment holds no valid address or key, or the prompt is invalid.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        place = settings.place()
        self._model = place.model
        self._client: JudgeClient | None = None
        self._text = JudgeText.load(settings.prompt) if settings.prompt is not None else None
        if place.url is not None:
            cache = VerdictCache(settings.cache) if settings.cache else None
            schema = SCHEMA if self._text is None else TEXT_SCHEMA
            self._client = JudgeClient(settings.client(place, schema), cache, self._text)

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Ask the model to judge the final answer."""
        if self._client is None:
            return await self._unjudged(accepted, responses)
        case = self._case(question, accepted, responses)
        return case if isinstance(case, Part) else await self._judged(self._client, case)

    def case_of(self, sample: Sample) -> Case | Part:
        """Return the case to ask the model about, or the verdict if none is needed."""
        pair = self.answers_of(sample)
        return pair if isinstance(pair, Part) else self._case(sample.question, *pair)

    def _case(self, question: str, accepted: tuple[str, ...], responses: tuple[str, ...]) -> Case | Part:
        if self._text is not None:
            return Case(question, accepted, " | ".join(responses))
        text = _spelled(responses[0])
        if text and len(responses) == 1 and text in map(_spelled, accepted):
            return Part(1.0, f"{responses[0][:_SHOWN]!r} is a gold answer")
        answer = " | ".join(responses)
        longest = max(self._settings.max_answer_chars, *map(len, accepted))
        if len(answer) > longest:
            return Part(0.0, f"the final answer has {len(answer)} characters, more than {longest}")
        return Case(question, accepted, answer)

    async def close(self) -> None:
        """Close connections and files."""
        if self._client is not None:
            await self._client.close()

    async def _unjudged(self, accepted: tuple[str, ...], responses: tuple[str, ...]) -> Part:
        if self._settings.without_endpoint is WithoutEndpoint.ABSTAIN:
            return Part(None, "no judge: set GRM_BASE_URL, or `url` under `judge` in the reward YAML")
        part = await ExactMatch().compare(accepted, responses)
        return Part(part.score, f"{part.evidence} ({NO_JUDGE})")

    async def _judged(self, client: JudgeClient, case: Case) -> Part:
        try:
            ruling = await client.ruling(case)
            if ruling.judgement == "incorrect":
                return Part(0.0, self._said(ruling, case))
            if self._settings.control and await _accepts(client, decoy(case)):
                if await _accepts(client, bystander(case)):
                    return Part(None, f"judge {self._model} accepts any answer")
                wrong = decoy(case).accepted[0]
                return Part(
                    0.0, f"judge {self._model} takes this answer for {wrong!r} too: it steers the judge"
                )
        except RewardError as error:
            return Part(None, f"judge {self._model}: {error}")
        return Part(1.0, self._said(ruling, case))

    def _said(self, ruling: Ruling, case: Case) -> str:
        rationale = shown_rationale(ruling, case)
        return f"judge {self._model}: {ruling.judgement}" + (f": {rationale}" if rationale else "")


async def _accepts(client: JudgeClient, case: Case) -> bool:
    return (await client.ruling(case)).judgement == "correct"


_Asked = dict[str, asyncio.Task[Ruling]]


class JudgeClient:
    """Asks one model for verdicts, with our prompt or ``text``. Equal concurrent requests are sent once."""

    def __init__(
        self, client: ReplyClient, cache: VerdictCache | None = None, text: JudgeText | None = None
    ) -> None:
        self._client = client
        self._cache = cache
        self._messages = messages if text is None else text.messages
        self._read = read_ruling if text is None else text.read
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked] = WeakKeyDictionary()

    async def ruling(self, case: Case) -> Ruling:
        """Return the model's verdict.

        Raises:
            RewardError: The server failed, the reply is unusable, or the budget is spent.
        """
        body = self._client.body(self._messages(case))
        key = cache_key(self._client.where, body)
        asked = self._asked.setdefault(asyncio.get_running_loop(), {})
        task = asked.get(key)
        if task is None:
            task = asyncio.create_task(self._found_or_asked(key, body, case))
            asked[key] = task
            task.add_done_callback(lambda done: _forget(asked, key, done))
        # Cancelling one waiter must not cancel the request of the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the requests of this event loop and close its connections."""
        asked = tuple(self._asked.pop(asyncio.get_running_loop(), {}).values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self._client.close()
        if self._cache is not None:
            self._cache.close()

    async def _found_or_asked(self, key: str, body: Mapping[str, Any], case: Case) -> Ruling:
        ruling = await self._cache.find(key) if self._cache is not None else None
        if ruling is not None:
            return ruling
        ruling = await self._client.reply(body, lambda text: self._read(text, case))
        if self._cache is not None:
            await self._cache.add(key, ruling)
        return ruling


def _forget(asked: _Asked, key: str, task: asyncio.Task[Ruling]) -> None:
    asked.pop(key, None)
    if not task.cancelled():
        task.exception()  # retrieved here because every waiter may be gone


def cache_key(url: str, body: Mapping[str, Any]) -> str:
    """Return a digest of everything a verdict depends on: the server and the whole request, including the model."""
    text = json.dumps([_CACHE_VERSION, url, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class VerdictCache:
    """Verdicts by :func:`cache_key`. Failures are not stored.

    Methods raise ``ConfigError`` if the file is unusable. While the file is temporarily unavailable, lookups miss and
    nothing is stored.
    """

    def __init__(self, path: Path) -> None:
        self._file = SharedFile(path, "cache of verdicts", _SCHEMA)

    async def find(self, key: str) -> Ruling | None:
        """Return the stored verdict, if there is one."""
        with suppress(sqlite3.Error):
            return await asyncio.to_thread(self._find, key)
        return None

    async def add(self, key: str, ruling: Ruling) -> None:
        """Store a verdict. If several processes store one, the first stays."""
        with suppress(sqlite3.Error):
            await asyncio.to_thread(self._add, key, ruling)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find(self, key: str) -> Ruling | None:
        with self._file.snapshot() as connection:
            query = "SELECT judgement, rationale FROM verdicts WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return Ruling(*row) if row is not None and row[0] in ("correct", "incorrect") else None

    def _add(self, key: str, ruling: Ruling) -> None:
        row = (key, ruling.judgement, ruling.rationale.encode("utf-8", "replace").decode(), time.time())
        with self._file.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", row)


def _spelled(text: str) -> str:
    """Return an answer in words without case, articles and punctuation. Those count in any other answer (``-5``, ``C++``)."""
    in_words = re.fullmatch(r"[^\W\d_]+(?:[\s,.!?'\"]+[^\W\d_]+)*[\s.!?]*", text.strip())
    return normalised(text) if in_words else " ".join(text.split()).removesuffix(".")
