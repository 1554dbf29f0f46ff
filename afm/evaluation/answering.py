"""Who answers in an evaluation, and how it samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from afm.configuration import Settings


class ModelSettings(Settings):
    """Which model answers.

    Attributes:
        path: Folder of a model, or address of an OpenAI-compatible server; of several that serve it, a list, or with
            commas between.
        name: What the server calls it; what records call it.
        tokenizer: Folder of the tokenizer, for a server.
        context_tokens: Bound on prompt and response together, for a server that does not tell.
        threads: CPU threads of an in-process model.
        max_batch: Sequences an in-process model generates at once.
    """

    path: str = Field(min_length=1)
    name: str | None = None
    tokenizer: str | None = None
    context_tokens: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=64, ge=1)

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return ",".join(value) if several else value

    @property
    def folder(self) -> Path | None:
        """The model's folder, ``None`` for a server."""
        return None if "://" in self.path else Path(self.path).expanduser()


class TeamChoice(Settings):
    """Which team answers in place of a model.

    Attributes:
        file: A team's YAML, as of ``afm data distill --team``; ``scripted`` is the embedded team of the agent.
        changes: ``key=value`` for that file, e.g. ``budget.usd=5``.
    """

    file: str = Field(min_length=1)
    changes: tuple[str, ...] = ()


class SamplingSettings(Settings):
    """How the model samples; ``max_new_tokens`` bounds one generation, ``null`` leaves that to the limits."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
