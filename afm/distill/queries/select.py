"""Selection of questions for RL by solve rate, overlap with other sets, and data source."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from afm.datasets import Task, read_tasks, write_tasks
from afm.datasets.schema import question_of_prompt
from afm.distill.filters.contamination import with_marks
from afm.distill.queries.askers import QuestionAsker
from afm.distill.queries.sampling import OnSample, QuerySettings, SampleLog, Sampling
from afm.distill.run import distinct_tasks
from afm.errors import DataError
from afm.rewards.text_match import comparable
from afm.runs.atomic import replace_text
from afm.runs.folder import RunFolder, write_manifest
from afm.trajectory.io import json_rows

KEPT_FILE = "kept.jsonl"
DROPPED_FILE = "dropped.jsonl"
SAMPLES_FILE = "samples.jsonl"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class QuerySummary:
    """Result of a selection: kept tasks in ``path`` (with ``r_q``), and dropped tasks by reason.

    ``kept + sum(dropped) == tasks``.

    Attributes:
        resumed: Number of samples that were in the log. ``sampled`` is the number of new samples.
        unsampled: Tasks that the engine does not answer although it answers others, by id with the reason.
    """

    path: Path
    tasks: int
    kept: int
    dropped: Mapping[str, int]
    resumed: int
    sampled: int
    unsampled: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Decision:
    """The decision about a task, which is kept without a ``reason``. ``rate`` holds ``r_q`` and the number of samples."""

    task: Task
    reason: str = ""
    rate: Mapping[str, float] = field(default_factory=dict)


async def select_queries(
    tasks: Sequence[Task],
    asker: QuestionAsker,
    output_dir: Path,
    settings: QuerySettings,
    *,
    known: Collection[str] = (),
    inputs: Iterable[Path] = (),
    on_sample: OnSample | None = None,
) -> QuerySummary:
    """Select the tasks that a model does not already solve. After a kill, the same call resumes with the next sample.

    Writes ``samples.jsonl`` while it runs, and at the end ``kept.jsonl``, ``dropped.jsonl`` (with reason and rate) and
    ``manifest.json``. Drops a task whose answers cannot be judged (no gold answer, broken tests), or that the engine
    rejects while it answers others (``settings.on_bad_rows``). A run with another ``max_rate``, another ``target``,
    more samples or more tasks reuses existing samples.

    Args:
        known: Keys of questions to exclude (:func:`known_questions`).
        inputs: Files of the tasks, for the manifest.

    Raises:
        ConfigError: ``output_dir`` holds samples of another model, agent or seed, or another run is writing there.
        DataError: There are no tasks, or an id occurs twice.
        EngineError: Samples failed. Existing samples stay, and the same call resumes.
        SandboxUnavailableError: Model-written code cannot run on this machine.
    """
    if not list(distinct_tasks(tasks)):
        raise DataError("no tasks to select from")
    facts = {**asker.facts, "with_tools": settings.with_tools, "seed": settings.seed}
    early = dict(_unasked(tasks, known))
    asked = [task for task in tasks if task.id not in early]
    with SampleLog(output_dir / SAMPLES_FILE) as log:
        RunFolder(output_dir).claim(facts, [output_dir / SAMPLES_FILE])
        run = Sampling(asker, log, settings, len(asked) * settings.samples, on_sample)
        await run.work(asked)
        early |= {name: f"cannot be judged: {reason}" for name, reason in run.unjudged.items()}
        early |= {name: f"cannot be sampled: {reason}" for name, reason in run.unsampled.items()}
        decisions = [
            _Decision(task, early[task.id])
            if task.id in early
            else _by_rate(task, log.right(task, settings.samples), settings)
            for task in tasks
        ]
    decisions = _drawn(decisions, settings)
    return _written(decisions, output_dir, settings, run, inputs, asker.facts)


def _unasked(tasks: Sequence[Task], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the ids of tasks that need no sample, with the reason."""
    seen: dict[str, str] = {}
    for task in tasks:
        key = question_key(task.question)
        if key in known:
            yield task.id, "in the SFT data"
        elif key in seen:
            yield task.id, "repeats a question"
        seen.setdefault(key, task.id)


