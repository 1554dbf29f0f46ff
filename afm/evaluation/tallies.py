"""Counts over single episodes, for :mod:`afm.evaluation.metrics`.

They are T-Eval's abilities, majority votes, best-of-k, invented tools, and arguments of unseen tools.

Agent-FLAN (arXiv 2403.12881): :class:`AgentHTally` is the paper's measure, on questions of its benchmark's form.
:class:`HallucinationTally` counts calls of tools that were not offered, in the episodes of any evaluation. Compare its
figures between runs of this project only, not with the paper's.

AFM (arXiv 2508.13167) gives trained agents further tools only in the prompt. Its code agent keeps their formats,
but its web agent breaks those in JSON. A YAML declares the unseen tools and the form of each argument.
:class:`ArgumentTally` counts the share of their calls with another form. The answer of the tool does not matter.
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
    """Return the score of each measured ability, the mean of its forms (JSON and text), and ``overall``, the mean of all six.

    If abilities are missing, their mean is called ``mean``, because it is not the published figure.
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
    """The answer of one round, empty without one, and whether it passed."""

    round: int
    answer: str
    passed: bool


class VoteTally:
    """Collects the answers of all rounds. The agents declare where answers are."""

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
        """Return the share of questions whose chosen round passed, ``None`` without questions."""
        chosen = [majority(votes).passed for votes in self._votes.values()]
        return sum(chosen) / len(chosen) if chosen else None


def majority(votes: Sequence[Vote]) -> Vote:
    """Return the first round with the most frequent answer. If several are equally frequent, the earliest counts.

    Rounds without an answer do not vote, unless no round has an answer. Exact match decides which answers are equal.
    """
    ordered = sorted(votes)
    counts = Counter(vote.answer for vote in ordered if vote.answer)
    if not counts:
        return ordered[0]
    most = max(counts.values())
    return next(vote for vote in ordered if counts[vote.answer] == most)


class Method(StrEnum):
    """How a judge chooses."""

    LIST = "list"
    """The judge sees k episodes side by side and names one."""
    SCORE = "score"
    """The judge grades each episode separately. The best grade wins."""


class BestOf(Settings):
    """best-of-k of one run by one judge."""

    method: Method
    k: int
    judge: str
    share: Interval | None
    """Share of questions whose chosen episode passes, with a bootstrap interval over questions."""
    questions: int
    """Number of questions that count: those with k scored episodes and a choice."""
    abstained: int = 0
    """Number of choices (``list``) or grades (``score``) that the judge failed to give. Their questions do not
    count."""
    asked: int = 0
    settled: int = 0
    """Number that needed no judge: no answers, one answer, or equal answers."""
    places: dict[int, float] = Field(default_factory=dict)
    """Share of choices by position in the list. Without a bias all are 1 / k."""

    @property
    def name(self) -> str:
        """Name in reports: ``best-of-3 (list)``."""
        return f"best-of-{self.k} ({self.method})"


def best_of_k(graded: Sequence[tuple[float, bool]], k: int) -> float:
    """Return the chance that the best graded of k episodes passes, over all subsets of size k.

    Args:
        graded: Grade and outcome of each of n >= k episodes.

    The episode at position i of n, best grade first, is the best of C(n-1-i, k-1) of the C(n, k) subsets. Ties are
    broken at random, so each tied episode counts as their mean outcome.
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
        """Return the share of episodes with a call of an invented tool, and the share of these calls in all calls.

        ``tool_format_without_tool`` is the former if no agent has a tool. Shares are ``None`` without episodes or calls.
        """
        with_tools = any(spec.tool_roles for spec in self.agents.specs.values())
        invented = self.with_invented / self.episodes if self.episodes else None
        return {
            "tool_format_without_tool": None if with_tools else invented,
            "invented_tool": invented,
            "invented_tool_calls": self.invented_calls / self.calls if self.calls else None,
        }


AGENT_H = "agent_h_"
"""Prefix of the data sources of Agent-H. They end with the circumstance."""
_NEEDED = f"{AGENT_H}given_asked"


@dataclass
class AgentHTally:
    """Counts replies to questions of Agent-H."""

    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count one episode with a verdict. Episodes of other data are skipped."""
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
        """Return shares from 0 to 1, empty if nothing was counted.

        ``h_react`` and ``h_general`` are the shares of replies with a keyword of that kind, over the questions whose
        expected reply is plain text (equation 1 of the paper). ``h_score`` is the mean of 1 minus each. ``invented_tool`` is
        the share of these replies that call a tool that was not offered. ``called_when_asked`` is over the questions that
        need an offered tool.
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
    """The required form of an argument."""

    TEXT = "text"
    """One line that is neither JSON nor fenced."""
    URLS = "urls"
    """Full URLs, separated by ``|``."""
    JSON = "json"
    """One object in a ``json`` fence."""
    PROGRAM = "program"
    """A ``py`` fence, optionally with an ``sh`` fence."""


class UnseenTool(Settings):
    """A tool that the agent was not trained with."""

    form: ArgumentForm
    required: tuple[str, ...] = ()
    """Required keys of a JSON argument. Their values are texts."""
    optional: tuple[str, ...] = ()
    """Further keys that are allowed. Any other key breaks the form."""

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
    """Counts calls of unseen tools, and calls with an argument of another form, by role."""

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
        """Return the share of calls with another form, by role and under ``all``. Empty without calls."""
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
