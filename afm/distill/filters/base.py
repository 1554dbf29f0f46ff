"""The base of all filters, :func:`run_filters` for records in memory, and the funnel of their counts."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from afm.agents import AgentSpec
from afm.errors import ConfigError, MissingExtraError, suggestion
from afm.runs.atomic import replacing
from afm.trajectory.io import read_records
from afm.trajectory.record import Record
from afm.trajectory.tags import SplitText, Step, split


class Filter(Protocol):
    """One stage. It receives only rows that every earlier stage kept."""

    @property
    def name(self) -> str:
        """Name of the stage in reasons and counts."""
        ...

    async def check(self, record: Record) -> Record:
        """Return the record, enriched, or with ``kept=False`` and a reason that begins with ``name: ``."""
        ...


class Rule(ABC):
    """A filter that decides about one record without waiting."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the stage in reasons and counts."""

    @abstractmethod
    def reason(self, record: Record) -> str:
        """Return why the record is dropped, without the stage's name. Empty if it is kept."""

    def apply(self, record: Record) -> Record:
        """Return the record, dropped if there is a reason."""
        reason = self.reason(record)
        return dropped(record, f"{self.name}: {reason}") if reason else record

    async def check(self, record: Record) -> Record:
        """Do the same as :meth:`apply`."""
        return self.apply(record)


def dropped(record: Record, reason: str) -> Record:
    """Return the record marked as dropped, with the reason."""
    return record.model_copy(update={"kept": False, "reason": reason})


_last_split: tuple[object, AgentSpec, SplitText] | None = None


def split_of(record: Record, spec: AgentSpec) -> SplitText:
    """Split a record's text at its roles, even if it has faults (:func:`afm.trajectory.tags.split`).

    The stages of a row share one pass over its text, because the split of the last record is cached.
    """
    global _last_split
    if _last_split is None or _last_split[0] is not record.segments or _last_split[1] is not spec:
        _last_split = record.segments, spec, split(record.text, spec)
    return _last_split[2]


def steps_of(record: Record, spec: AgentSpec) -> tuple[Step, ...]:
    """Return the closed steps of a record."""
    return split_of(record, spec).steps


def prose_of(record: Record, spec: AgentSpec) -> str:
    """Return the agent's prose: all steps except tool calls and observations."""
    aside = {*spec.tool_roles, spec.observation_role}
    return "\n".join(step.content for step in steps_of(record, spec) if step.role not in aside)


def known_role(role: str, spec: AgentSpec, stage: str) -> str:
    """Return ``role`` if the agent has it.

    Raises:
        ConfigError: The agent has no such role.
    """
    if role not in spec.roles:
        raise ConfigError(
            f"filter {stage!r}: agent {spec.name!r} has no role {role!r}; {suggestion(role, spec.roles)}"
        )
    return role


COPY_OF = "copy_of"
"""Key of a copy's provenance: the identity of the original row."""


def origin_of(record: Record) -> str:
    """Return the identity that draws depend on. A copy has that of its original, so that both are kept or dropped."""
    origin = record.provenance.get(COPY_OF)
    return origin if isinstance(origin, str) and origin else record.identity


