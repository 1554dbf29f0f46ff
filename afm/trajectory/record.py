"""One finished episode as one JSONL line: the viewer, the filters, SFT and RL logs all read this shape."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from afm.trajectory.types import Author, Segment

SCHEMA_VERSION: Final = 1


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StopReason(StrEnum):
    """Why an episode ended."""

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


class Verdict(_Row):
    """What a reward says about one response.

    ``score`` is ``None`` exactly when the reward abstained: its infrastructure failed, and the sample
    must be masked out, never counted as wrong. ``judge_tokens`` are those that a model judge read and wrote for it,
    in an evaluation; cached verdicts have none.
    """

    score: float | None
    parts: dict[str, float] = Field(default_factory=dict)
    evidence: str = ""
    seconds: float = 0.0
    judge_tokens: int = 0

    @property
    def abstained(self) -> bool:
        """True when there is no score."""
        return self.score is None


class Cost(_Row):
    """What an episode used.

    ``read_tokens`` are what stood before each generation, added up: the prompt tokens that an endpoint bills. 0 where it was
    not counted. ``unmetered`` generations are of endpoints that reported no usage: their tokens are estimated from the length
    of the text, so the counts are no measurement. ``model_usd`` is what the generations cost where each model has a price of
    its own, as in a team; ``None`` where one price holds for all.
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


class CallRecord(_Row):
    """One tool call of an episode."""

    role: str
    tool: str
    argument: str
    observation: str
    ok: bool
    duplicate: bool = False
    seconds: float = 0.0


class TextSegment(_Row):
    """A run of text by one author (see :class:`afm.trajectory.types.Segment`)."""

    author: Author
    text: str


class Record(_Row):
    """One trajectory with everything needed to judge, filter, train on or display it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str
    agent: str
    agent_digest: str
    question: str
    segments: tuple[TextSegment, ...]
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

    @property
    def identity(self) -> str:
        """The record's id, and for one without it a digest of question and segments: equal rows share it."""
        if self.id:
            return self.id
        found = hashlib.blake2b(digest_size=8)
        for text in (self.question, *(part for one in self.segments for part in (one.author, one.text))):
            found.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
        return f"content-{found.hexdigest()}"

    @property
    def by_author(self) -> tuple[Segment, ...]:
        """The response as the rest of the framework takes it."""
        return tuple(Segment(part.author, part.text) for part in self.segments)

    @property
    def text(self) -> str:
        """The whole response, observations included."""
        return "".join(segment.text for segment in self.segments)
