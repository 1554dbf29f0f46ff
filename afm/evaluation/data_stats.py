"""Statistics of a set of trajectories in one pass, and their report."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from afm.agents import AgentSpec, load_agent
from afm.errors import ConfigError
from afm.evaluation.page import blocks_of, plural, role_colours, template, write_page
from afm.evaluation.wording import dollars, number, percent
from afm.terminal import visible
from afm.trajectory import answers
from afm.trajectory.programs import call_form
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, split

_MOST_NAMES = 200
_OTHER = "(others)"
_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d\s*%?")
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_DATE = re.compile(
    r"(?i)(?=.*\d)(?:.*\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b.*|\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4})"
)
_NAME_WORDS = 5
_PHRASE_WORDS = 8


class Histogram(Counter[int]):
    """Counts of whole numbers."""

    @property
    def mean(self) -> float:
        """Mean of the numbers, 0 if empty."""
        return sum(value * count for value, count in self.items()) / max(1, self.total())

    def quantile(self, share: float) -> int:
        """Return the smallest value that at least ``share`` of all do not exceed, 0 if empty."""
        passed = 0
        for value in sorted(self):
            passed += self[value]
            if passed >= share * self.total():
                return value
        return 0


@dataclass
class DataStats:
    """Counts over all rows so far. Memory grows by 16 bytes per row, for duplicates, and by nothing else.

    Args:
        samples: Number of rows to show. Each row has the same chance. The same ``seed`` gives the same rows.

    Attributes:
        characters: Hundreds of characters that the agent wrote, rounded up.
        hops: Facts that a question needs, where its row has them.
        roles: Number of steps with each role.
        with_role: Number of rows with each role.
        repairs: Repaired faults of format, by kind.
    """

    samples: int = 6
    seed: int = 0
    rows: int = 0
    kept: int = 0
    agents: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    characters: Histogram = field(default_factory=Histogram)
    steps: Histogram = field(default_factory=Histogram)
    calls: Histogram = field(default_factory=Histogram)
    hops: Histogram = field(default_factory=Histogram)
    tools: Counter[str] = field(default_factory=Counter)
    tool_failures: Counter[str] = field(default_factory=Counter)
    repeated_calls: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    with_role: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    agent_tokens: int = 0
    cost_usd: float = 0.0
    generation_s: float = 0.0
    tool_s: float = 0.0
    same_question: int = 0
    same_text: int = 0
    shown: list[Record] = field(default_factory=list)
    _questions: set[int] = field(default_factory=set, repr=False)
    _texts: set[int] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def add(self, record: Record, agent: AgentSpec | None = None) -> None:
        """Count one row. ``agent`` is its declaration if the agent is not a shipped one."""
        self.rows += 1
        self.kept += record.kept
        if not record.kept:
            _count(self.reasons, record.reason.partition(":")[0][:80] or "no reason")
        _count(self.agents, record.agent)
        _count(self.sources, record.data_source or "unknown")
        _count(self.models, record.model or "unknown")
        self._text(record, agent or shipped_agent(record.agent))
        self._calls(record)
        self._cost(record)
        self._duplicates(record)
        self._sample(record)

    def _text(self, record: Record, spec: AgentSpec | None) -> None:
        written = sum(len(part.text) for part in record.segments if part.author is Author.AGENT)
        self.characters[-(-written // 100)] += 1
        if spec is None:
            _count(self.answers, "agent unknown (give --agent)")
            return
        steps = split(record.text, spec).steps
        self.steps[len(steps)] += 1
        self.roles.update(step.role for step in steps)
        self.with_role.update({step.role for step in steps})
        self.answers[answer_type(answers(record.segments, spec))] += 1

    def _calls(self, record: Record) -> None:
        self.calls[record.cost.tool_calls] += 1
        seen: set[tuple[str, str]] = set()
        for call in record.calls:
            _count(self.tools, call.tool)
            if not call.ok:
                _count(self.tool_failures, call.tool)
            key = (call.tool, call_form(call.tool, call.argument))
            self.repeated_calls += key in seen
            seen.add(key)
        info = record.provenance.get("extra_info")
        hops = info.get("hops") if isinstance(info, dict) else None
        if isinstance(hops, int) and 0 <= hops < 1000:
            self.hops[hops] += 1

    def _cost(self, record: Record) -> None:
        self.prompt_tokens += record.cost.prompt_tokens
        self.agent_tokens += record.cost.agent_tokens
        self.generation_s += record.cost.generation_seconds
        self.tool_s += record.cost.tool_seconds
        usd, repairs = record.provenance.get("cost_usd"), record.provenance.get("repairs")
        self.cost_usd += usd if isinstance(usd, int | float) else 0.0
        for kind, count in repairs.items() if isinstance(repairs, dict) else ():
            if isinstance(count, int):
                _count(self.repairs, str(kind), count)

    def _duplicates(self, record: Record) -> None:
        question = _mark(" ".join(record.question.split()).casefold())
        self.same_question += question in self._questions
        self._questions.add(question)
        text = _mark(f"{question} {record.text}")
        self.same_text += text in self._texts
        self._texts.add(text)

    def _sample(self, record: Record) -> None:
        """Reservoir sampling (Vitter 1985, algorithm R)."""
        if len(self.shown) < self.samples:
            self.shown.append(record)
        elif (place := self._random.randrange(self.rows)) < self.samples:
            self.shown[place] = record


def answer_type(parts: tuple[str, ...]) -> str:
    """Return the kind of a final answer, by its form."""
    if not parts:
        return "none"
    if len(parts) > 1:
        return "several"
    text = parts[0].strip()
    words = text.split()
    if _YEAR.fullmatch(text):
        return "year"
    if _NUMBER.fullmatch(text):
        return "number"
    if text.casefold().rstrip(".") in ("yes", "no", "true", "false"):
        return "yes or no"
    if "\n" in text:
        return "program or text of several lines"
    if "\\" in text or "^" in text:
        return "formula"
    if len(text) < 40 and _DATE.fullmatch(text):
        return "date"
    if len(words) <= _NAME_WORDS and words[0][:1].isupper() and words[-1][:1].isupper():
        return "name"
    return "phrase" if len(words) <= _PHRASE_WORDS else "sentence"


def _count(counter: Counter[str], name: str, count: int = 1) -> None:
    """Count a name from the data. Only the first names have a count of their own, so that memory stays bounded."""
    counter[name[:120] if name[:120] in counter or len(counter) < _MOST_NAMES else _OTHER] += count


def _mark(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@lru_cache(maxsize=64)
def shipped_agent(name: str) -> AgentSpec | None:
    """Return the shipped agent of that name. Rows may hold any name, even a path, so no other file is opened."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return None
    try:
        return load_agent(name)
    except ConfigError:
        return None


