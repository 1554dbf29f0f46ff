"""The whole distillation: :func:`collect` lets a team work, its log is merged, and :func:`distill` filters the result."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.filters import Filter, FormatFilter, Funnel, QualityFilter, run_filters
from afm.distill.merge import RoleMap, merge_log
from afm.distill.record import EventLog, Recorder
from afm.endpoints.budget import Spent
from afm.errors import BudgetSpentError, DataError, EngineError, SandboxUnavailableError, ToolError
from afm.rewards import load_reward
from afm.runs.atomic import replacing
from afm.runs.folder import RunFolder, write_manifest
from afm.tools import Tool
from afm.tools.arguments import readers_among
from afm.trajectory.io import RecordWriter

_FAILURES_BEFORE_JUDGEMENT = 20


class Team(Protocol):
    """A team of agents that solves tasks, scripted or with models behind it."""

    @property
    def name(self) -> str:
        """Identifies the team in logs and manifests."""
        ...

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task`` until ``recorder.finish``, ``recorder.fail`` or ``recorder.decline``.

        Raises:
            ToolError, EngineError: Infrastructure failed; the attempt is logged as failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What one run of a team did.

    Attributes:
        finished: Tasks answered now.
        resumed: Tasks that the log holds as finished or declined.
        failed: Tasks without an answer; the next run tries them again.
        declined: Tasks that the team cannot read or does not take; no run tries them again.
        stopped: Why the run ended before its last task, empty when it did not.
    """

    finished: int = 0
    resumed: int = 0
    failed: int = 0
    declined: int = 0
    stopped: str = ""


