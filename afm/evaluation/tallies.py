"""Counts that single episodes go into, which :mod:`afm.evaluation.metrics` puts together.

T-Eval's abilities, majority votes, best-of-k, tools that are not there, and arguments of unseen tools.

Agent-FLAN (arXiv 2403.12881): :class:`AgentHTally` is the paper's measure, on questions of its benchmark's form.
:class:`HallucinationTally` counts calls of tools that were not offered, in the episodes of any evaluation. Compare its
figures between runs of this project only, not with the paper's.

AFM (arXiv 2508.13167) gives trained agents further tools in the prompt alone. Its code agent keeps their formats,
but its web agent breaks those in JSON. A YAML declares the unseen tools and the form of each argument.
:class:`ArgumentTally` counts the share of their calls whose argument breaks that form. The tool's answer does not
matter.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import Field, model_validator

from afm.configuration import Settings
from afm.errors import DataError
from afm.evaluation.agents import Agents
from afm.evaluation.statistics import Interval
from afm.rewards.text_match import comparable
from afm.rewards.tool_use import tool_talk
from afm.trajectory import answers
from afm.trajectory.call_forms import written_calls
from afm.trajectory.programs import parse_program
from afm.trajectory.record import Record

ABILITIES = ("instruct", "plan", "reason", "retrieve", "understand", "review")


def t_eval_scores(by_source: Mapping[str, float]) -> dict[str, float]:
    """Score of each measured ability, the mean of its forms (JSON and text), and of all six, ``overall`` as published.

    Where abilities are missing their mean is called ``mean``, because it is another figure.
    """
    scores = {}
    for ability in ABILITIES:
        forms = [
            by_source[name] for form in ("json", "str") if (name := f"t_eval_{ability}_{form}") in by_source
        ]
        if forms:
            scores[ability] = sum(forms) / len(forms)
    name = "overall" if len(scores) == len(ABILITIES) else "mean"
    return {**scores, name: sum(scores.values()) / len(scores)} if scores else {}


@dataclass(frozen=True, slots=True, order=True)
class Vote:
    """What one round answers, empty when it has no answer; and whether it passed."""

    round: int
    answer: str
    passed: bool


class VoteTally:
    """Collects the answers of all rounds; the agents say where their answers are."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._votes: defaultdict[str, list[Vote]] = defaultdict(list)

    def add(self, task: str, record: Record, *, passed: bool) -> None:
        """Count one scored episode."""
        segments = record.segments
        parts = sorted({comparable(part) for part in answers(segments, self._agents.declared(record))})
        number = record.provenance.get("round", 0)
        self._votes[task].append(Vote(number if isinstance(number, int) else 0, " | ".join(parts), passed))

    def share(self) -> float | None:
        """Share of questions whose chosen round passed; ``None`` without questions."""
        chosen = [majority(votes).passed for votes in self._votes.values()]
        return sum(chosen) / len(chosen) if chosen else None


def majority(votes: Sequence[Vote]) -> Vote:
    """The first round that gives the most frequent answer; among equally frequent ones the one given first.

    Rounds without an answer have no vote, unless none has one. Equal is what exact match calls equal.
    """
    ordered = sorted(votes)
    counts = Counter(vote.answer for vote in ordered if vote.answer)
    if not counts:
        return ordered[0]
    most = max(counts.values())
    return next(vote for vote in ordered if counts[vote.answer] == most)


class Method(StrEnum):
    """How the judge chooses."""

    LIST = "list"
    """It sees k episodes side by side and names one."""
    SCORE = "score"
    """It grades each episode alone; the best grade wins."""


class BestOf(Settings):
    """best-of-k of one run by one judge."""

    method: Method
    k: int
    judge: str
    share: Interval | None
    """Share of questions whose chosen episode passes, with a bootstrap interval over questions."""
    questions: int
    """Those that count: with k scored episodes, and a choice."""
    abstained: int = 0
    """Choices (``list``) or grades (``score``) that the judge failed to give; their questions do not count.
    """
    asked: int = 0
    settled: int = 0
    """Those that needed no judge: no answers, one answer, or all the same one."""
    places: dict[int, float] = Field(default_factory=dict)
    """How often the judge chose each place in the list, as shares; without a bias all are 1 / k."""

    @property
    def name(self) -> str:
        """For people: ``best-of-3 (list)``."""
        return f"best-of-{self.k} ({self.method})"


def best_of_k(graded: Sequence[tuple[float, bool]], k: int) -> float:
    """Chance that the best graded of k episodes passes, over all choices of k among them.

    Args:
        graded: Grade and outcome of each of n >= k episodes.

    The episode at place i of n, best grade first, is the best of C(n-1-i, k-1) of the C(n, k) subsets. Equal grades are
    decided by lot, so each of them counts as the mean outcome of all of them.
    """
    outcomes: dict[float, list[bool]] = {}
    for grade, passed in graded:
        outcomes.setdefault(grade, []).append(passed)
    ranked = [
        sum(outcomes[grade]) / len(outcomes[grade])
        for grade in sorted(outcomes, reverse=True)
        for _ in outcomes[grade]
    ]
    count = len(ranked)
    ways = (math.comb(count - 1 - place, k - 1) * share for place, share in enumerate(ranked))
    return math.fsum(ways) / math.comb(count, k)


