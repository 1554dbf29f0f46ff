"""Reports: one self-contained HTML page about a run, and the same as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afm.evaluation.compare import read_comparison
from afm.evaluation.failures import Failure, FailureGroup
from afm.evaluation.metrics import passed
from afm.evaluation.page import Block, blocks_of, draw, role_colours, template, write_page
from afm.evaluation.report_folder import read_run
from afm.evaluation.report_input import (
    VIEW_PORT,
    BenchmarkNote,
    Pair,
    PublishedFigure,
    ReportInput,
    StageResult,
)
from afm.evaluation.statistics import Interval
from afm.evaluation.wording import (
    FAILURES,
    cost_cells,
    cut,
    difference_words,
    dollars,
    headline,
    metric_lines,
    number,
    ours_words,
    percent,
    points,
    savings_words,
    stops_words,
)
from afm.terminal import visible
from afm.trajectory.record import Record


@dataclass(frozen=True, slots=True)
class _Panel:
    stage: str
    record: Record
    passed: bool | None
    blocks: Sequence[Block]
    link: str


@dataclass(frozen=True, slots=True)
class _Problem:
    title: str
    question: str
    prompt: str
    gold: str
    panels: Sequence[_Panel]


def render_report(run: ReportInput) -> str:
    """The page as text.

    Raises:
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    story = run.tool_story and tuple(run.stage(name) for name in run.tool_story)
    text: str = template("report.html.j2", **_FILTERS).render(
        run=run,
        **_shared(run),
        story=story,
        pictures=[draw(curve) for curve in run.curves],
        problems=[_problem(pair, run) for pair in run.pairs],
        colours=role_colours(run.spec) if run.spec else {},
    )
    return visible(text)


def render_markdown(run: ReportInput) -> str:
    """The same as Markdown: figures, failures and facts; trajectories are links, curves are tables."""
    text: str = template("report.md.j2", **_FILTERS).render(run=run, **_shared(run))
    return visible(text)


def _shared(run: ReportInput) -> dict[str, Any]:
    return {
        "headline": headline(run),
        "published": _by_benchmark(run.stages),
        "failures": [
            (stage, stage.scan.failures) for stage in run.stages if stage.scan and stage.scan.failures
        ],
    }


def _by_benchmark(stages: Sequence[StageResult]) -> list[tuple[str, list[StageResult]]]:
    """Stages of published benchmarks, those of the same one together."""
    by_name: dict[str, list[StageResult]] = {}
    for stage in stages:
        if stage.published is not None:
            by_name.setdefault(stage.published.benchmark, []).append(stage)
    return list(by_name.items())


def _by_class(
    failures: Sequence[tuple[StageResult, Sequence[FailureGroup]]],
) -> list[tuple[Failure, list[FailureGroup | None]]]:
    """Every class that occurs in some stage, with each stage's group; the order of the classes."""
    tables = [{group.kind: group for group in groups} for _, groups in failures]
    return [
        (kind, [table.get(kind) for table in tables])
        for kind in Failure
        if any(kind in table for table in tables)
    ]


def _problem(pair: Pair, run: ReportInput) -> _Problem:
    first = pair.episodes[0][1]
    spec = pair.spec or (run.agents.declared(first) if run.agents else run.spec)
    asked_otherwise = {stage.name for stage in run.stages if not stage.own_prompt}
    own = asked_otherwise.isdisjoint(name for name, _ in pair.episodes)
    return _Problem(
        title=pair.title,
        question=first.question,
        prompt=spec.user_message(first.question) if spec and own else "",
        gold=gold_text(first.ground_truth),
        panels=[
            _Panel(name, record, passed(record), blocks_of(record, spec), _link(run, name, record))
            for name, record in pair.episodes
        ],
    )


def _link(run: ReportInput, name: str, record: Record) -> str:
    file = next((stage.episodes for stage in run.stages if stage.name == name), None)
    return run.links.to(record.id, file) if run.links and file else ""


def gold_text(gold: Any) -> str:
    """The expected answer for a person: alternatives joined, anything longer as JSON."""
    if isinstance(gold, dict) and set(gold) <= {"target", "question"}:
        gold = gold.get("target", "")
    if isinstance(gold, list | tuple) and all(isinstance(part, str) for part in gold):
        return " | ".join(gold)
    text = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else f"{text[:400]}..."


_FILTERS: dict[str, Callable[..., Any]] = {
    "percent": percent,
    "points": points,
    "number": number,
    "dollars": dollars,
    "lines": metric_lines,
    "difference": difference_words,
    "ours": ours_words,
    "stops": stops_words,
    "cost": cost_cells,
    "savings": savings_words,
    "failure": FAILURES.__getitem__,
    "gold": gold_text,
    "cut": cut,
    "by_class": _by_class,
}


