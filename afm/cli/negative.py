"""``afm data negative``: samples that teach when not to call a tool."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import given_agent
from afm.errors import UsageError, suggestion

if TYPE_CHECKING:
    from afm.cli.progress import ProgressView
    from afm.datasets.negative import NegativeKind
    from afm.datasets.negative_set import NegativeSummary


_SHOW_EVERY = 500


class Absent(StrEnum):
    """Values of ``--absent``, as :class:`afm.datasets.negative.AbsentAnswer`."""

    ANSWER = "answer"
    EXPLAIN = "explain"


class Direct(StrEnum):
    """Values of ``--direct``, as :class:`afm.datasets.negative.DirectAnswer`."""

    AGENT = "agent"
    PLAIN = "plain"


class OnBadRows(StrEnum):
    """What rows that are wrong lead to."""

    ERROR = "error"
    DROP = "drop"


def negative(
    records: Annotated[Path, typer.Argument(help="Trajectory JSONL.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder of the data set and its dataset_info.json.")],
    agent: Annotated[str, typer.Option(help="A shipped agent's name or a YAML.")] = "math",
    general: Annotated[
        Path | None,
        typer.Option(
            help="Questions that need no tool: JSONL of {question, answer} or {messages}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NUMBER",
            help="Rows of a kind for each trajectory with a tool call; may be given several times. "
            "Kinds: absent_not_needed, absent_needed, present_not_needed (0.1 each), present_needed (1).",
        ),
    ] = None,
    absent: Annotated[
        Absent,
        typer.Option(help="Where a tool is asked for that is not there: answer without it, or explain only."),
    ] = Absent.ANSWER,
    direct: Annotated[
        Direct,
        typer.Option(help="How the agent answers a general question: in its functions, or as plain text."),
    ] = Direct.AGENT,
    on_bad_rows: Annotated[
        OnBadRows, typer.Option(help="Stop at rows that are wrong, or go on without them.")
    ] = OnBadRows.ERROR,
    name: Annotated[str, typer.Option(help="Name of the data set for LLaMA-Factory.")] = "negative_agent_sft",
    seed: Annotated[int, typer.Option(help="Fixes every random choice.")] = 0,
) -> None:
    """Mix trajectories with samples that teach when not to call a tool, as a data set for `afm sft`.

    Four kinds: tools present or absent, needed or not. Rows that are wrong stand in `NAME.bad_rows.jsonl`.
    """
    from afm.cli.progress import ProgressView
    from afm.datasets.negative import AbsentAnswer, DirectAnswer, SampleMaker
    from afm.datasets.negative_set import write_negative
    from afm.datasets.negative_sources import NegativeSources

    view = ProgressView()

    def show(rows: int) -> None:
        if rows % _SHOW_EVERY == 0:
            view.update("rows read", rows, None)

    summary = write_negative(
        NegativeSources(records, general),
        SampleMaker(given_agent(agent), seed, AbsentAnswer(absent), DirectAnswer(direct)),
        out,
        name=name,
        ratios=_ratios(ratio or []),
        drop_bad_rows=on_bad_rows is OnBadRows.DROP,
        on_row=show,
    )
    _show(summary, view)


def _ratios(given: list[str]) -> dict[NegativeKind, float]:
    from afm.datasets.negative import NegativeKind
    from afm.datasets.negative_set import DEFAULT_RATIOS

    ratios = dict(DEFAULT_RATIOS)
    for pair in given:
        kind, _, number = pair.partition("=")
        if kind not in list(NegativeKind):
            raise UsageError(f"--ratio {pair}: {suggestion(kind, map(str, NegativeKind))}")
        try:
            ratios[NegativeKind(kind)] = float(number)
        except ValueError:
            raise UsageError(f"--ratio {pair}: expected a number, for example {kind}=0.2") from None
    return ratios


def _show(summary: NegativeSummary, view: ProgressView) -> None:
    view.line(f"{summary.path}: {sum(summary.rows.values())} rows")
    for kind, wanted in summary.wanted.items():
        rows = summary.rows[kind]
        short = f", {wanted} wanted: the sources hold no more" if rows < wanted else ""
        print(f"  {kind}: {rows}{short}")
    for reason, count in sorted(summary.unused.items()):
        print(f"  not used: {count} {reason}")
    if summary.bad_rows:
        print(f"  bad rows: {summary.bad_rows} left out; listed in {summary.report}")
