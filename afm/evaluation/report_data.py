"""A report as data, for programs: everything the page shows but the trajectories themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from afm.evaluation.beside import BenchmarkNote, Beside
from afm.evaluation.failures import FailureGroup
from afm.evaluation.metrics import passed
from afm.evaluation.page import gold_text
from afm.evaluation.report_input import Pair, ReportInput, StageResult
from afm.evaluation.statistics import Interval
from afm.evaluation.words import FAILURES, cut, headline

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
                "before": one.before,
                "after": one.after,
                **one.result.model_dump(),
                "caveats": list(one.caveats),
                "prices": one.prices,
            }
            for one in run.differences
        ],
        "savings": [one.model_dump(mode="json") for one in run.savings],
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


def _ours(row: Beside) -> Any:
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
