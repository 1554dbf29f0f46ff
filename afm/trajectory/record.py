"""One finished episode as a JSONL line, the format of the viewer, the filters, SFT and RL logs.

Some data sets are published encrypted, and records of their episodes are sealed in the same way, so that they are never
on disk in plain text. BrowseComp (arXiv 2504.12516) is distributed like this to keep it away from crawlers. Every row
has a canary. Its texts are combined by XOR with the SHA-256 digest of the canary, repeated to the text's length, and
written as base64. This hides the texts but does not protect them, because the key is published with them. A record is
sealed because its question, the agent's text, the calls and the judge's reasons reveal the row.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.errors import DataError, json_word
from afm.trajectory.answer import boxed, fenced, written_by_agent
from afm.trajectory.tags import Segment, blocks

SCHEMA_VERSION: Final = 1
SEALING_KEY: Final = "sealing_key"
"""The key in a task's ``extra_info`` with the sealing key, if nothing about the task may be written in plain text."""
HIDDEN: Final = "(sealed)"
_SEALED, _KEY = "sealed", "sealed_with"


class FrozenModel(BaseModel):
    """Base of the models of rows. They are immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StopReason(StrEnum):
    """The reason for the end of an episode."""

    ANSWER = "answer"
    END_OF_TEXT = "end_of_text"
    FORGED_OBSERVATION = "forged_observation"
    TURNS = "turns"
    AGENT_TOKENS = "agent_tokens"
    RESPONSE_TOKENS = "response_tokens"
    SECONDS = "seconds"
    TOOL_SECONDS = "tool_seconds"
    ABORTED = "aborted"
    ERROR = "error"


class Verdict(FrozenModel):
    """The verdict of a reward on one response.

    ``score`` is ``None`` only if the reward abstained, because its infrastructure failed. The sample must then be masked
    and never counted as wrong. ``judge_tokens`` counts the tokens that a model judge read and wrote in an evaluation. It
    is 0 for a cached verdict.
    """

    score: float | None
    parts: dict[str, float] = Field(default_factory=dict)
    evidence: str = ""
    seconds: float = 0.0
    judge_tokens: int = 0

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Return score, parts and evidence."""
        return [("score", self.score), ("parts", self.parts), ("evidence", self.evidence)]

    @property
    def abstained(self) -> bool:
        """Whether the verdict has no score."""
        return self.score is None


class Cost(FrozenModel):
    """The cost of an episode.

    ``read_tokens`` is the sum of the prompts of all generations, which an endpoint bills as prompt tokens, or 0 if they
    are not counted. ``unmetered`` counts the generations of endpoints that reported no usage. Their tokens are estimated
    from the length of the text. ``model_usd`` is the cost of the generations in US dollars if each model has its own
    price, as in a team, and ``None`` if one price applies to all.
    """

    prompt_tokens: int = 0
    read_tokens: int = 0
    agent_tokens: int = 0
    observation_tokens: int = 0
    generations: int = 0
    unmetered: int = 0
    model_usd: float | None = None
    tool_calls: int = 0
    tool_failures: int = 0
    generation_seconds: float = 0.0
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0


class CallRecord(FrozenModel):
    """One tool call of an episode."""

    role: str
    tool: str
    argument: str
    observation: str
    ok: bool
    duplicate: bool = False
    seconds: float = 0.0


