"""What a filter is, the few words that all of them share, and :func:`run_filters` for records at hand."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from afm.agents import AgentSpec
from afm.errors import ConfigError, suggestion
from afm.trajectory.record import Record
from afm.trajectory.tags import SplitText, split
from afm.trajectory.types import Segment, Step


class Filter(Protocol):
    """One stage. It sees only rows that every earlier stage kept."""

    @property
    def name(self) -> str:
        """Names the stage in reasons and counts."""
        ...

    async def check(self, record: Record) -> Record:
        """The record, enriched or with ``kept=False`` and a reason that begins with ``name: ``."""
        ...


@runtime_checkable
class AtOnce(Protocol):
    """A filter that need not wait, at least not for every record."""

    def apply(self, record: Record) -> Record | None:
        """What :meth:`Filter.check` would give; ``None`` where that has to wait for something."""
        ...


class FilterSettings(BaseModel):
    """Base of the settings of a stage: what is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(ABC):
    """A filter that looks at one record and waits for nothing."""

    @property
    @abstractmethod
    def name(self) -> str:
        """See :attr:`Filter.name`."""

    @abstractmethod
    def reason(self, record: Record) -> str:
        """Why the record is dropped, without the stage's name; empty when it is kept."""

    def apply(self, record: Record) -> Record:
        """The record, dropped if there is a reason."""
        reason = self.reason(record)
        return dropped(record, f"{self.name}: {reason}") if reason else record

    async def check(self, record: Record) -> Record:
        """See :meth:`Filter.check`."""
        return self.apply(record)


def dropped(record: Record, reason: str) -> Record:
    """The same record, marked as not to be trained on."""
    return record.model_copy(update={"kept": False, "reason": reason})


def segments_of(record: Record) -> tuple[Segment, ...]:
    """The record's trajectory by author."""
    return tuple(Segment(segment.author, segment.text) for segment in record.segments)


class _LastSplit:
    """The split of the record read last: the stages of a row share one pass over its text."""

    def __init__(self) -> None:
        self._segments: object = None
        self._spec: AgentSpec | None = None
        self._split = SplitText((), "", None, 0)

    def of(self, record: Record, spec: AgentSpec) -> SplitText:
        if self._segments is not record.segments or self._spec is not spec:
            self._split = split(record.text, spec)
            self._segments, self._spec = record.segments, spec
        return self._split


_last_split = _LastSplit()


def split_of(record: Record, spec: AgentSpec) -> SplitText:
    """A record's text cut at its roles, whatever faults it has (:func:`afm.trajectory.tags.split`)."""
    return _last_split.of(record, spec)


def steps_of(record: Record, spec: AgentSpec) -> tuple[Step, ...]:
    """Its closed steps."""
    return split_of(record, spec).steps


def prose_of(record: Record, spec: AgentSpec) -> str:
    """What the agent wrote for itself and for the reader: no tool calls, no observations."""
    aside = {*spec.tool_roles, spec.observation_role}
    return "\n".join(step.content for step in steps_of(record, spec) if step.role not in aside)


def known_role(role: str, spec: AgentSpec, stage: str) -> str:
    """``role``.

    Raises:
        ConfigError: The agent has no such role.
    """
    if role not in spec.roles:
        raise ConfigError(
            f"filter {stage!r}: agent {spec.name!r} has no role {role!r}; {suggestion(role, spec.roles)}"
        )
    return role


COPY_OF = "copy_of"
"""Key of a copy's provenance: the identity of the row that was repeated."""


def origin_of(record: Record) -> str:
    """What draws go by: the identity of the record, and for a copy that of the row it repeats, so that both share a fate."""
    origin = record.provenance.get(COPY_OF)
    return origin if isinstance(origin, str) and origin else record.identity


def draw(seed: int, purpose: str, identity: str) -> float:
    """A number in [0, 1) that depends on its arguments alone, not on the order of rows or on processes."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def noted(record: Record, facts: Mapping[str, object]) -> dict[str, object]:
    """The record's provenance with more facts in it."""
    return {**record.provenance, **facts}


async def run_filters(
    records: Iterable[Record], filters: Sequence[Filter], *, parallel: int = 32
) -> AsyncIterator[Record]:
    """Stream every record through the filters, in order, ``parallel`` at a time; dropped ones come out too."""
    rows = iter(records)
    while batch := list(islice(rows, parallel)):
        for record in await asyncio.gather(*(pass_filters(record, filters) for record in batch)):
            yield record


async def pass_filters(record: Record, filters: Sequence[Filter]) -> Record:
    """One record through the filters, until one drops it."""
    for stage in filters:
        if not record.kept:
            return record
        record = await stage.check(record)
    return record
