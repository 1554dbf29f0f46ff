"""What a report shows, as data: whoever fills a :class:`ReportInput` gets a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.beside import BenchmarkNote
from afm.evaluation.charts import Curve
from afm.evaluation.health import Aspect
from afm.evaluation.links import ViewLinks
from afm.evaluation.metrics import Metrics
from afm.evaluation.paired import PairedDifference
from afm.evaluation.savings import Savings
from afm.evaluation.scan import Scan
from afm.trajectory.record import Record


@dataclass(frozen=True, slots=True)
class StageResult:
    """One evaluated stage.

    Attributes:
        name: What a reader calls it: ``after SFT``.
        episodes: Its episodes file, if it is there.
        note: A remark under the name: model, benchmark, rounds.
        scan: What only its episodes tell.
        published: Published scores beside its own, where it is of a published benchmark.
        own_prompt: Whether its questions were asked in the agent's own prompt, which a page can show.
    """

    name: str
    metrics: Metrics
    episodes: Path | None = None
    note: str = ""
    scan: Scan | None = None
    published: BenchmarkNote | None = None
    own_prompt: bool = True


@dataclass(frozen=True, slots=True)
class StageDifference:
    """The paired difference between two stages.

    Attributes:
        caveats: Why the two may not be comparable, a sentence each.
        prices: A sentence where their money is counted by other prices.
    """

    before: str
    after: str
    result: PairedDifference
    caveats: tuple[str, ...] = ()
    prices: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Episodes on one question, by the name of their stage, shown side by side.

    Attributes:
        spec: Their agent, where it is another than the report's.
    """

    title: str
    episodes: tuple[tuple[str, Record], ...]
    spec: AgentSpec | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of "what was run"."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to try, and what it does."""

    line: str
    purpose: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Everything a report shows; empty parts are left out of the page.

    Attributes:
        kind: What the page is called above its title.
        spec: The agent, of several the first; without it trajectories are shown by author only.
        agents: All of them, where rows chose theirs.
        tool_story: Names of the stages before and after learning when to use the tool; the page then
            explains why fine-tuning left room.
        differences: Between two stages each, all of them from the same one.
        savings: Of models against teams, where some of the stages were played by teams.
        notes: What is missing or was left out, a sentence each.
        links: Into the viewer.
    """

    title: str
    kind: str = "Run report"
    spec: AgentSpec | None = None
    agents: Agents | None = None
    facts: tuple[Fact, ...] = ()
    stages: tuple[StageResult, ...] = ()
    differences: tuple[StageDifference, ...] = ()
    savings: tuple[Savings, ...] = ()
    tool_story: tuple[str, str] | None = None
    curves: tuple[Curve, ...] = ()
    health: tuple[Aspect, ...] = ()
    pairs: tuple[Pair, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    links: ViewLinks | None = None

    def stage(self, name: str) -> StageResult:
        """The stage called ``name``."""
        return next(stage for stage in self.stages if stage.name == name)
