"""Reports of runs: one self-contained HTML page, and the same as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from pydantic import BaseModel

from afm.evaluation.failures import Example, Failure, FailureGroup
from afm.evaluation.metrics import passed
from afm.evaluation.page import InMarkdown, blocks_of, draw, plural, role_colours, template, write_page
from afm.evaluation.report_folder import read_comparison, read_run
from afm.evaluation.report_input import VIEW_PORT, Pair, ReportInput, StageResult
from afm.evaluation.wording import (
    cost_cells,
    cut,
    difference_words,
    dollars,
    figure,
    headline,
    metric_lines,
    number,
    ours_words,
    percent,
    points,
    savings_words,
    stop_word,
    stops_words,
)
from afm.terminal import visible
from afm.trajectory.record import Record


def _html(run: ReportInput) -> str:
    story = run.tool_story and tuple(run.stage(name) for name in run.tool_story)
    text: str = template("report.html.j2", **_FILTERS | _HTML_FILTERS).render(
        run=run,
        **_shared(run),
        story=story,
        pictures=[draw(curve) for curve in run.curves],
        problems=[_problem(pair, run) for pair in run.pairs],
        colours=role_colours(run.spec) if run.spec else {},
    )
    return visible(text)


def _markdown(run: ReportInput) -> str:
    """Render figures, failures and facts. Trajectories are links, curves are tables."""
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
    """Group the stages of published benchmarks by benchmark."""
    by_name: dict[str, list[StageResult]] = {}
    for stage in stages:
        if stage.published is not None:
            by_name.setdefault(stage.published.benchmark, []).append(stage)
    return list(by_name.items())


def _by_class(
    failures: Sequence[tuple[StageResult, Sequence[FailureGroup]]],
) -> list[tuple[Failure, list[FailureGroup | None]]]:
    """Return every class that occurs, in the order of the classes, with the group of each stage."""
    tables = [{group.kind: group for group in groups} for _, groups in failures]
    return [
        (kind, [table.get(kind) for table in tables])
        for kind in Failure
        if any(kind in table for table in tables)
    ]


def _problem(pair: Pair, run: ReportInput) -> dict[str, Any]:
    """Return what the template needs of a question and its episodes."""
    first = pair.episodes[0][1]
    spec = pair.spec or (run.agents.declared(first) if run.agents else run.spec)
    asked_otherwise = {stage.name for stage in run.stages if not stage.own_prompt}
    own = asked_otherwise.isdisjoint(name for name, _ in pair.episodes)
    files = {stage.name: stage.episodes for stage in run.stages}
    panels = [
        {
            "stage": name,
            "record": record,
            "passed": passed(record),
            "blocks": blocks_of(record, spec),
            "link": _link(run, record, files.get(name)),
        }
        for name, record in pair.episodes
    ]
    return {
        "title": pair.title,
        "question": first.question,
        "prompt": spec.user_message(first.question) if spec and own else "",
        "gold": _gold_text(first.ground_truth),
        "panels": panels,
    }


def _link(run: ReportInput, record: Record, file: Path | None) -> str | None:
    return run.links.to(record.id, file) if run.links and file else None


def _gold_text(gold: Any) -> str:
    """Return the expected answer as text: alternatives joined, anything else as JSON."""
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
    "figure": figure,
    "dollars": dollars,
    "lines": metric_lines,
    "sentence": lambda line: line[:1].upper() + line[1:],
    "difference": difference_words,
    "ours": ours_words,
    "stops": stops_words,
    "stop": stop_word,
    "plural": plural,
    "cost": cost_cells,
    "savings": savings_words,
    "gold": _gold_text,
    "cut": cut,
    "by_class": _by_class,
    "address": InMarkdown,
}


def _unbroken(value: float | None) -> str:
    """Format a share with a percent sign that stays on its line."""
    return percent(value).replace(" ", "\N{NO-BREAK SPACE}")


def _breakable(text: str) -> str:
    """Return text whose paths may break after a slash."""
    return escape(text).replace("/", Markup("/<wbr>"))


_HTML_FILTERS: dict[str, Callable[..., Any]] = {"percent": _unbroken, "breakable": _breakable}

_SHOWN = 400


def _json(run: ReportInput) -> str:
    """Render figures as in metrics.json: shares between 0 and 1, published scores in percent. Long text is cut."""
    data = {
        "title": run.title,
        "kind": run.kind,
        "headline": headline(run),
        "stages": [_stage(stage, run) for stage in run.stages],
        "differences": [
            {"before": difference.before, "after": difference.after, **difference.result.model_dump()}
            | {"caveats": difference.caveats, "prices": difference.prices}
            for difference in run.differences
        ],
        "savings": run.savings,
        "curves": run.curves,
        "health": run.health,
        "episodes": [
            {
                "title": pair.title,
                "question": cut(pair.episodes[0][1].question, _SHOWN),
                "episodes": [
                    {"stage": name, "id": record.id, "passed": passed(record)}
                    for name, record in pair.episodes
                ],
            }
            for pair in run.pairs
        ],
        "facts": {fact.label: fact.value for fact in run.facts},
        "commands": run.commands,
        "notes": run.notes,
        "view": run.links.command if run.links else None,
    }
    return json.dumps(data, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> dict[str, Any]:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else asdict(value)


def _stage(stage: StageResult, run: ReportInput) -> dict[str, Any]:
    note, groups = stage.published, stage.scan.failures if stage.scan else ()
    return {
        "name": stage.name,
        "note": stage.note,
        "metrics": stage.metrics,
        "published": note
        and {
            "benchmark": note.benchmark,
            "comparable": note.comparable,
            "departures": note.departures,
            "remarks": note.remarks,
            "scores": [asdict(row.score) | {"ours": row.ours, "missing": row.missing} for row in note.rows],
        },
        "failures": [
            {
                "class": group.kind,
                "name": group.kind.label,
                "episodes": group.count,
                "share": group.share,
                "stop_reasons": dict(group.stops.most_common()),
                "examples": [_example(example, stage, run) for example in group.examples.values()],
            }
            for group in groups
        ],
    }


def _example(example: Example, stage: StageResult, run: ReportInput) -> dict[str, Any]:
    record = example.record
    texts = {
        "question": record.question,
        "answer": example.answer,
        "evidence": record.verdict.evidence if record.verdict else "",
        "error": record.error,
    }
    gold = None if record.ground_truth is None else cut(_gold_text(record.ground_truth), _SHOWN)
    return {
        "id": record.id,
        **{key: cut(text, _SHOWN) for key, text in texts.items()},
        "expected": gold,
        "link": _link(run, record, stage.episodes),
    }


def write_report(run: ReportInput, path: str | Path) -> Path:
    """Write the page to ``path``, and the same as ``.md`` and ``.json`` next to it.

    The page needs no network and no script. All texts are rendered before a file is replaced.

    Raises:
        MissingExtraError: There are curves, but matplotlib is not installed.
    """
    target = Path(path)
    texts = {
        target: _html(run),
        target.with_suffix(".md"): _markdown(run),
        target.with_suffix(".json"): _json(run),
    }
    for file, text in texts.items():
        write_page(file, text)
    return target


def write_run_report(run_dir: str | Path, path: str | Path, *, view_port: int = VIEW_PORT) -> Path:
    """Call :func:`write_report` for a run folder or the ``output_dir`` of one evaluation. Raises as :func:`read_run`."""
    return write_report(read_run(Path(run_dir), view_port=view_port), path)


def write_comparison(
    folders: Sequence[Path], path: str | Path, *, anyway: bool = False, view_port: int = VIEW_PORT
) -> Path:
    """Call :func:`write_report` for several evaluations, each compared with the first. Raises as :func:`read_comparison`."""
    return write_report(read_comparison(folders, anyway=anyway, view_port=view_port), path)
