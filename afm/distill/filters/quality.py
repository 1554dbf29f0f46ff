"""Filters that look at the words: is the answer right, and is the row written in a language that we want?"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from afm.agents import AgentSpec
from afm.configuration import Settings
from afm.distill.filters.base import Rule, dropped, prose_of
from afm.errors import ConfigError, MissingExtraError
from afm.rewards import Reward, Sample
from afm.trajectory.record import Record, Verdict


class QualitySettings(Settings):
    """How to judge answers."""

    min_score: float = Field(default=1.0, allow_inf_nan=False)
    """Lowest score of a kept row."""
    reward: Path | None = None
    """A reward YAML. The default is the scorer of each row's data source."""
    recorded: bool = Field(default=False)
    """Use the verdict that a row already has, and judge only rows without one."""


@dataclass(frozen=True)
class QualityFilter:
    """Keeps rows whose score is at least ``min_score``. The verdict stays in the record in either case.

    The verdict's seconds are set to 0, so that filtering the same rows again gives the same bytes.
    """

    spec: AgentSpec
    reward: Reward
    min_score: float = 1.0
    recorded: bool = False
    name: str = "quality"

    async def check(self, record: Record) -> Record:
        """Judge the trajectory. A row that the reward abstains from is dropped, because its answer is unjudged."""
        verdict = record.verdict
        if verdict is None or verdict.score is None or not self.recorded:
            verdict = await self._judge(record)
            record = record.model_copy(update={"verdict": verdict})
        if verdict.score is None:
            return dropped(record, f"{self.name}: no verdict: {verdict.evidence}")
        if not verdict.score >= self.min_score:  # NaN is not kept either
            return dropped(record, f"{self.name}: score {verdict.score:g}: {verdict.evidence}")
        return record

    async def close(self) -> None:
        """Stop the reward's worker processes."""
        await self.reward.close()

    async def _judge(self, record: Record) -> Verdict:
        verdict = await self.reward.score(
            Sample.of(self.spec, record, record.segments, extra_info=record.provenance.get("extra_info", {}))
        )
        return verdict.model_copy(update={"seconds": 0.0})


class LanguageSettings(Settings):
    """Which languages to keep."""

    allowed: tuple[str, ...] = Field(default=("en",), min_length=1)
    """ISO 639-1 codes."""
    min_confidence: float = Field(default=0.9, ge=0, le=1)
    """Minimum confidence in another language to drop a row."""
    min_chars: int = Field(default=60, ge=1, le=100_000)
    """Texts with fewer letters are kept, because their language is unclear."""
    max_chars: int = Field(default=600, ge=60, le=100_000)
    """Number of examined characters of a text."""


@dataclass(frozen=True)
class LanguageFilter(Rule):
    """Drops rows whose question and prose are in another language. Tool calls and observations are not examined."""

    spec: AgentSpec
    settings: LanguageSettings = field(default_factory=LanguageSettings)
    name: str = "language"

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.settings.allowed) - set(_identifier().labels)):
            raise ConfigError(f"filter {self.name!r}: unknown languages {unknown}; expected codes like 'en'")

    def reason(self, record: Record) -> str:
        """Return the language if it is not allowed."""
        text = f"{record.question}\n{prose_of(record, self.spec)}"[: self.settings.max_chars]
        if sum(map(str.isalpha, text)) < self.settings.min_chars:
            return ""
        language, confidence = _identifier().classify(text)
        if language in self.settings.allowed or confidence < self.settings.min_confidence:
            return ""
        return f"{language} (confidence {confidence:.2f}), expected {' or '.join(self.settings.allowed)}"


@lru_cache(maxsize=1)
def _identifier() -> Any:
    """Load the language model once per process, which takes a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingExtraError("py3langid", "filters") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
