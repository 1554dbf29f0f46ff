"""Is a trajectory as long as it should be?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, steps_of
from afm.errors import ConfigError, MissingExtraError
from afm.trajectory.record import Record


class LengthSettings(FilterSettings):
    """Bounds; ``null`` means none.

    Attributes:
        min_hops: Least number of tool interactions.
        max_hops: Greatest number of them.
        max_chars: Characters of the whole response, observations included.
        max_tokens: Its tokens, by ``tokenizer``.
        tokenizer: A folder with a ``tokenizer.json``, or that file.
    """

    min_hops: int | None = Field(default=None, ge=0)
    max_hops: int | None = Field(default=None, ge=0)
    max_chars: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    tokenizer: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> LengthSettings:
        if (self.max_tokens is None) != (self.tokenizer is None):
            raise ValueError("`max_tokens` and `tokenizer` belong together; give both or neither")
        if self.min_hops is not None and self.max_hops is not None and self.min_hops > self.max_hops:
            raise ValueError(f"min_hops {self.min_hops} above max_hops {self.max_hops}")
        return self


def tokenizer_file(given: Path) -> Path:
    """The file that the setting ``tokenizer`` means."""
    return given / "tokenizer.json" if given.is_dir() else given


@dataclass(frozen=True)
class LengthFilter(Rule):
    """Drops what is too short or too long, counted in hops, characters or tokens."""

    spec: AgentSpec
    settings: LengthSettings
    name: str = "length"

    def reason(self, record: Record) -> str:
        """The first bound that is broken; tokens, which cost most, are counted last."""
        bounds = self.settings
        hops = sum(step.role in self.spec.tool_roles for step in steps_of(record, self.spec))
        if bounds.min_hops is not None and hops < bounds.min_hops:
            return f"{hops} hops, expected at least {bounds.min_hops}"
        if bounds.max_hops is not None and hops > bounds.max_hops:
            return f"{hops} hops, expected at most {bounds.max_hops}"
        chars = sum(len(segment.text) for segment in record.segments)
        if bounds.max_chars is not None and chars > bounds.max_chars:
            return f"{chars} characters, expected at most {bounds.max_chars}"
        if bounds.max_tokens is None:
            return ""
        tokens = len(self._tokenizer.encode(record.text, add_special_tokens=False).ids)
        return f"{tokens} tokens, expected at most {bounds.max_tokens}" if tokens > bounds.max_tokens else ""

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingExtraError("tokenizers", "sft") from error
        file = tokenizer_file(self.settings.tokenizer or Path())
        if not file.is_file():
            raise ConfigError(f"filter {self.name!r}: {self.settings.tokenizer}: no tokenizer.json there")
        return Tokenizer.from_file(str(file))