async def collect(
    tasks: Iterable[Task],
    team: Team,
    tools: Mapping[str, Tool],
    log: EventLog,
    *,
    parallel: int = 4,
    max_failed_share: float = 0.2,
    on_done: Callable[[], None] | None = None,
) -> Collected:
    """Let ``team`` work on every task that ``log`` does not hold as finished, ``parallel`` at a time.

    When the team's budget is spent, no further task begins, those under way end, and the result says why.

    Args:
        tasks: Read one by one; their order is kept in the log as the position.
        on_done: Called after each task, resumed ones included.

    Raises:
        DataError: Two tasks have the same id.
        EngineError: More than ``max_failed_share`` of the tasks tried failed, seen at the 20th failure or later.
        SandboxUnavailableError: Code cannot be run here at all.
    """
    counts: Counter[str] = Counter()
    positions = _distinct(tasks)

    stopped = ""

    async def work() -> None:
        nonlocal stopped
        for position, task in positions:
            if stopped:
                return
            if task.id in log.finished:
                counts["resumed"] += 1
            else:
                end = await _attempt(task, position, team, tools, log)
                counts[end.counts_as] += 1
                stopped = stopped or end.budget
                if end.reason and not stopped:
                    _stop_if_hopeless(counts, max_failed_share, end.reason)
            if on_done is not None:
                on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(work())
    except* Exception as errors:  # the first failure ended the others; report it alone
        raise _first(errors) from errors
    return Collected(**counts, stopped=stopped)


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended.

    Attributes:
        counts_as: The field of :class:`Collected` in which the task counts.
        reason: Why it failed, empty when it did not.
        budget: Says so when the run has no money or tokens left.
    """

    counts_as: str
    reason: str = ""
    budget: str = ""


async def _attempt(task: Task, position: int, team: Team, tools: Mapping[str, Tool], log: EventLog) -> _End:
    """Work on one task until its attempt has ended."""
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
    if recorder.failure:
        return _End("failed", recorder.failure, spent)
    return _End("declined" if recorder.declined else "finished")


def _stop_if_hopeless(counts: Counter[str], max_failed_share: float, failure: str) -> None:
    tried = counts["failed"] + counts["finished"]
    if counts["failed"] >= _FAILURES_BEFORE_JUDGEMENT and counts["failed"] > max_failed_share * tried:
        raise EngineError(f"{counts['failed']} of {tried} tasks failed, the last one with: {failure}")


def _distinct(tasks: Iterable[Task]) -> Iterator[tuple[int, Task]]:
    seen: set[str] = set()
    for position, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(f"task id {task.id!r} occurs twice; ids must be unique")
        seen.add(task.id)
        yield position, task


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


EVENTS_FILE = "events.jsonl"
KEPT_FILE = "trajectories.jsonl"
DROPPED_FILE = "dropped.jsonl"
MANIFEST_FILE = "manifest.json"

Progress = Callable[[str, int, int | None], None]
"""Receives the stage (``team`` or ``filter``), rows done and rows in all (``None`` when unknown)."""


@dataclass(frozen=True, slots=True)
class DistillSummary:
    """What a distillation made.

    Attributes:
        path: JSONL of the kept trajectories.
        resumed: Tasks that an earlier, interrupted run finished or declined.
        failed: Tasks that the team failed at; the next run tries them again.
        declined: Tasks that the team cannot read or does not take.
        dropped: Rows dropped, by reason.
        seconds: Wall time of this call.
        stopped: Why the team ended before its last task (its budget is spent), empty when it did not.
        not_tried: Tasks that were not begun then.
        spent: What the whole log has cost, earlier calls included.
    """

    path: Path
    tasks: int
    resumed: int
    failed: int
    kept: int
    dropped: Mapping[str, int]
    tool_calls: int
    seconds: float
    stopped: str = ""
    not_tried: int = 0
    declined: int = 0
    spent: Spent = field(default_factory=Spent)


async def distill(
    tasks: Sequence[Task],
    spec: AgentSpec,
    tools: Mapping[str, Tool],
    out_dir: str | Path,
    *,
    team: Team,
    roles: RoleMap,
    seed: int = 0,
    parallel: int = 4,
    filters: Sequence[Filter] | None = None,
    progress: Progress | None = None,
) -> DistillSummary:
    """Distil ``tasks`` into ``out_dir``; called again after a kill, it continues with the next task.

    Writes ``events.jsonl`` (everything the team did), ``trajectories.jsonl`` (kept), ``dropped.jsonl``
    (with reasons) and ``manifest.json``. The order and content of the trajectories depend on tasks, seed
    and team only, not on ``parallel`` or on interruptions.

    Args:
        team: The teacher, for example :func:`afm.distill.scripted_team`.
        roles: Which roles of the agent the messages of its members become.
        filters: Stages behind the merge, none where empty; by default format and quality by the reward of the data source.
        progress: Called after every task and every filtered row.

    Raises:
        ConfigError: ``out_dir`` holds a distillation of other tasks, or with another agent, team, tools or seed; or
            ``roles`` names a role that the agent lacks.
        DataError: There are no tasks.
    """
    if not tasks:
        raise DataError("no tasks to distil")
    started = time.perf_counter()
    out = Path(out_dir)
    role_map = roles.checked(spec)
    with EventLog(out / EVENTS_FILE) as log:
        settle(out, _settings(tasks, spec, team, tools, seed))
        collected = await _work(tasks, team, tools, log, parallel, progress)
        usual = FormatFilter(spec, readers_among(tools))
        funnel, tool_calls = await _merge(out, usual, role_map, team.name, seed, filters, progress)
    summary = DistillSummary(
        path=out / KEPT_FILE,
        tasks=len(tasks),
        resumed=collected.resumed,
        failed=collected.failed,
        kept=funnel.kept,
        dropped=dict(funnel.dropped),
        tool_calls=tool_calls,
        seconds=round(time.perf_counter() - started, 3),
        stopped=collected.stopped,
        not_tried=len(tasks)
        - (collected.resumed + collected.finished + collected.failed + collected.declined),
        declined=collected.declined,
        spent=log.spent,
    )
    _write_manifest(out, summary, spec, team, role_map, seed)
    return summary


def _write_manifest(
    out: Path, summary: DistillSummary, spec: AgentSpec, team: Team, roles: RoleMap, seed: int
) -> None:
    write_manifest(
        out / MANIFEST_FILE,
        counts={
            "tasks": summary.tasks,
            "failed": summary.failed,
            "kept": summary.kept,
            "tool_calls": summary.tool_calls,
        },
        inputs=[out / EVENTS_FILE],
        spec=spec,
        seed=seed,
        team=team.name,
        roles=roles.messages,
        dropped=summary.dropped,
        cost={"usd": round(summary.spent.usd, 6), "tokens": summary.spent.tokens},
    )


def _settings(
    tasks: Sequence[Task], spec: AgentSpec, team: Team, tools: Mapping[str, Tool], seed: int
) -> dict[str, object]:
    """What the result depends on."""
    agent = {"agent": spec.name, "agent_digest": spec.digest, "tools": sorted(tools)}
    return agent | settings_of(tasks, team.name, seed)


def settings_of(tasks: Sequence[Task], team: str, seed: int) -> dict[str, object]:
    """What the result of any team depends on, for :func:`settle`."""
    return {"team": team, "seed": seed, "tasks": _digest(tasks)}


def _digest(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(task.model_dump_json().encode() + b"\n")
    return digest.hexdigest()[:16]


def settle(out: Path, settings: dict[str, object]) -> None:
    """Remember what the run depends on; refuse to mix two kinds of runs in one folder. Call it with the log open."""
    RunFolder(out).claim(settings, [out / EVENTS_FILE])


async def _work(
    tasks: Iterable[Task],
    team: Team,
    tools: Mapping[str, Tool],
    log: EventLog,
    parallel: int,
    progress: Progress | None,
) -> Collected:
    total = len(tasks) if isinstance(tasks, Sequence) else None
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("team", done, total)

    return await collect(tasks, team, tools, log, parallel=parallel, on_done=on_done)


async def _merge(
    out: Path,
    usual: FormatFilter,
    roles: RoleMap,
    team: str,
    seed: int,
    filters: Sequence[Filter] | None,
    progress: Progress | None,
) -> tuple[Funnel, int]:
    """Merge and filter the log into fresh files that replace the old ones only when they are complete.

    Args:
        usual: The filter of the agent's rules; without ``filters`` it and the quality filter are the stages.
    """
    spec = usual.spec
    reward = load_reward() if filters is None else None
    stages = filters or ()
    if reward is not None:
        stages = (usual, QualityFilter(spec, reward))
    funnel, tool_calls = Funnel(), 0
    with replacing(out / KEPT_FILE) as kept_path, replacing(out / DROPPED_FILE) as dropped_path:
        try:
            with RecordWriter(kept_path) as kept, RecordWriter(dropped_path) as dropped:
                merged = merge_log(out / EVENTS_FILE, spec, roles, team=team, seed=seed)
                async for record in run_filters(merged, stages):
                    (kept if record.kept else dropped).write(record)
                    funnel.count(record)
                    tool_calls += record.cost.tool_calls
                    if progress is not None:
                        progress("filter", funnel.seen, None)
        finally:
            if reward is not None:
                await reward.close()
    return funnel, tool_calls