def draw(seed: int, purpose: str, identity: str) -> float:
    """Return a number in [0, 1) that depends only on the arguments, not on the order of rows or on processes."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


async def run_filters(
    records: Iterable[Record], filters: Sequence[Filter], *, parallel: int = 32
) -> AsyncIterator[Record]:
    """Stream every record through the filters, in order and ``parallel`` at a time. Yields dropped records too."""
    rows = iter(records)
    while batch := list(islice(rows, parallel)):
        for record in await asyncio.gather(*(pass_filters(record, filters) for record in batch)):
            yield record


async def pass_filters(record: Record, filters: Sequence[Filter]) -> Record:
    """Pass one record through the filters until one drops it."""
    for stage in filters:
        if not record.kept:
            return record
        record = await stage.check(record)
    return record


def unreadable_row(path: Path, number: int, error: str, line: bytes) -> dict[str, Any]:
    """Return the row of ``unreadable.jsonl`` for a line: file, 1-based number, error and text."""
    text = line.rstrip(b"\r\n").decode(errors="replace")
    return {"path": str(path), "line": number, "error": error, "text": text}


def without_event(reason: str) -> str:
    """Return a reason without its leading event id, which differs between rows."""
    return reason.partition(": ")[2] if reason.startswith("event ") else reason


def first_reasons(file: Path, stages: Collection[str]) -> dict[str, str]:
    """Return the id and the reason of the first row of ``file`` that each of the stages of a :class:`Funnel` dropped."""
    examples: dict[str, str] = {}
    for row in read_records(file) if stages else ():
        if isinstance(row, Record):
            stage = without_event(row.reason).partition(":")[0] or "no reason"
            for name in {stage, f"{EARLIER}{stage}"} & set(stages):
                examples.setdefault(name, f"{row.id}: {row.reason or 'no reason'}")
        if len(examples) == len(stages):
            break
    return examples


EARLIER = "earlier run: "
"""Prefix of the name of a stage of an earlier run."""
_MOST_EARLIER = 32
"""Maximum number of these names. Reasons may differ in every row, and the funnel is saved with every chunk."""
_OTHERS = f"{EARLIER}other reasons"


@dataclass(frozen=True, slots=True)
class StageCount:
    """Counts of one stage: the rows that reached it, and the rows that it dropped."""

    name: str
    rows: int
    dropped: int

    @property
    def left(self) -> int:
        """Number of rows that the stage kept."""
        return self.rows - self.dropped


@dataclass
class Funnel:
    """Counts of a filter run.

    Attributes:
        dropped: Number of dropped rows by stage name (the part of the reason before the first colon). Rows that an earlier
            run dropped count under :data:`EARLIER` and that name. All these names after the first 32 count as one.
        copies: Rows added by repeating kept ones. They are not part of ``kept``.
        order: Known names of stages.
        others: Number of rows by the agent that they name, if it is not the agent of the run.
    """

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    order: tuple[str, ...] = ()
    others: Counter[str] = field(default_factory=Counter)

    def add(self, *, kept: bool, reason: str = "", copies: int = 0, earlier: bool = False) -> None:
        """Count one row.

        Args:
            earlier: Whether an earlier run dropped the row, so that no stage of this run has seen it.
        """
        self.seen += 1
        self.kept += kept
        self.copies += copies
        if not kept:
            self.dropped[self._earlier(reason) if earlier else reason.partition(":")[0]] += 1

    def _earlier(self, reason: str) -> str:
        """Return the name under which a row that an earlier run dropped is counted."""
        name = f"{EARLIER}{without_event(reason).partition(':')[0] or 'no reason'}"
        if name in self.dropped or sum(known.startswith(EARLIER) for known in self.dropped) < _MOST_EARLIER:
            return name
        return _OTHERS

    def stages(self) -> Iterator[StageCount]:
        """Yield the counts of earlier runs, then those of the filters in order."""
        before = [name for name in sorted(self.dropped) if name not in self.order]
        rows = self.seen
        for name in (*before, *self.order):
            yield StageCount(name, rows, self.dropped[name])
            rows -= self.dropped[name]

    def as_json(self) -> dict[str, Any]:
        """Return the counts as JSON for :meth:`from_json`."""
        return {
            "seen": self.seen,
            "kept": self.kept,
            "copies": self.copies,
            "written": self.kept + self.copies,
            "stages": [{**asdict(stage), "left": stage.left} for stage in self.stages()],
            **({"other_agents": dict(self.others)} if self.others else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], order: tuple[str, ...]) -> Funnel:
        """Read the result of :meth:`as_json`."""
        dropped = Counter({stage["name"]: stage["dropped"] for stage in data["stages"] if stage["dropped"]})
        others = Counter(data.get("other_agents", {}))
        return cls(data["seen"], data["kept"], dropped, data["copies"], order, others)


_KEPT, _DROPPED = "#2a6f97", "#e0e4e8"


def draw_funnel(funnel: Funnel, path: Path, title: str) -> None:
    """Write a PNG with one bar per stage: the rows that are left, and in grey the dropped rows.

    Raises:
        MissingExtraError: ``matplotlib`` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "filters") from error
    stages = list(funnel.stages())
    names = ["read", *(stage.name.replace("_", " ") for stage in stages)]
    left = [funnel.seen, *(stage.left for stage in stages)]
    lost = [0, *(stage.dropped for stage in stages)]
    if funnel.copies:
        names.append("with copies")
        left.append(funnel.kept + funnel.copies)
        lost.append(0)
    figure = Figure(figsize=(8, 1.2 + 0.38 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(names))
    axes.barh(places, left, color=_KEPT)
    axes.barh(places, lost, left=left, color=_DROPPED)
    for place, kept, gone in zip(places, left, lost, strict=True):
        axes.text(
            kept + gone, place, f" {kept:,}" + (f"  (-{gone:,})" if gone else ""), va="center", fontsize=9
        )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(*left, 1) * 1.25)
    axes.set_xlabel("trajectories")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
