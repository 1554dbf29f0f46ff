"""Is a row written in a language that we want?"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, prose_of
from afm.errors import ConfigError, MissingExtraError
from afm.trajectory.record import Record


class LanguageSettings(FilterSettings):
    """Which languages stay.

    Attributes:
        allowed: ISO 639-1 codes.
        min_confidence: The identifier must be so sure of another language to drop a row.
        min_chars: Shorter texts are not judged: nobody can tell.
        max_chars: So much of a text is looked at.
    """

    allowed: tuple[str, ...] = Field(default=("en",), min_length=1)
    min_confidence: float = Field(default=0.9, ge=0, le=1)
    min_chars: int = Field(default=60, ge=1, le=100_000)
    max_chars: int = Field(default=600, ge=60, le=100_000)


@dataclass(frozen=True)
class LanguageFilter(Rule):
    """Drops rows whose question and prose are in another language; tool calls and observations are not judged."""

    spec: AgentSpec
    settings: LanguageSettings = field(default_factory=LanguageSettings)
    name: str = "language"

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.settings.allowed) - set(_identifier().labels)):
            raise ConfigError(f"filter {self.name!r}: unknown languages {unknown}; expected codes like 'en'")

    def reason(self, record: Record) -> str:
        """What language it is, if it is none of the allowed ones."""
        text = f"{record.question}\n{prose_of(record, self.spec)}"[: self.settings.max_chars]
        if sum(map(str.isalpha, text)) < self.settings.min_chars:
            return ""
        language, confidence = _identifier().classify(text)
        if language in self.settings.allowed or confidence < self.settings.min_confidence:
            return ""
        return f"{language} (confidence {confidence:.2f}), expected {' or '.join(self.settings.allowed)}"


@lru_cache(maxsize=1)
def _identifier() -> Any:
    """Reads its model once a process, which takes a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingExtraError("py3langid", "filters") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
