"""A gateway's log as trajectories: each task's calls merged into one, or dropped with the reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.gateway_log import BadLines, RecordedCall, read_calls
from afm.distill.reconstruct import merge_calls, task_of
from afm.distill.run import DROPPED_FILE, KEPT_FILE, MANIFEST_FILE
from afm.distill.team_map import TeamMap
from afm.runs.atomic import replace_text, replacing
from afm.runs.folder import write_manifest
from afm.trajectory.io import RecordWriter
from afm.trajectory.record import Record, StopReason

UNREADABLE_FILE = "unreadable.jsonl"
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Merged:
    """What a log became.

    Attributes:
        kept: Trajectories that the agent's rules accept, in ``path``.
        dropped: Attempts by reason, without the places in it.
        missing: Tasks without a call in the log.
        cost_usd: Of all calls, those of dropped attempts included.
        unreadable: Lines of the log that could not be read, listed in ``unreadable.jsonl`` beside ``path``.
    """

    path: Path
    kept: int
    dropped: Mapping[str, int]
    missing: int
    cost_usd: float
    unreadable: int = 0


def merge_gateway_log(
    log: Path,
    tasks: Iterable[Task],
    spec: AgentSpec,
    team: TeamMap,
    out: Path,
    *,
    name: str = "",
    drop_bad_lines: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Write ``trajectories.jsonl``, ``dropped.jsonl`` and ``manifest.json`` into ``out``; each appears whole.

    Of several attempts at a task the last one counts.

    Args:
        drop_bad_lines: Skip lines that cannot be read. ``unreadable.jsonl`` lists them with number and error, and attempts that may
            have lost a call are dropped.

    Raises:
        DataError: A line of the log cannot be read and ``drop_bad_lines`` is not set, or no gateway wrote the log.
    """
    bad = BadLines() if drop_bad_lines else None
    known = {task.id: task for task in tasks}
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    cost = 0.0
    with (
        replacing(out / KEPT_FILE) as kept_path,
        replacing(out / DROPPED_FILE) as dropped_path,
        RecordWriter(kept_path) as kept,
        RecordWriter(dropped_path) as dropped,
    ):
        for number, record in enumerate(_records(log, known, spec, team, name, bad), 1):
            cost += record.provenance.get("cost_usd", 0.0)
            seen.add(record.id)
            counts["" if record.kept else _kind(record.reason)] += 1
            (kept if record.kept else dropped).write(record)
            if progress is not None:
                progress("merge", number, None)
    merged = Merged(
        path=out / KEPT_FILE,
        kept=counts.pop("", 0),
        dropped=dict(counts),
        missing=len(known.keys() - seen),
        cost_usd=round(cost, 6),
        unreadable=_listed(log, bad, out / UNREADABLE_FILE),
    )
    _write_manifest(merged, log, out, spec, team, name)
    return merged


def _write_manifest(merged: Merged, log: Path, out: Path, spec: AgentSpec, team: TeamMap, name: str) -> None:
    write_manifest(
        out / MANIFEST_FILE,
        counts={
            "kept": merged.kept,
            "dropped": sum(merged.dropped.values()),
            "tasks_without_calls": merged.missing,
            **({"unreadable_lines": merged.unreadable} if merged.unreadable else {}),
        },
        inputs=[log],
        spec=spec,
        team=name,
        map=team.model_dump(mode="json", exclude_defaults=True),
        dropped=merged.dropped,
        cost_usd=merged.cost_usd,
    )


def _records(
    log: Path, tasks: Mapping[str, Task], spec: AgentSpec, team: TeamMap, name: str, bad: BadLines | None
) -> Iterator[Record]:
    merged: set[str] = set()
    for calls in read_calls(log, last_only=True, bad=bad):
        task = task_of(calls, tasks)
        if task is None:
            yield _refused(calls, spec, "no task of this name among the tasks")
        elif task.id in merged:
            yield _refused(calls, spec, "its task has a trajectory already", task)
        elif bad is not None and bad.spoil((calls[0].event.task_id, calls[0].event.attempt)):
            yield _refused(calls, spec, "lines of its last attempt cannot be read", task)
        else:
            merged.add(task.id)
            yield merge_calls(calls, task, spec, team, name=name)


def _listed(log: Path, bad: BadLines | None, out: Path) -> int:
    """Write the bad lines into a file, which is there only if there are any; returns how many."""
    if bad is None or not bad.lines:
        out.unlink(missing_ok=True)
        return 0
    rows = (
        {"path": str(log), "line": line.number, "error": line.error, "text": line.text}
        for line in sorted(bad.lines, key=lambda line: line.number)
    )
    replace_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(bad.lines)


def _refused(
    calls: tuple[RecordedCall, ...], spec: AgentSpec, reason: str, task: Task | None = None
) -> Record:
    cost = sum(call.event.cost_usd for call in calls)
    return Record(
        id=calls[0].event.task_id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=task.question if task else "",
        segments=(),
        stop=StopReason.ERROR,
        provenance={"attempt": calls[0].event.attempt, "cost_usd": round(cost, 6)},
        kept=False,
        reason=reason,
    )


def _kind(reason: str) -> str:
    """A reason without the event in front of it and the place behind."""
    words = reason.partition(": ")[2] if reason.startswith("event ") else reason
    return words.partition(" at character ")[0]