@dataclass
class HallucinationTally:
    """Counts episodes and calls of one agent, or of several."""

    agents: Agents
    episodes: int = 0
    calls: int = 0
    invented_calls: int = 0
    with_invented: int = 0

    def add(self, record: Record) -> None:
        """Count one episode that was played to its end."""
        agents = self.agents
        calls = written_calls(record.segments, agents.declared(record), original=agents.original(record))
        invented = sum(not call.offered for call in calls)
        self.episodes += 1
        self.calls += len(calls)
        self.invented_calls += invented
        self.with_invented += invented > 0

    def figures(self) -> dict[str, float | None]:
        """Episodes with a call of a tool that the agent does not have over all episodes, and these calls over all calls.

        ``tool_format_without_tool`` is the former where no agent has a tool. ``None`` where there was nothing to count.
        """
        with_tools = any(spec.tool_roles for spec in self.agents.specs.values())
        invented = self.with_invented / self.episodes if self.episodes else None
        return {
            "tool_format_without_tool": None if with_tools else invented,
            "invented_tool": invented,
            "invented_tool_calls": self.invented_calls / self.calls if self.calls else None,
        }


AGENT_H = "agent_h_"
"""Data sources of Agent-H begin with this and end with the circumstance."""
_NEEDED = f"{AGENT_H}given_asked"


@dataclass
class AgentHTally:
    """Counts replies to questions of Agent-H."""

    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count one episode with a verdict; those of other data are passed over."""
        if not record.data_source.startswith(AGENT_H) or record.verdict is None:
            return
        if record.data_source == _NEEDED:
            self._counts["needed"] += 1
            self._counts["called"] += record.verdict.score == 1
            return
        react, general = tool_talk(record.segments)
        self._counts["raw"] += 1
        self._counts["react"] += react
        self._counts["general"] += general
        self._counts["invented"] += record.verdict.parts.get("format") == 0

    def figures(self) -> dict[str, float]:
        """Shares, 0 to 1; empty where nothing was counted.

        ``h_react`` and ``h_general`` count replies with such a keyword, over the questions whose expected reply is plain
        text (equation 1 of the paper). ``h_score`` is the mean of what is left of both. ``invented_tool`` counts replies of
        these that call a tool that is not given. ``called_when_asked`` is over the questions that need a given tool.
        """
        count, figures = self._counts, {}
        if raw := count["raw"]:
            react, general = count["react"] / raw, count["general"] / raw
            figures = {"h_react": react, "h_general": general, "h_score": ((1 - react) + (1 - general)) / 2}
            figures["invented_tool"] = count["invented"] / raw
        if needed := count["needed"]:
            figures["called_when_asked"] = count["called"] / needed
        return figures


_FENCE = re.compile(r"\s*```\s*json\s*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_ADDRESS = re.compile(r"https?://[^\s|]+")


class ArgumentForm(StrEnum):
    """What an argument has to be."""

    TEXT = "text"
    """One line that is neither JSON nor fenced."""
    URLS = "urls"
    """Full addresses, separated by ``|``."""
    JSON = "json"
    """One object in a ``json`` fence."""
    PROGRAM = "program"
    """A ``py`` fence, perhaps with an ``sh`` fence."""


class UnseenTool(Settings):
    """A tool that the agent was not trained with."""

    form: ArgumentForm
    required: tuple[str, ...] = ()
    """Keys of a JSON argument that hold a text."""
    optional: tuple[str, ...] = ()
    """Further keys it may have; any other breaks the form."""

    @model_validator(mode="after")
    def _check(self) -> UnseenTool:
        if (self.required or self.optional) and self.form is not ArgumentForm.JSON:
            raise ValueError("keys only for form: json")
        return self

    def accepts(self, argument: str) -> bool:
        """Whether ``argument``, the raw text between the tool's tags, has the form."""
        match self.form:
            case ArgumentForm.TEXT:
                text = argument.strip()
                return bool(text) and "\n" not in text and not text.startswith(("{", "[{", "```"))
            case ArgumentForm.URLS:
                return all(_ADDRESS.fullmatch(part.strip()) for part in argument.split("|"))
            case ArgumentForm.JSON:
                return self._is_object(argument)
            case ArgumentForm.PROGRAM:
                return _is_program(argument)

    def _is_object(self, argument: str) -> bool:
        fenced = _FENCE.fullmatch(argument)
        if fenced is None:
            return False
        try:
            value = json.loads(fenced[1])
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict) or not set(self.required) <= set(value):
            return False
        known = {*self.required, *self.optional}
        return (not known or set(value) <= known) and all(
            isinstance(value[key], str) for key in self.required
        )


@dataclass
class ArgumentTally:
    """Counts calls of unseen tools, and those that break the form of the argument, by role."""

    tools: Mapping[str, UnseenTool]
    calls: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count the calls of one episode."""
        for call in record.calls:
            if (tool := self.tools.get(call.role)) is not None:
                self.calls[call.role] += 1
                self.broken[call.role] += not tool.accepts(call.argument)

    def shares(self) -> dict[str, float]:
        """Broken calls over all calls, by role and over all under ``all``; empty when there was no call."""
        if not self.calls:
            return {}
        by_role = {role: self.broken[role] / count for role, count in sorted(self.calls.items())}
        return {"all": self.broken.total() / self.calls.total(), **by_role}


def _is_program(argument: str) -> bool:
    try:
        parse_program(argument)
    except DataError:
        return False
    return True
