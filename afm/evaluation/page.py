"""The page itself: what a report shows, laid out as one HTML text, or as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from afm.evaluation.blocks import Block, blocks_of, role_colours
from afm.evaluation.charts import draw
from afm.evaluation.failures import Failure, FailureGroup
from afm.evaluation.metrics import passed
from afm.evaluation.report_input import Pair, ReportInput, StageResult
from afm.evaluation.words import (
    FAILURES,
    agent_h_words,
    agent_words,
    agreement_words,
    best_of_words,
    cost_cells,
    cut,
    difference_words,
    dollars,
    hallucination_words,
    headline,
    money_words,
    number,
    ours_words,
    percent,
    points,
    rounds_words,
    savings_words,
    solved_words,
    stops_words,
    t_eval_words,
    unseen_words,
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
    text: str = _template("report.html.j2", autoescape=True).render(
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
    text: str = _template("report.md.j2", finalize=in_markdown).render(run=run, **_shared(run))
    return visible(text)


def in_markdown(value: Any) -> str:
    """Text that Markdown shows as it is, on one line."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", flat.replace("&", "&amp;"))


def _template(name: str, **options: Any) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("afm.evaluation"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters |= _FILTERS
    return environment.get_template(name)


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
    found: dict[str, list[StageResult]] = {}
    for stage in stages:
        if stage.published is not None:
            found.setdefault(stage.published.benchmark, []).append(stage)
    return list(found.items())


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
    "rounds": rounds_words,
    "solved": solved_words,
    "money": money_words,
    "dollars": dollars,
    "hallucination": hallucination_words,
    "unseen": unseen_words,
    "difference": difference_words,
    "ours": ours_words,
    "stops": stops_words,
    "agent": agent_words,
    "chosen": best_of_words,
    "agreement": agreement_words,
    "t_eval": t_eval_words,
    "cost": cost_cells,
    "savings": savings_words,
    "agent_h": agent_h_words,
    "failure": FAILURES.__getitem__,
    "gold": gold_text,
    "cut": cut,
    "by_class": _by_class,
}