class Record(FrozenModel):
    """One trajectory with everything that judging, filtering, training and viewing need."""

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str
    agent: str
    agent_digest: str
    question: str
    segments: tuple[Segment, ...]
    ground_truth: Any = None
    data_source: str = ""
    model: str = ""
    seed: int | None = None
    stop: StopReason = StopReason.ANSWER
    verdict: Verdict | None = None
    cost: Cost = Cost()
    calls: tuple[CallRecord, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    response_mask: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)
    kept: bool = True
    reason: str = ""
    error: str = ""

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Return the most important facts. The fields hold the rest."""
        yield from (("id", self.id), ("agent", self.agent), ("answer", self.answer))
        yield "steps", sum(1 for _ in blocks(self.text))
        yield "calls", len(self.calls)
        yield "score", None if self.verdict is None else self.verdict.score
        yield from [("error", self.error)] if self.error else [("stop", str(self.stop))]

    @property
    def answer(self) -> str | None:
        r"""The final answer without its ``\boxed{}`` or fence, or ``None`` if the episode ended without one.

        An answer in several parts is one text here. See :func:`afm.trajectory.answers`.
        """
        last = next(iter(deque(blocks(self.text), maxlen=1)), None)
        if self.stop is not StopReason.ANSWER or last is None or last.end < 0:
            return None
        if not written_by_agent(self.segments, last.start, last.end):
            return None
        return boxed(last.content) or fenced(last.content) or last.content.strip() or None

    @property
    def identity(self) -> str:
        """The record's id, or else a digest of question and segments, which equal rows share."""
        if self.id:
            return self.id
        digest = hashlib.blake2b(digest_size=8)
        parts = (part for segment in self.segments for part in (segment.author, segment.text))
        for text in (self.question, *parts):
            digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
        return f"content-{digest.hexdigest()}"

    @property
    def text(self) -> str:
        """The whole response, including observations."""
        return "".join(segment.text for segment in self.segments)


def encrypt(text: str, key: str) -> str:
    """Return ``text`` encrypted in the data owner's form, the inverse of :func:`decrypt`."""
    return base64.b64encode(_combined(text.encode("utf-8", "surrogatepass"), key)).decode("ascii")


def decrypt(sealed: str, key: str) -> str:
    """Return the plain text of base64 ``sealed``.

    Raises:
        DataError: ``sealed`` is not base64, or the key is wrong, so that the result is not text.
    """
    try:
        return _combined(base64.b64decode(sealed, validate=True), key).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        raise DataError("cannot be decrypted: it is not base64, or its canary is wrong") from None


def sealed(record: Record, key: str) -> Record:
    """Return ``record`` in a form that may be written: every text that reveals the question is encrypted."""
    verdict = record.verdict.model_copy(update={"evidence": ""}) if record.verdict is not None else None
    calls = (call.model_copy(update={"argument": "", "observation": ""}) for call in record.calls)
    return record.model_copy(
        update={
            "question": HIDDEN,
            "segments": (),
            "ground_truth": None,
            "verdict": verdict,
            "calls": tuple(calls),
            "error": record.error.partition(":")[0],
            "reason": "",
            **dict.fromkeys(("prompt_ids", "response_ids", "response_mask", "logprobs")),
            "provenance": {
                **{
                    name: value for name, value in record.provenance.items() if name not in ("groups", "team")
                },
                _KEY: key,
                _SEALED: encrypt(record.model_dump_json(), key),
            },
        }
    )


def opened(record: Record) -> Record:
    """Return the record from before :func:`sealed`, or ``record`` itself if it is not sealed.

    Raises:
        DataError: The sealed part is damaged.
    """
    blob, key = record.provenance.get(_SEALED), record.provenance.get(_KEY)
    if not isinstance(blob, str) or not isinstance(key, str):
        return record
    try:
        return Record.model_validate_json(decrypt(blob, key))
    except (DataError, ValidationError):
        raise DataError(f"record {record.id!r}: its sealed part is damaged") from None


def _combined(data: bytes, key: str) -> bytes:
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    stream = (digest * (len(data) // len(digest) + 1))[: len(data)]
    return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))


ADVANTAGES_SUFFIX = ".advantages.json"

Advantages = float | list[float]


def advantages_file(episodes: Path) -> Path:
    """Return the path of the file with the advantages of the episodes."""
    return episodes.with_suffix(ADVANTAGES_SUFFIX)


def load_advantages(episodes: Path) -> Mapping[str, Any]:
    """Return the advantages by the episodes' ids, empty without the file. Other content is an error."""
    file = advantages_file(episodes)
    try:
        advantages = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", path=str(file)) from None
    if not isinstance(advantages, dict):
        kind = json_word(advantages)
        raise DataError(f"got {kind}, expected an object with the ids of episodes", path=str(file))
    return advantages
