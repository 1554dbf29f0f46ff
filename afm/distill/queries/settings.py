"""How queries are selected, and the two ways of the paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from afm.errors import ConfigError


class FailedQuestions(StrEnum):
    """What a question leads to that cannot be sampled though others can."""

    DROP = "drop"
    ERROR = "error"


class QuerySettings(BaseModel):
    """What a selection depends on.

    With ``a`` right answers among ``samples``, the rate of a question is ``r_q = a / samples``; it is kept when
    ``r_q <= max_rate``.

    Attributes:
        with_tools: Whether a sample is an episode of the agent with its tools, or one answer without any.
        max_rate: ``None``: every rate below 1, so that only what every sample solves is dropped.
        target: Questions to keep at most, drawn at random in proportion to their data sources.
        seed: Of the samples and of the draw.
        max_tokens: Of one sample, tool answers aside; ``None``: the agent's own limits.
        failures_in_a_row: So many failed samples end the run if the engine does not answer a question that it answered
            before; twice ``parallel`` where that is more. Of more questions than that no other fault than a refusal is theirs.
        on_failed: Whether a question that cannot be sampled is dropped, or ends the run without a selection.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(default=32, ge=1, le=10_000)
    with_tools: bool = False
    max_rate: float | None = Field(default=0.3, ge=0, le=1)
    target: int | None = Field(default=None, ge=1)
    seed: int = 0
    parallel: int = Field(default=64, ge=1, le=10_000)
    temperature: float = Field(default=1.0, ge=0, le=2)
    max_tokens: int | None = Field(default=2048, ge=1, le=1_000_000)
    failures_in_a_row: int = Field(default=20, ge=1)
    on_failed: FailedQuestions = FailedQuestions.DROP

    @property
    def most_right(self) -> int:
        """Right answers that a question that is kept has at most."""
        if self.max_rate is None:
            return self.samples - 1
        return int(self.max_rate * self.samples + 1e-9)


class QueryConfig(QuerySettings):
    """A YAML of a selection (``configs/queries/``).

    Attributes:
        agent: Who answers; without its tools if not ``with_tools``.
        ability: Only rows of this ability are asked; by default all.
        sft: SFT data whose questions must not occur; a file that is missing is an error, so that no overlap goes unnoticed.
    """

    agent: str
    ability: str | None = None
    sft: tuple[Path, ...] = ()

    @property
    def selection(self) -> QuerySettings:
        """What decides about samples and rates."""
        return QuerySettings(**self.model_dump(include=set(QuerySettings.model_fields)))

    def known_files(self, label: str) -> list[Path]:
        """The SFT data.

        Raises:
            ConfigError: A file is missing.
        """
        for file in self.sft:
            if not file.is_file():
                raise ConfigError(
                    f"{label}: sft: {file}: no such file, so overlap with the SFT data cannot be excluded; make it with "
                    "the agent's prepare.sh, or run the command in the folder that the path begins in"
                )
        return list(self.sft)


PRESETS: dict[str, QuerySettings] = {
    "qa": QuerySettings(),
    "code": QuerySettings(samples=8, with_tools=True, max_rate=None, max_tokens=None),
}
"""``qa`` for web and multi-hop questions: 32 answers without tools, at most 0.3 right. ``code`` for programs and mathematics:
8 episodes with tools, not all of them right (AFM, section on data)."""
