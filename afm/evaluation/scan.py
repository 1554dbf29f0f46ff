"""One pass over an evaluation's episodes for what its metrics do not keep: failures, and what solved ones cost."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.failures import FailureGroup, FailureTally
from afm.evaluation.metrics import passed
from afm.rewards.judge import NO_JUDGE
from afm.trajectory.record import Record
from afm.trajectory.sealing import opened

_POINTS = 200


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass found.

    Attributes:
        failures: Classes of episodes that did not pass.
        tokens: Of budgets, rising: agent and observation tokens of one episode.
        solved: Share of all scored episodes that passed within each budget.
        unjudged: Episodes in which exact match stood in for the model judge.
    """

    failures: tuple[FailureGroup, ...]
    tokens: tuple[float, ...] = ()
    solved: tuple[float, ...] = ()
    unjudged: int = 0


def scan(records: Iterable[Record], spec: AgentSpec | Agents | None) -> Scan:
    """Read ``records`` once, as they stand in the file."""
    failures, spent = FailureTally(spec), array("d")
    scored = unjudged = 0
    for record in records:
        failures.add(record)
        outcome = passed(record)
        if outcome is None:
            continue
        scored += 1
        unjudged += _stood_in(record)
        if outcome:
            spent.append(record.cost.agent_tokens + record.cost.observation_tokens)
    tokens, solved = _within(sorted(spent), scored)
    return Scan(failures.groups(), tokens, solved, unjudged)


def _stood_in(record: Record) -> bool:
    verdict = opened(record).verdict
    return verdict is not None and NO_JUDGE in verdict.evidence


def _within(spent: list[float], scored: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Budgets and shares, at most ``_POINTS`` of them; nothing where no tokens were counted."""
    if not spent or not spent[-1]:
        return (), ()
    places = sorted({round(step * (len(spent) - 1) / (_POINTS - 1)) for step in range(_POINTS)})
    by_budget = {spent[place]: (place + 1) / scored for place in places}
    return tuple(by_budget), tuple(by_budget.values())
