"""The base of all filters, :func:`run_filters` for records at hand, and the funnel that counts what they leave."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from afm.agents import AgentSpec
from afm.errors import ConfigError, MissingExtraError, suggestion
from afm.runs.atomic import replacing
from afm.trajectory.record import Record
from afm.trajectory.tags import SplitText, Step, split


class Filter(Protocol):
    """One stage. It sees only rows that every earlier stage kept."""

    @property
    def name(self) -> str:
        """Names the stage in reasons and counts."""
        ...

    async def check(self, record: Record) -> Record:
        """The record, enriched or with ``kept=False`` and a reason that begins with ``name: ``."""
        ...


class Rule(ABC):
    """A filter that looks at one record and waits for nothing."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The stage, in reasons and counts."""

    @abstractmethod
    def reason(self, record: Record) -> str:
        """Why the record is dropped, without the stage's name; empty when it is kept."""

    def apply(self, record: Record) -> Record:
        """The record, dropped if there is a reason."""
        reason = self.reason(record)
        return dropped(record, f"{self.name}: {reason}") if reason else record

    async def check(self, record: Record) -> Record:
        """As :meth:`apply`."""
        return self.apply(record)


def dropped(record: Record, reason: str) -> Record:
    """The same record, marked as not to be trained on."""
    return record.model_copy(update={"kept": False, "reason": reason})


_last_split: tuple[object, AgentSpec, SplitText] | None = None


def split_of(record: Record, spec: AgentSpec) -> SplitText:
    """A record's text cut at its roles, whatever faults it has (:func:`afm.trajectory.tags.split`).

    The stages of a row share one pass over its text: the split of the record read last is kept.
    """
    global _last_split
    if _last_split is None or _last_split[0] is not record.segments or _last_split[1] is not spec:
        _last_split = record.segments, spec, split(record.text, spec)
    return _last_split[2]


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


def unreadable_row(path: Path, number: int, error: str, line: bytes) -> dict[str, Any]:
    """What ``unreadable.jsonl`` says of a line: its file, its 1-based number, why it cannot be read, and its text."""
    text = line.rstrip(b"\r\n").decode(errors="replace")
    return {"path": str(path), "line": number, "error": error, "text": text}


def without_event(reason: str) -> str:
    """A reason without the id of an event in front of it, which differs from row to row."""
    return reason.partition(": ")[2] if reason.startswith("event ") else reason


EARLIER = "earlier run: "
"""Before the name of the stage of another run."""
_MOST_EARLIER = 32
"""Number of these names; reasons of others may be different in every row, and a funnel is saved with every chunk."""
_OTHERS = f"{EARLIER}other reasons"


@dataclass(frozen=True, slots=True)
class StageCount:
    """One stage of a run: the rows that reached it, and those of them that it dropped."""

    name: str
    rows: int
    dropped: int

    @property
    def left(self) -> int:
        """Rows that it kept."""
        return self.rows - self.dropped


@dataclass
class Funnel:
    """Counts of a filter run.

    Attributes:
        dropped: Rows dropped, by the stage's name (the part of the reason before the first colon), and those that an earlier run
            had dropped, by :data:`EARLIER` and that name. All names after the first 32 count as one.
        copies: Rows added by repeating kept ones; not part of ``kept``.
        order: The stages' names, as far as they are known.
    """

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    order: tuple[str, ...] = ()

    def add(self, *, kept: bool, reason: str = "", copies: int = 0, earlier: bool = False) -> None:
        """Add one row by what became of it.

        Args:
            earlier: It was dropped before it came here; no stage of this run has seen it.
        """
        self.seen += 1
        self.kept += kept
        self.copies += copies
        if not kept:
            self.dropped[self._earlier(reason) if earlier else reason.partition(":")[0]] += 1

    def _earlier(self, reason: str) -> str:
        """The name that a row counts under which an earlier run dropped."""
        name = f"{EARLIER}{without_event(reason).partition(':')[0] or 'no reason'}"
        if name in self.dropped or sum(known.startswith(EARLIER) for known in self.dropped) < _MOST_EARLIER:
            return name
        return _OTHERS

    def stages(self) -> Iterator[StageCount]:
        """First what dropped rows before the filters, then the filters in order."""
        before = [name for name in sorted(self.dropped) if name not in self.order]
        rows = self.seen
        for name in (*before, *self.order):
            yield StageCount(name, rows, self.dropped[name])
            rows -= self.dropped[name]

    def as_json(self) -> dict[str, Any]:
        """For a file; :meth:`from_json` reads it."""
        return {
            "seen": self.seen,
            "kept": self.kept,
            "copies": self.copies,
            "written": self.kept + self.copies,
            "stages": [{**asdict(stage), "left": stage.left} for stage in self.stages()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], order: tuple[str, ...]) -> Funnel:
        """The funnel that :meth:`as_json` wrote."""
        dropped = Counter({stage["name"]: stage["dropped"] for stage in data["stages"] if stage["dropped"]})
        return cls(data["seen"], data["kept"], dropped, data["copies"], order)


_KEPT, _DROPPED = "#2a6f97", "#e0e4e8"


def draw_funnel(funnel: Funnel, path: Path, title: str) -> None:
    """Write a PNG with a bar a stage: what it left, and in grey what it dropped.

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