_MOST_BARS = 24


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a distribution. ``width`` is its share of the longest bar."""

    label: str
    count: int
    share: float
    width: float


@dataclass(frozen=True, slots=True)
class Chart:
    """One distribution. ``note`` has its median and mean, or what is counted."""

    title: str
    note: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class FunnelStage:
    """How many rows a filter stage dropped and kept. ``width`` is the share that it kept."""

    name: str
    dropped: int
    left: int
    width: float


def write_data_report(
    stats: DataStats,
    path: str | Path,
    *,
    title: str,
    funnels: Mapping[str, Sequence[FunnelStage]],
    agent: AgentSpec | None = None,
) -> Path:
    """Write the page. ``path`` is replaced once it is complete. Text of the data is escaped: nothing can run or load."""
    samples = [(record, blocks_of(record, agent or shipped_agent(record.agent))) for record in stats.shown]
    specs = [agent] if agent else [spec for name in stats.agents if (spec := shipped_agent(name)) is not None]
    page = template("data.html.j2", percent=percent, number=number, dollars=dollars, plural=plural)
    html = page.render(
        title=title,
        stats=stats,
        charts=charts(stats),
        funnels=funnels,
        samples=samples,
        colours=role_colours(specs[0]) if len(specs) == 1 else {},
    )
    target = Path(path)
    write_page(target, visible(html))
    return target


def charts(stats: DataStats) -> list[Chart]:
    """Return every distribution that is not empty."""
    length = f"characters written by the agent; {_middle(stats.characters, 100)}"
    repeats = f"calls; {stats.repeated_calls} repeat an earlier call of their row"
    rows = (
        ("Agent", "rows", named(stats.agents)),
        ("Source of the question", "rows", named(stats.sources)),
        ("Teacher", "rows", named(stats.models)),
        ("Length", length, binned(stats.characters, 100)),
        ("Steps", _middle(stats.steps), binned(stats.steps)),
        ("Tool calls per row", _middle(stats.calls), binned(stats.calls)),
        ("Hops", f"facts that the question needs; {_middle(stats.hops)}", binned(stats.hops)),
        ("Tools", repeats, named(stats.tools)),
        ("Tool calls that failed", "calls", named(stats.tool_failures)),
        ("Roles", "steps", named(stats.roles)),
        ("Rows with the role", "rows", named(stats.with_role, of=stats.rows)),
        ("Final answer", "rows, by the form of the answer", named(stats.answers)),
        ("Dropped rows in these files", "rows, by reason", named(stats.reasons)),
        ("Repaired faults", "repairs, by kind", named(stats.repairs)),
    )
    return [Chart(title, note, bars) for title, note, bars in rows if bars]


def named(counts: Counter[str], of: int | None = None) -> list[Bar]:
    """Return bars of names, the most frequent first. Shares are of ``of``, or of all."""
    total, top = of or counts.total(), max(counts.values(), default=1)
    bars = [Bar(name, n, n / max(1, total), n / top) for name, n in counts.most_common(_MOST_BARS)]
    if rest := sum(n for _, n in counts.most_common()[_MOST_BARS:]):
        bars.append(Bar("all others", rest, rest / max(1, total), min(1.0, rest / top)))
    return bars


def binned(histogram: Histogram, scale: int = 1) -> list[Bar]:
    """Return bars of values in bins of equal width, as narrow as the page allows.

    Args:
        scale: Size of a unit. With scale 100, the value 3 stands for 201 to 300.
    """
    if not histogram:
        return []
    low, high = min(histogram), max(histogram)
    width = -(-(high - low + 1) // _MOST_BARS)
    bins: Counter[int] = Counter()
    for value, count in histogram.items():
        bins[(value - low) // width] += count
    top = max(bins.values())
    bars = []
    for place in range(max(bins) + 1):
        first, last = low + place * width, low + (place + 1) * width - 1
        low_end = first if scale == 1 else max(0, (first - 1) * scale + 1)
        label = str(first) if low_end == last * scale else f"{low_end} to {last * scale}"
        bars.append(Bar(label, bins[place], bins[place] / histogram.total(), bins[place] / top))
    return bars


def _middle(histogram: Histogram, scale: int = 1) -> str:
    tenth, half, most = (scale * histogram.quantile(share) for share in (0.1, 0.5, 0.9))
    return f"median {half}, 80 % between {tenth} and {most}, mean {number(scale * histogram.mean)}"
