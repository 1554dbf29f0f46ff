"""The quality report of a data set: one HTML page without scripts, network or anything to load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.agents import AgentSpec
from afm.evaluation.blocks import Block, blocks_of, role_colours
from afm.evaluation.data_stats import DataStats, Histogram, shipped_agent
from afm.evaluation.words import number, percent
from afm.runs.atomic import replacing
from afm.trajectory.record import Record

_MOST_BARS = 24


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a distribution; ``width`` is a share of the longest bar's."""

    label: str
    count: int
    share: float
    width: float


@dataclass(frozen=True, slots=True)
class Chart:
    """One distribution.

    Attributes:
        note: Its middle, or what is counted.
    """

    title: str
    note: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class FunnelStage:
    """Rows that a filter stage dropped, and what was left behind it; ``width`` is a share of all."""

    name: str
    dropped: int
    left: int
    width: float


@dataclass(frozen=True, slots=True)
class _Sample:
    record: Record
    blocks: Sequence[Block]


def write_data_report(
    stats: DataStats,
    path: str | Path,
    *,
    title: str,
    funnels: Mapping[str, Sequence[FunnelStage]],
    agent: AgentSpec | None = None,
) -> Path:
    """Write the page, replacing ``path`` once it is complete. Text of strangers is escaped; nothing can run or load."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("afm.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number}
    samples = [
        _Sample(record, blocks_of(record, agent or shipped_agent(record.agent))) for record in stats.shown
    ]
    specs = [agent] if agent else [spec for name in stats.agents if (spec := shipped_agent(name)) is not None]
    html = environment.get_template("data.html.j2").render(
        title=title,
        stats=stats,
        charts=charts(stats),
        funnels=funnels,
        samples=samples,
        colours=role_colours(specs[0]) if len(specs) == 1 else {},
    )
    target = Path(path)
    with replacing(target) as temporary:
        # Model-written text may hold half a surrogate pair, which UTF-8 cannot carry.
        temporary.write_bytes(html.encode("utf-8", errors="replace"))
    return target


def charts(stats: DataStats) -> list[Chart]:
    """Every distribution that has something to show."""
    found = [
        Chart("Agent", "rows", named(stats.agents)),
        Chart("Source of the question", "rows", named(stats.sources)),
        Chart("Teacher", "rows", named(stats.models)),
        Chart(
            "Length", f"characters that the agent wrote; {_middle(stats.characters, 100)}", _lengths(stats)
        ),
        Chart("Steps", _middle(stats.steps), binned(stats.steps)),
        Chart("Tool calls in a row", _middle(stats.calls), binned(stats.calls)),
        Chart("Hops", f"facts that the question needs; {_middle(stats.hops)}", binned(stats.hops)),
        Chart(
            "Tools", f"calls; {stats.repeated_calls} repeat an earlier one of their row", named(stats.tools)
        ),
        Chart("Tool calls that failed", "calls", named(stats.tool_failures)),
        Chart("Roles", "steps", named(stats.roles)),
        Chart("Rows with the role", "rows", named(stats.with_role, of=stats.rows)),
        Chart("Final answer", "rows, by the answer's form", named(stats.answers)),
        Chart("Dropped rows in these files", "rows, by reason", named(stats.reasons)),
        Chart("Mended breaks of the order", "repairs", named(stats.repairs)),
    ]
    return [chart for chart in found if chart.bars]


def named(counts: Counter[str], of: int | None = None) -> list[Bar]:
    """Names by count, the most frequent first; shares of ``of``, or of all."""
    total, top = of or counts.total(), max(counts.values(), default=1)
    bars = [Bar(name, n, n / max(1, total), n / top) for name, n in counts.most_common(_MOST_BARS)]
    if rest := sum(n for _, n in counts.most_common()[_MOST_BARS:]):
        bars.append(Bar("all others", rest, rest / max(1, total), min(1.0, rest / top)))
    return bars


def binned(histogram: Histogram, scale: int = 1) -> list[Bar]:
    """Values in bins of equal width, as narrow as the page has room for.

    Args:
        scale: What one stands for: the value 3 of scale 100 is anything from 201 to 300.
    """
    counts = histogram.counts
    if not counts:
        return []
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // _MOST_BARS)
    bins: Counter[int] = Counter()
    for value, count in counts.items():
        bins[(value - low) // width] += count
    top = max(bins.values())
    bars = []
    for place in range(max(bins) + 1):
        first, last = low + place * width, low + (place + 1) * width - 1
        low_end = first if scale == 1 else max(0, (first - 1) * scale + 1)
        label = str(first) if low_end == last * scale else f"{low_end} to {last * scale}"
        bars.append(Bar(label, bins[place], bins[place] / histogram.total, bins[place] / top))
    return bars


def _lengths(stats: DataStats) -> list[Bar]:
    return binned(stats.characters, 100)


def _middle(histogram: Histogram, scale: int = 1) -> str:
    tenth, half, most = (scale * histogram.quantile(share) for share in (0.1, 0.5, 0.9))
    return f"median {half}, 80 % between {tenth} and {most}, mean {number(scale * histogram.mean)}"