def _by_rate(task: Task, right: int, settings: QuerySettings) -> _Decision:
    reason = ""
    if right > settings.most_right:
        limit = settings.max_rate
        reason = "solved by every sample" if limit is None else f"r_q above {limit:g}"
    rate = {"r_q": round(right / settings.samples, 6), "r_q_samples": settings.samples}
    return _Decision(task, reason, rate)


def _drawn(decisions: list[_Decision], settings: QuerySettings) -> list[_Decision]:
    """Draw ``target`` of the kept tasks at random, in proportion to their data sources (largest remainders)."""
    strata: dict[str, list[str]] = defaultdict(list)
    for decision in decisions:
        if not decision.reason:
            strata[decision.task.data_source].append(decision.task.id)
    total = sum(map(len, strata.values()))
    if settings.target is None or total <= settings.target:
        return decisions
    shares = {source: settings.target * len(ids) / total for source, ids in strata.items()}
    places = {source: int(share) for source, share in shares.items()}
    left = settings.target - sum(places.values())
    for source in sorted(shares, key=lambda name: (places[name] - shares[name], name))[:left]:
        places[source] += 1
    chosen: set[str] = set()
    for source in sorted(strata):
        draw = random.Random(f"{settings.seed}/{source}")
        chosen.update(draw.sample(strata[source], places[source]))
    return [
        decision if decision.reason or decision.task.id in chosen else replace(decision, reason="not drawn")
        for decision in decisions
    ]


def _written(
    decisions: Sequence[_Decision],
    out: Path,
    settings: QuerySettings,
    run: Sampling,
    inputs: Iterable[Path],
    facts: Mapping[str, Any],
) -> QuerySummary:
    kept: list[Task] = []
    dropped: list[dict[str, Any]] = []
    for decision in decisions:
        task, rate = decision.task, decision.rate
        if decision.reason:
            source = {"data_source": task.data_source, "question": task.question}
            dropped.append({"id": task.id, "reason": decision.reason, **rate, **source})
        else:
            kept.append(task.model_copy(update={"extra_info": {**task.extra_info, **rate}}))
    reasons = Counter(row["reason"].partition(":")[0] for row in dropped)
    rates = Counter(decision.rate["r_q"] for decision in decisions if decision.rate)
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in dropped)
    replace_text(out / DROPPED_FILE, "".join(rows))
    write_tasks(kept, out / KEPT_FILE)
    write_manifest(
        out / MANIFEST_FILE,
        counts={"tasks": len(decisions), "kept": len(kept), "dropped": len(dropped)},
        inputs=inputs,
        seed=settings.seed,
        dropped=dict(reasons),
        kept_by_source=dict(Counter(task.data_source for task in kept)),
        rates=dict(sorted(rates.items())),
        settings=settings.model_dump(mode="json", include=set(QuerySettings.model_fields)),
        sampled_with=dict(facts),
    )
    return QuerySummary(
        out / KEPT_FILE, len(decisions), len(kept), dict(reasons), run.resumed, run.sampled, run.unsampled
    )


_JOINS = re.compile(r"[-/\u2010-\u2014]")
"""Characters that separate two words as a space does."""


def question_key(question: str) -> str:
    """Return a key that ignores case, punctuation, articles, layout and variants of letters.

    Signs that change the question (operators, decimal points) are kept
    (:func:`afm.distill.filters.contamination.with_marks`).
    """
    return comparable(_JOINS.sub(" ", with_marks(question)))


def known_questions(files: Iterable[Path]) -> set[str]:
    """Return the keys of all questions of trajectories, alpaca rows (the text after ``Question:``) or tasks.

    Reads JSON, JSONL and parquet.

    Raises:
        DataError: A row holds no question, or a file cannot be read.
    """
    return {question_key(question) for file in files for question in _questions(file)}


def _questions(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from (task.question for task in read_tasks(file))
        return
    for line, row in json_rows(file):
        if isinstance(row, DataError):
            raise row
        yield _question(row, file, line)


def _question(row: Any, file: Path, line: int) -> str:
    if isinstance(row, dict):
        question, instruction = row.get("question"), row.get("instruction")
        if isinstance(question, str) and question.strip():
            return question
        if isinstance(instruction, str) and instruction.strip():
            asked = row.get("input")
            return question_of_prompt(asked if isinstance(asked, str) and asked.strip() else instruction)
    raise DataError(
        "no question; expected `question`, or `instruction` of an alpaca row", path=str(file), line=line
    )
