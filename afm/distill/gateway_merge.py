"""A gateway's log as trajectories: each task's calls merged into one, or dropped with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.datasets.atomic import replacing
from afm.datasets.manifest import write_manifest
from afm.distill.gateway import RecordedCall, read_calls
from afm.distill.reconstruct import merge_calls, task_of
from afm.distill.run import DROPPED_FILE, KEPT_FILE, MANIFEST_FILE
from afm.distill.team_map import TeamMap
from afm.trajectory.io import RecordWriter
from afm.trajectory.record import Record, StopReason

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Merged:
    """What a log became.

    Attributes:
        kept: Trajectories that the agent's rules accept, in ``path``.
        dropped: Attempts by reason, without the places in it.
        missing: Tasks without a call in the log.
        cost_usd: Of all calls, those of dropped attempts included.
    """

    path: Path
    kept: int
    dropped: Mapping[str, int]
    missing: int
    cost_usd: float


def merge_gateway_log(
    log: Path,
    tasks: Iterable[Task],
    spec: AgentSpec,
    team: TeamMap,
    out: Path,
    *,
    name: str = "",
    progress: Progress | None = None,
) -> Merged:
    """Write ``trajectories.jsonl``, ``dropped.jsonl`` and ``manifest.json`` into ``out``; each appears whole.

    Of several attempts at a task the last one counts.

    Raises:
        DataError: The log cannot be read, or is no gateway's.
    """
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
        for number, record in enumerate(_records(log, known, spec, team, name), 1):
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
    )
    write_manifest(
        out / MANIFEST_FILE,
        counts={"kept": merged.kept, "dropped": sum(counts.values()), "tasks_without_calls": merged.missing},
        inputs=[log],
        spec=spec,
        team=name,
        map=team.model_dump(mode="json", exclude_defaults=True),
        dropped=merged.dropped,
        cost_usd=merged.cost_usd,
    )
    return merged


def _records(
    log: Path, tasks: Mapping[str, Task], spec: AgentSpec, team: TeamMap, name: str
) -> Iterator[Record]:
    merged: set[str] = set()
    for calls in read_calls(log, last_only=True):
        task = task_of(calls, tasks)
        if task is None:
            yield _refused(calls, spec, "no task of this name among the tasks")
        elif task.id in merged:
            yield _refused(calls, spec, "its task has a trajectory already", task)
        else:
            merged.add(task.id)
            yield merge_calls(calls, task, spec, team, name=name)


def _refused(
    calls: tuple[RecordedCall, ...], spec: AgentSpec, reason: str, task: Task | None = None
) -> Record:
    cost = sum(found.event.cost_usd for found in calls)
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
