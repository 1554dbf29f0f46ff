"""Scores that others published; the figures are in ``published_scores.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files

from pydantic import Field, model_validator

from afm.configuration import Settings, read_file, validated
from afm.errors import suggestion

_FILE = "published_scores.yaml"


class _Source(Settings):
    work: str
    where: str
    model: str
    own_protocol: bool = False
    confirmed: str = ""


class _Row(Settings):
    metric: str = Field(pattern=r"^(pass@|avg@|best-of-)\d+$")
    percent: float = Field(ge=0, le=100)
    source: str
    model: str | None = None


class _Table(Settings):
    sources: dict[str, _Source]
    scores: dict[str, list[_Row]]

    @model_validator(mode="after")
    def _check(self) -> _Table:
        for row in (row for rows in self.scores.values() for row in rows):
            if row.source not in self.sources:
                raise ValueError(
                    f"the name of a source, got {row.source!r}; {suggestion(row.source, self.sources)}"
                )
        return self


@dataclass(frozen=True, slots=True)
class PublishedScore:
    """One published figure.

    Attributes:
        percent: 0 to 100.
        source: Work and where it stands.
        of_another_model: Whether it is not of the source's main model.
        own_protocol: Whether it is of another project's model, measured in that project's way: no run of ours can have its
            settings.
    """

    metric: str
    percent: float
    model: str
    source: str
    of_another_model: bool = False
    own_protocol: bool = False

    @property
    def label(self) -> str:
        """The metric, with the model where it is not AFM's main one."""
        apart = self.of_another_model or self.own_protocol
        return f"{self.metric} ({self.model})" if apart else self.metric


@cache
def published_scores() -> Mapping[str, tuple[PublishedScore, ...]]:
    """All published figures by the name of their benchmark.

    Raises:
        ConfigError: The file is wrong.
    """
    with as_file(files("afm.evaluation") / _FILE) as path:
        table = validated(_Table, read_file(path, "published scores"), str(path))
    return {
        name: tuple(
            PublishedScore(
                row.metric,
                row.percent,
                row.model or source.model,
                f"{source.work}, {source.where}",
                of_another_model=row.model is not None,
                own_protocol=source.own_protocol,
            )
            for row in rows
            for source in (table.sources[row.source],)
        )
        for name, rows in table.scores.items()
    }
