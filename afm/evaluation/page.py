"""The page itself: what a report shows, laid out as one HTML text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from afm.agents import AgentSpec
from afm.evaluation.blocks import Block, blocks_of, role_colours
from afm.evaluation.charts import draw
from afm.evaluation.metrics import passed
from afm.evaluation.report_input import Pair, ReportInput
from afm.evaluation.words import (
    difference_words,
    hallucination_words,
    headline,
    number,
    percent,
    points,
    rounds_words,
    solved_words,
)
from afm.trajectory.record import Record


@dataclass(frozen=True, slots=True)
class _Panel:
    stage: str
    record: Record
    passed: bool | None
    blocks: Sequence[Block]


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
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("afm.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "number": number,
        "rounds": rounds_words,
        "solved": solved_words,
        "hallucination": hallucination_words,
    }
    story = run.tool_story and tuple(run.stage(name) for name in run.tool_story)
    return environment.get_template("report.html.j2").render(
        run=run,
        headline=headline(run),
        difference_words=difference_words(run.difference) if run.difference else "",
        story=story,
        pictures=[draw(curve) for curve in run.curves],
        problems=[_problem(pair, run.spec) for pair in run.pairs],
        colours=role_colours(run.spec) if run.spec else {},
    )


def _problem(pair: Pair, agent: AgentSpec | None) -> _Problem:
    spec = pair.spec or agent
    first = pair.episodes[0][1]
    return _Problem(
        title=pair.title,
        question=first.question,
        prompt=spec.user_message(first.question) if spec else "",
        gold=_gold_text(first.ground_truth),
        panels=[
            _Panel(name, record, passed(record), blocks_of(record, spec)) for name, record in pair.episodes
        ],
    )


def _gold_text(gold: Any) -> str:
    """The expected answer for a person: alternatives joined, anything longer as JSON."""
    if isinstance(gold, dict) and set(gold) <= {"target", "question"}:
        gold = gold.get("target", "")
    if isinstance(gold, list | tuple) and all(isinstance(part, str) for part in gold):
        return " | ".join(gold)
    text = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else f"{text[:400]}..."
