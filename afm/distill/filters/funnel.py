"""How many rows each stage leaves, as counts and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.errors import MissingExtraError
from afm.runs.atomic import replacing
from afm.trajectory.record import Record

EARLIER = "earlier run: "
"""Before the name of the stage of another run."""
_MOST_EARLIER = 32
"""Such names; reasons of others may be different in every row, and a funnel is saved with every chunk."""
_OTHERS = f"{EARLIER}other reasons"


@dataclass(frozen=True, slots=True)
class StageCount:
    """One stage of a run.

    Attributes:
        rows: Rows that reached it.
        dropped: Rows that it dropped.
    """

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
            had dropped, by :data:`EARLIER` and that name (of more than 32 names the later ones together).
        copies: Rows added by repeating kept ones; not part of ``kept``.
        order: The stages' names, as far as they are known.
    """

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    order: tuple[str, ...] = ()

    def count(self, record: Record) -> None:
        """Add one row that has passed or left the filters."""
        self.add(kept=record.kept, reason=record.reason)

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
        if reason.startswith("event "):  # its id, which differs from row to row
            reason = reason.partition(": ")[2]
        name = f"{EARLIER}{reason.partition(':')[0] or 'no reason'}"
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
            "stages": [
                {"name": stage.name, "rows": stage.rows, "dropped": stage.dropped, "left": stage.left}
                for stage in self.stages()
            ],
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