_SHOWN = 400


def report_data(run: ReportInput) -> dict[str, Any]:
    """What ``json.dumps`` can write: figures as in metrics.json, shares between 0 and 1, published scores in percent."""
    return {
        "title": run.title,
        "kind": run.kind,
        "headline": headline(run),
        "stages": [_stage(stage, run) for stage in run.stages],
        "differences": [
            {
                "before": difference.before,
                "after": difference.after,
                **difference.result.model_dump(),
                "caveats": list(difference.caveats),
                "prices": difference.prices,
            }
            for difference in run.differences
        ],
        "savings": [table.model_dump(mode="json") for table in run.savings],
        "curves": [asdict(curve) for curve in run.curves],
        "health": [asdict(aspect) for aspect in run.health],
        "episodes": [_pair(pair, run) for pair in run.pairs],
        "facts": {fact.label: fact.value for fact in run.facts},
        "commands": [asdict(command) for command in run.commands],
        "notes": list(run.notes),
        "view": run.links.command if run.links else None,
    }


def _stage(stage: StageResult, run: ReportInput) -> dict[str, Any]:
    return {
        "name": stage.name,
        "note": stage.note,
        "metrics": stage.metrics.model_dump(mode="json"),
        "published": _published(stage.published) if stage.published else None,
        "failures": [_failures(group, stage, run) for group in stage.scan.failures] if stage.scan else [],
    }


def _published(note: BenchmarkNote) -> dict[str, Any]:
    return {
        "benchmark": note.benchmark,
        "comparable": note.comparable,
        "departures": list(note.departures),
        "remarks": list(note.remarks),
        "scores": [{**asdict(row.score), "ours": _ours(row), "missing": row.missing} for row in note.rows],
    }


def _ours(row: PublishedFigure) -> Any:
    return row.ours.model_dump() if isinstance(row.ours, Interval) else row.ours


def _failures(group: FailureGroup, stage: StageResult, run: ReportInput) -> dict[str, Any]:
    return {
        "class": group.kind.value,
        "name": FAILURES[group.kind][0],
        "episodes": group.count,
        "share": group.share,
        "stop_reasons": group.stops,
        "examples": [
            {
                "id": example.record.id,
                "question": cut(example.record.question, _SHOWN),
                "answer": cut(example.answer, _SHOWN),
                "expected": None
                if example.record.ground_truth is None
                else cut(gold_text(example.record.ground_truth), _SHOWN),
                "evidence": cut(example.record.verdict.evidence if example.record.verdict else "", _SHOWN),
                "error": cut(example.record.error, _SHOWN),
                "link": run.links.to(example.record.id, stage.episodes)
                if run.links and stage.episodes
                else None,
            }
            for example in group.examples
        ],
    }


def _pair(pair: Pair, run: ReportInput) -> dict[str, Any]:
    return {
        "title": pair.title,
        "question": cut(pair.episodes[0][1].question, _SHOWN),
        "episodes": [
            {"stage": name, "id": record.id, "passed": passed(record)} for name, record in pair.episodes
        ],
    }


def write_report(run: ReportInput, path: str | Path) -> Path:
    """Write the page to ``path``, and the same as Markdown and JSON beside it (``.md``, ``.json``); all or none.

    The page needs no network and no script.

    Raises:
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    target = Path(path)
    texts = {
        target: render_report(run),
        target.with_suffix(".md"): render_markdown(run),
        target.with_suffix(".json"): json.dumps(report_data(run), indent=2) + "\n",
    }
    for file, text in texts.items():
        write_page(file, text)
    return target


def write_run_report(run_dir: str | Path, path: str | Path, *, view_port: int = VIEW_PORT) -> Path:
    """Write the report of a run folder or of one evaluation's ``output_dir``; see :func:`write_report`.

    Raises:
        DataError: The folder holds nothing to report, or a file in it is broken.
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    return write_report(read_run(Path(run_dir), view_port=view_port), path)


def write_comparison(
    folders: Sequence[Path], path: str | Path, *, anyway: bool = False, view_port: int = VIEW_PORT
) -> Path:
    """Write the report of several evaluations, each beside the first; see :func:`write_report`.

    Raises:
        ConfigError: Settings differ that are not the model's, and not ``anyway``.
        DataError: A folder is no evaluation, or two have no question in common.
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    return write_report(read_comparison(folders, anyway=anyway, view_port=view_port), path)
