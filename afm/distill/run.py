"""Distillation: :func:`collect` lets a team work. :func:`distill` also merges its log and filters the result."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.event_log import EventLog, Recorder
from afm.distill.filters.base import Filter, Funnel, run_filters
from afm.distill.filters.quality import QualityFilter
from afm.distill.filters.rules import FormatFilter
from afm.distill.merge import RoleMap, merge_log
from afm.endpoints.budget import Spent
from afm.errors import (
    BudgetSpentError,
    ConfigError,
    DataError,
    EngineError,
    SandboxUnavailableError,
    ToolError,
)
from afm.play import work_in_parallel
from afm.rewards import load_reward
from afm.runs.atomic import replacing
from afm.runs.folder import RunFolder, write_manifest
from afm.tools import Tool
from afm.tools.registry import readers_among
from afm.trajectory.io import RecordWriter
from afm.trajectory.record import Record

_FAILURES_BEFORE_JUDGEMENT = 20


class Team(Protocol):
    """A team of agents that solves tasks, either scripted or with models."""

    @property
    def name(self) -> str:
        """Identifies the team in logs and manifests."""
        ...

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task`` until ``recorder.finish``, ``recorder.fail`` or ``recorder.decline``.

        Raises:
            ToolError, EngineError: Infrastructure failed. The attempt is logged as failed.
        """
        ...


class TeamWithRoles(Team, Protocol):
    """A team that defines which role of the agent each member plays."""

    @property
    def roles(self) -> RoleMap:
        """The roles.

        Raises:
            ConfigError: The agent's roles do not suit the team.
        """
        ...


Progress = Callable[[str, int, int | None], None]
"""Receives the stage (``team`` or ``filter``), rows done and total rows (``None`` if unknown)."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Task counts of one run of a team.

    Attributes:
        resumed: Tasks that the log holds as finished or declined.
        failed: Tasks without an answer. The next run tries them again.
        declined: Tasks that the team cannot read or rejects. No run tries them again.
        stopped: Why the run ended before its last task. Empty if it did not.
    """

    finished: int = 0
    resumed: int = 0
    failed: int = 0
    declined: int = 0
    stopped: str = ""

    @property
    def tasks(self) -> int:
        """The sum of all counts."""
        return self.finished + self.resumed + self.failed + self.declined


async def collect(
    tasks: Iterable[Task],
    team: Team,
    tools: Mapping[str, Tool],
    log: EventLog,
    *,
    max_parallel: int = 4,
    max_failed_share: float = 0.2,
    progress: Progress | None = None,
) -> Collected:
    """Let ``team`` work on every task that is not finished in ``log``, ``max_parallel`` at a time.

    When the team's budget is spent, no further task begins and running tasks end. The result holds the reason.

    Args:
        tasks: Read one by one. The log keeps their order as the position.
        progress: Called after each task from the first one that is not resumed. It counts resumed ones, too.

    Raises:
        DataError: Two tasks have the same id.
        EngineError: More than ``max_failed_share`` of the attempted tasks failed. Checked from the 20th failure on.
        SandboxUnavailableError: Code cannot be run here at all.
    """
    counts: Counter[str] = Counter()
    total = len(tasks) if isinstance(tasks, Sequence) else None
    stopped = ""

    def open_tasks() -> Iterator[tuple[int, Task]]:
        for job in enumerate(distinct_tasks(tasks)):
            if stopped:
                return
            yield job

    async def work(job: tuple[int, Task]) -> None:
        nonlocal stopped
        position, task = job
        if task.id in log.finished:
            counts["resumed"] += 1
        else:
            recorder, spent = await _attempt(task, position, team, tools, log)
            stopped = stopped or spent
            outcome = "failed" if recorder.failure else "declined" if recorder.declined else "finished"
            counts[outcome] += 1
            if recorder.failure and not stopped:
                _stop_if_hopeless(counts, max_failed_share, recorder.failure)
        if progress is not None and counts.total() > counts["resumed"]:
            progress("team", counts.total(), total)

    await work_in_parallel(open_tasks(), work, max_parallel)
    return Collected(**counts, stopped=stopped)


