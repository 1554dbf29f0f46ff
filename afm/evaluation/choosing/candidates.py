"""The episodes that a judge chooses among."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.metrics import passed, task_of
from afm.evaluation.settings import BestOfSettings
from afm.rewards.exact_match import comparable
from afm.trajectory import answers
from afm.trajectory.record import Record
from afm.trajectory.sealing import opened
from afm.trajectory.types import Segment


@dataclass(frozen=True, slots=True)
class Candidate:
    """One scored episode of a question.

    Attributes:
        answer: Cut at the end; empty without one.
        flat: The whole answer as exact match compares it.
        work: The end of its trajectory.
        passed: What the judge does not know.
    """

    round: int
    answer: str
    flat: str
    work: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its scored episodes in the order of their rounds.

    Attributes:
        sealed: Whether nothing of it may be written to disk in plain form.
    """

    task: str
    text: str
    candidates: tuple[Candidate, ...]
    sealed: bool = False

    def groups(self, k: int) -> Iterator[tuple[Candidate, ...]]:
        """Disjoint groups of ``k`` candidates; a rest of fewer is left out."""
        for start in range(0, len(self.candidates) - k + 1, k):
            yield self.candidates[start : start + k]


def questions_of(records: Iterable[Record], agents: Agents, settings: BestOfSettings) -> list[Question]:
    """The questions of an evaluation, by task; what is shown of their episodes is held in memory, and nothing else."""
    candidates: dict[str, list[Candidate]] = {}
    texts: dict[str, tuple[str, bool]] = {}
    for written in records:
        record, outcome = opened(written), passed(written)
        if outcome is None:
            continue
        task = task_of(record)
        texts[task] = (record.question, record is not written)
        candidates.setdefault(task, []).append(
            _candidate(record, agents.declared(record), settings, passed=outcome)
        )
    return [
        Question(task, texts[task][0], tuple(sorted(found, key=lambda one: one.round)), texts[task][1])
        for task, found in sorted(candidates.items())
    ]


def settled(group: Sequence[Candidate]) -> Candidate | None:
    """The choice that needs no judge: the first where all answer alike or nothing, the only one with an answer."""
    given = [one for one in group if one.answer]
    if len({one.flat for one in given}) > 1:
        return None
    return given[0] if given else group[0]


def shuffled(group: Sequence[Candidate], task: str, seed: int) -> list[Candidate]:
    """The candidates with an answer in an order that depends on question, rounds and seed only."""
    given = [one for one in group if one.answer]
    name = f"{seed}\0{task}\0{','.join(str(one.round) for one in given)}"
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    random.Random(digest).shuffle(given)
    return given


def _candidate(record: Record, spec: AgentSpec, settings: BestOfSettings, *, passed: bool) -> Candidate:
    given = answers([Segment(part.author, part.text) for part in record.segments], spec)
    number = _provenance(record.provenance)
    work = record.text[-settings.work_chars :] if settings.work_chars else ""
    if len(work) < len(record.text) and work:
        work = f"[earlier work left out] {work}"
    return Candidate(
        number,
        " | ".join(given)[: settings.max_answer_chars],
        " | ".join(sorted({comparable(part) for part in given})),
        work,
        passed,
    )


def _provenance(told: Mapping[str, object]) -> int:
    number = told.get("round", 0)
    return number if isinstance(number, int) else 0
