"""Which episodes a report shows: the first of each kind in the file, so that nobody picked the nice ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from afm.evaluation.metrics import passed, task_of
from afm.evaluation.report_input import Pair
from afm.trajectory.record import Record

Reader = Callable[[], Iterable[Record]]
"""Reads the episodes of a stage from the beginning."""


@dataclass(frozen=True, slots=True)
class _Glance:
    """What the choice needs of the first scored episode of a question."""

    id: str
    question: str
    passed: bool
    tool_calls: int


def pick_pairs(before: tuple[str, Reader], after: tuple[str, Reader], *, count: int = 3) -> list[Pair]:
    """Questions that went differently, each as a pair: one gained, one as before, one not solved after."""
    first, second = _glances(before[1]()), _glances(after[1]())
    common = [
        (first[task], second[task])
        for task in sorted(first.keys() & second.keys())
        if first[task].question == second[task].question
    ]
    chosen = _choose(common, _kinds(before[0], after[0]), count)
    old_records = _load(before[1](), {old.id for _, old, _ in chosen})
    new_records = _load(after[1](), {new.id for _, _, new in chosen})
    return [
        Pair(title, ((before[0], old_records[old.id]), (after[0], new_records[new.id])))
        for title, old, new in chosen
    ]


def _kinds(before: str, after: str) -> list[tuple[str, Callable[[_Glance, _Glance], bool]]]:
    return [
        (
            f"Solved {after}, with the tool it did not use {before}",
            lambda old, new: not old.passed and new.passed and old.tool_calls == 0 < new.tool_calls,
        ),
        (f"Solved {before} and {after}", lambda old, new: old.passed and new.passed),
        (f"Solved {before}, no longer {after}", lambda old, new: old.passed and not new.passed),
        (f"Not solved {before}, nor {after}", lambda old, new: not old.passed and not new.passed),
        (f"Solved {after}, not {before}", lambda old, new: not old.passed and new.passed),
    ]


def _choose(
    pairs: Sequence[tuple[_Glance, _Glance]],
    kinds: Sequence[tuple[str, Callable[[_Glance, _Glance], bool]]],
    count: int,
) -> list[tuple[str, _Glance, _Glance]]:
    """The first pair of every kind, then the second of every kind, until there are ``count``."""
    chosen: list[tuple[str, _Glance, _Glance]] = []
    taken: set[str] = set()
    for title, fits in [kind for _ in range(count) for kind in kinds]:
        found = next((pair for pair in pairs if pair[0].id not in taken and fits(*pair)), None)
        if found is not None and len(chosen) < count:
            taken.add(found[0].id)
            chosen.append((title, *found))
    return chosen


def pick_episodes(name: str, read: Reader, *, count: int = 3) -> Iterator[Pair]:
    """Single episodes: one passed, one not passed, one without a score, then whatever comes first."""
    first: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    titles = {True: "Passed", False: "Not passed", None: "Without a score"}
    for record in read():
        outcome = passed(record)
        if len(first[outcome]) < count:
            first[outcome].append(record.id)
    ranked = sorted(
        (rank, number, identity, titles[outcome])
        for number, (outcome, ids) in enumerate(first.items())
        for rank, identity in enumerate(ids)
    )
    chosen = ranked[:count]
    records = _load(read(), {identity for _, _, identity, _ in chosen})
    for _, _, identity, title in chosen:
        yield Pair(f"{title}, {name}", ((name, records[identity]),))


def _glances(records: Iterable[Record]) -> dict[str, _Glance]:
    """By task, of its episode with the smallest id, so that the order in the file does not matter."""
    found: dict[str, _Glance] = {}
    for record in records:
        outcome = passed(record)
        task = task_of(record)
        if outcome is None or (task in found and found[task].id <= record.id):
            continue
        found[task] = _Glance(record.id, record.question, outcome, record.cost.tool_calls)
    return found


def _load(records: Iterable[Record], ids: set[str]) -> dict[str, Record]:
    return {record.id: record for record in records if record.id in ids}