async def _attempt(
    task: Task, position: int, team: Team, tools: Mapping[str, Tool], log: EventLog
) -> tuple[Recorder, str]:
    """Work on one task until its attempt has ended. The returned text is not empty if the budget is spent."""
    recorder, spent = log.begin(task, position, tools), ""
    try:
        await team.solve(recorder)
    except SandboxUnavailableError:
        raise
    except (ToolError, EngineError) as error:
        spent = str(error) if isinstance(error, BudgetSpentError) else ""
        recorder.fail(f"{type(error).__name__}: {error}")
    if not recorder.ended:
        recorder.fail("the team ended without an answer")
    return recorder, spent


def _stop_if_hopeless(counts: Counter[str], max_failed_share: float, failure: str) -> None:
    tried = counts["failed"] + counts["finished"]
    if counts["failed"] >= _FAILURES_BEFORE_JUDGEMENT and counts["failed"] > max_failed_share * tried:
        raise EngineError(f"{counts['failed']} of {tried} tasks failed, the last one with: {failure}")


def distinct_tasks(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield the tasks unchanged.

    Raises:
        DataError: Two tasks have the same id.
    """
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise DataError(f"task id {task.id!r} occurs twice; ids must be unique")
        seen.add(task.id)
        yield task


EVENTS_FILE = "events.jsonl"
KEPT_FILE = "trajectories.jsonl"
DROPPED_FILE = "dropped.jsonl"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class DistillSummary:
    """The result of a distillation: trajectories kept in ``path``, and dropped rows by reason.

    Attributes:
        team: Task counts of this call.
        examples: Full reason of the first row that was dropped for each reason.
        seconds: Wall time of this call.
        spent: Cost of the whole log, including earlier calls.
    """

    path: Path
    tasks: int
    team: Collected
    kept: int
    dropped: Mapping[str, int]
    examples: Mapping[str, str]
    tool_calls: int
    seconds: float
    spent: Spent

    @property
    def not_tried(self) -> int:
        """Number of tasks that did not begin because the team's budget was spent."""
        return self.tasks - self.team.tasks


async def distill(
    tasks: Sequence[Task],
    spec: AgentSpec,
    tools: Mapping[str, Tool],
    output_dir: str | Path,
    *,
    team: TeamWithRoles,
    seed: int = 0,
    max_parallel: int = 4,
    filters: Sequence[Filter] | None = None,
    rewards: Path | None = None,
    progress: Progress | None = None,
    files: Mapping[str, str] | None = None,
) -> DistillSummary:
    """Distil ``tasks`` into ``output_dir``. After a kill, the same call resumes with the next task.

    Writes ``events.jsonl`` (all events of the team), ``trajectories.jsonl`` (kept), ``dropped.jsonl`` (with reasons)
    and ``manifest.json``. Order and content of the trajectories depend on tasks, seed and team, but not on
    ``max_parallel`` or kills.

    Args:
        team: The teacher, for example :func:`afm.distill.scripted_teams.scripted_team`.
        filters: Stages after the merge. The default is format, and quality by the reward of the data source. An empty
            sequence means no filter.
        rewards: YAML of the reward for the default stages.
        progress: Called after every task and every filtered row.
        files: The files of ``tasks``, ``team`` and ``agent_digest``, to name those that changed since the folder's run.

    Raises:
        ConfigError: ``output_dir`` holds a distillation of other tasks, or with another agent, team, tools or seed. Or
            the team plays a role that the agent lacks.
        DataError: There are no tasks.
    """
    if not tasks:
        raise DataError("no tasks to distil")
    started = time.perf_counter()
    out = Path(output_dir)
    role_map = team.roles.checked(spec)
    agent = {"agent": spec.name, "agent_digest": spec.digest, "tools": sorted(tools)}
    async with _stages(filters, spec, tools, rewards, tasks) as stages:
        with EventLog(out / EVENTS_FILE) as log:
            settle(RunFolder(out, "--output-dir"), tasks, team, seed, files, **agent)
            collected = await collect(tasks, team, tools, log, max_parallel=max_parallel, progress=progress)
            merged = merge_log(out / EVENTS_FILE, spec, role_map, team=team.name, seed=seed)
            funnel, tool_calls, examples = await _filter(merged, stages, out, progress)
    summary = DistillSummary(
        path=out / KEPT_FILE,
        tasks=len(tasks),
        team=collected,
        kept=funnel.kept,
        dropped=dict(funnel.dropped),
        examples=examples,
        tool_calls=tool_calls,
        seconds=round(time.perf_counter() - started, 3),
        spent=log.spent,
    )
    _write_manifest(out, summary, spec, role_map, team=team.name, seed=seed)
    return summary


def _write_manifest(
    out: Path, summary: DistillSummary, spec: AgentSpec, role_map: RoleMap, *, team: str, seed: int
) -> None:
    write_manifest(
        out / MANIFEST_FILE,
        counts={
            "tasks": summary.tasks,
            "failed": summary.team.failed,
            "kept": summary.kept,
            "tool_calls": summary.tool_calls,
        },
        inputs=[out / EVENTS_FILE],
        spec=spec,
        seed=seed,
        team=team,
        roles=role_map.messages,
        dropped=summary.dropped,
        cost={"usd": round(summary.spent.usd, 6), "tokens": summary.spent.tokens},
    )


def settle(
    folder: RunFolder,
    tasks: Sequence[Task],
    team: Team,
    seed: int,
    files: Mapping[str, str] | None = None,
    **more: object,
) -> None:
    """Record the settings of the run and reject a folder of a different run. Call it with the log open."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(task.model_dump_json().encode() + b"\n")
    settings = {"team": team.name, "seed": seed, "tasks": digest.hexdigest()[:16]}
    folder.claim(more | settings, [folder.path / EVENTS_FILE], files)


@asynccontextmanager
async def _stages(
    filters: Sequence[Filter] | None,
    spec: AgentSpec,
    tools: Mapping[str, Tool],
    rewards: Path | None,
    tasks: Sequence[Task],
) -> AsyncIterator[Sequence[Filter]]:
    """Open the filters. The default is the agent's rules and the reward of each row's data source.

    Raises:
        ConfigError: The reward is wrong, or a task has no reward.
    """
    if filters is not None:
        yield filters
        return
    reward = load_reward(rewards)
    for task in {
        (task.data_source, task.extra_info.get("reward")): task for task in reversed(tasks)
    }.values():
        try:
            reward.check(task.data_source, str(task.extra_info.get("reward") or ""))
        except ConfigError as error:
            raise ConfigError(f"task {task.id!r}: {error}") from None
    try:
        yield FormatFilter(spec, readers_among(tools)), QualityFilter(spec, reward)
    finally:
        await reward.close()


async def _filter(
    merged: Iterable[Record], filters: Sequence[Filter], out: Path, progress: Progress | None
) -> tuple[Funnel, int, dict[str, str]]:
    """Write kept and dropped records. Returns their counts, the number of tool calls and the first of each reason."""
    funnel, tool_calls, examples = Funnel(), 0, dict[str, str]()
    with writing_records(out) as write:
        async for record in run_filters(merged, filters):
            write(record)
            funnel.add(kept=record.kept, reason=record.reason)
            if not record.kept:
                examples.setdefault(record.reason.partition(":")[0], record.reason)
            tool_calls += record.cost.tool_calls
            if progress is not None:
                progress("filter", funnel.seen, None)
    return funnel, tool_calls, examples


@contextmanager
def writing_records(out: Path) -> Iterator[Callable[[Record], object]]:
    """Write each record to the kept or the dropped file. Both files appear complete when the block ends without error."""
    with (
        replacing(out / KEPT_FILE) as kept_path,
        replacing(out / DROPPED_FILE) as dropped_path,
        RecordWriter(kept_path) as kept,
        RecordWriter(dropped_path) as dropped,
    ):
        yield lambda record: (kept if record.kept else dropped).write(record)
