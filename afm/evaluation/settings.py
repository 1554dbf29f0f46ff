"""Settings of who answers: a model or a team, and how the model samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from afm.configuration import Settings
from afm.models.base import ToolCalls


class ModelSettings(Settings):
    """Which model answers."""

    path: str = Field(min_length=1)
    """Folder of a model, or address of an OpenAI-compatible server; of several that serve it, a list, or with
    commas between."""
    name: str | None = None
    """What the server calls it; what records call it."""
    tokenizer: str | None = None
    """Folder of the tokenizer, for a server."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Bound on prompt and response together, for a server that does not tell."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of an in-process model."""
    max_batch: int = Field(default=64, ge=1)
    """Sequences an in-process model generates at once."""
    chat: ToolCalls | None = None
    """For a server that shows no token ids: the model is asked by chat completions and calls tools in the
    agent's ``tags`` or by the endpoint's ``native`` tool calls. Token counts are then estimates."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Laid over the fields of a chat request; ``null`` removes one, e.g. ``{max_tokens: null,
    max_completion_tokens: 4096}``."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        several = isinstance(value, list) and all(isinstance(path, str) for path in value)
        return ",".join(value) if several else value

    @model_validator(mode="after")
    def _chats_with_a_server(self) -> Self:
        if self.request and self.chat is None:
            raise ValueError("no `request` without `chat`; only chat requests can be changed")
        if self.chat is not None and (
            self.folder is not None or self.tokenizer is not None or "," in self.path
        ):
            raise ValueError(
                "the address of one server and no tokenizer beside `chat`; a model whose folder or tokenizer is at hand "
                "is asked with token ids, without `chat`"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The model's folder, ``None`` for a server."""
        return None if "://" in self.path else Path(self.path).expanduser()


class TeamChoice(Settings):
    """Which team answers in place of a model."""

    file: str = Field(min_length=1)
    """A team's YAML, as of ``afm data distill --team``; ``scripted`` is the embedded team of the agent."""
    changes: tuple[str, ...] = ()
    """``key=value`` for that file, e.g. ``budget.usd=5``."""


class SamplingSettings(Settings):
    """How the model samples; ``max_new_tokens`` bounds one generation, ``null`` leaves that to the limits."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
