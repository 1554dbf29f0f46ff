"""Questions from a corpus in one call: groups of passages, one attempt each, resumable by its event log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from afm.datasets import Task, write_tasks
from afm.datasets.encyclopaedia.growth import Growth
from afm.distill.expand.passages import SourcePassage, groups, read_passages
from afm.distill.expand.settings import ExpandSettings
from afm.distill.expand.team import ExpandTeam, GroupOutcome, WebExpandTeam, read_topics
from afm.distill.merge import final_attempts
from afm.distill.record import EventKind, EventLog
from afm.distill.run import collect, settings_of, settle
from afm.endpoints.budget import Spent
from afm.runs.atomic import replace_text
from afm.runs.folder import write_manifest
from afm.tools import Tool

TASKS_FILE, REJECTED_FILE, EVENTS_FILE = "tasks.jsonl", "rejected.jsonl", "events.jsonl"


@dataclass(frozen=True, slots=True)
class ExpandSummary:
    """What an expansion made.

    Attributes:
        path: The questions, as JSONL of tasks.
        groups: Groups of passages, or topics, that were to be tried.
        rejected: Groups without a question, by reason.
        failed: Groups whose models failed; the next run tries them again.
        stopped: Why the run ended early (its budget is spent), empty when it did not.
    """

    path: Path
    groups: int
    kept: int
    rejected: dict[str, int]
    failed: int
    stopped: str
    spent: Spent


async def expand_corpus(
    corpus: Path,
    settings: ExpandSettings,
    out: Path,
    *,
    growth: Growth,
    size: int,
    count: int,
    seed: int = 0,
    parallel: int = 4,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> ExpandSummary:
    """Try to make a question of each of ``count`` groups of ``size`` passages; called again, it goes on.

    Writes ``events.jsonl`` (every call), ``tasks.jsonl`` (what was kept), ``rejected.jsonl`` and ``manifest.json``.

    Raises:
        ConfigError: ``out`` holds an expansion of another kind, or the corpus has too few groups.
        EngineError: Too many groups failed.
    """
    tasks = [
        _task(number, group, growth, seed, settings)
        for number, group in enumerate(islice(groups(read_passages(corpus), growth, size, seed), count))
    ]
    team = ExpandTeam(settings)
    return await _expand(tasks, team, {}, corpus, out, growth, size, seed, parallel, progress)


async def expand_web(
    topics: Path,
    settings: ExpandSettings,
    tools: dict[str, Tool],
    out: Path,
    *,
    growth: Growth,
    size: int,
    count: int,
    parallel: int = 4,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> ExpandSummary:
    """Try to make a question of each of the first ``count`` topics of a file, from ``size`` pages that tools find and read.

    Writes what :func:`expand_corpus` writes; called again, it goes on.

    Raises:
        ConfigError: ``out`` holds an expansion of another kind, the settings have no scout, or a tool is missing.
        DataError: There is no topic.
        EngineError: Too many topics failed.
    """
    team = WebExpandTeam(settings)
    tasks = [
        Task(
            id=f"{settings.name}-web-{growth}-{size}-{number:06d}-{_digest(topic)}",
            question=topic,
            data_source=settings.data_source,
            extra_info={"growth": growth.value, "topic": topic, "size": size},
        )
        for number, topic in enumerate(read_topics(topics)[:count])
    ]
    return await _expand(
        tasks, team, team.checked(tools), topics, out, growth, size, None, parallel, progress
    )


async def _expand(
    tasks: Sequence[Task],
    team: ExpandTeam | WebExpandTeam,
    tools: dict[str, Tool],
    source: Path,
    out: Path,
    growth: Growth,
    size: int,
    seed: int | None,
    parallel: int,
    progress: Callable[[str, int, int | None], None] | None,
) -> ExpandSummary:
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("groups", done, len(tasks))

    try:
        with EventLog(out / EVENTS_FILE) as log:
            settle(out, settings_of(tasks, team.name, seed or 0) | {"growth": growth.value})
            collected = await collect(tasks, team, tools, log, parallel=parallel, on_done=on_done)
    finally:
        await team.close()
    kept, rejected = _write(out)
    write_manifest(
        out / "manifest.json",
        counts={"groups": len(tasks), "kept": kept, "failed": collected.failed},
        inputs=[source],
        seed=seed,
        team=team.name,
        growth=growth.value,
        size=size,
        rejected=dict(rejected),
        cost={"usd": round(log.spent.usd, 6), "tokens": log.spent.tokens},
    )
    return ExpandSummary(
        path=out / TASKS_FILE,
        groups=len(tasks),
        kept=kept,
        rejected=dict(rejected),
        failed=collected.failed,
        stopped=collected.stopped,
        spent=log.spent,
    )


def _task(
    number: int, group: tuple[SourcePassage, ...], growth: Growth, seed: int, settings: ExpandSettings
) -> Task:
    passages = [passage.model_dump() for passage in group]
    identity = [text for passage in group for text in (passage.id, passage.title)]
    return Task(
        id=f"{settings.name}-{growth}-{len(group)}-{seed}-{number:06d}-{_digest(*identity)}",
        question=" / ".join(row["title"] for row in passages),
        data_source=settings.data_source,
        extra_info={"growth": growth.value, "passages": passages},
    )


def _digest(*texts: str) -> str:
    """Sets of other sources share numbers, sizes and seeds."""
    return blake2b(json.dumps(texts).encode(), digest_size=3).hexdigest()


def _write(out: Path) -> tuple[int, Counter[str]]:
    """The results of the log as files; returns how many questions were kept, and why groups were rejected."""
    kept: list[Task] = []
    rejected: list[str] = []
    reasons: Counter[str] = Counter()
    for events in final_attempts(out / EVENTS_FILE):
        if events[-1].kind is not EventKind.FINAL:
            continue
        task = Task.model_validate(events[0].meta["task"])
        outcome = GroupOutcome.model_validate_json(events[-1].content)
        if outcome.rejected:
            rejected.append(outcome.model_dump_json())
            reasons[_stage(task, outcome)] += 1
        else:
            kept.append(_made(task, outcome))
    write_tasks(kept, out / TASKS_FILE)
    replace_text(out / REJECTED_FILE, "".join(f"{line}\n" for line in rejected))
    return len(kept), reasons


def _stage(task: Task, outcome: GroupOutcome) -> str:
    """Who rejected."""
    if len(outcome.read) < task.extra_info.get("size", 0):
        return "pages"
    return "solver" if outcome.question else "proposal"


def _made(task: Task, outcome: GroupOutcome) -> Task:
    read = outcome.read or tuple(passage["id"] for passage in task.extra_info["passages"])
    return task.model_copy(
        update={
            "question": outcome.question,
            "ground_truth": outcome.answer,
            "extra_info": {
                "shape": task.extra_info["growth"],
                "hops": len(read),
                "path": [
                    {"passage": read[quote.passage - 1], "quote": quote.quote} for quote in outcome.evidence
                ],
                "proof": {"reads": len(read), "by": "solver without each passage"},
            },
        }
    )
