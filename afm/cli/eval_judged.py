"""``afm eval choose`` and ``agree``: what judges add to a finished evaluation."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.cli.options import afm_command
from afm.cli.progress import ProgressView

if TYPE_CHECKING:
    from afm.evaluation import Metrics

FolderArgument = Annotated[
    Path, typer.Argument(help="out_dir of a finished evaluation.", exists=True, file_okay=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print metrics.json at the end.")]


def choose(
    folder: FolderArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Of `best_of`, over those of the evaluation: sizes=[3] methods=[list,score] judge.model=NAME.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have a judge choose among the rounds of each question, without the gold answers: best-of-k.

    Needs a judge (GRM_BASE_URL, GRM_API_KEY, GRM_MODEL_NAME, or judge.url). Writes choices.jsonl and adds to metrics.json.
    What is in choices.jsonl is not asked again, so a run that was killed continues with the same command.
    """
    from afm.evaluation.best_of import CHOICES_FILE, choose
    from afm.evaluation.config import saved_section
    from afm.evaluation.judging import BestOfSettings

    wanted = saved_section(folder, "best_of", BestOfSettings, settings or [])
    _tell(_run(choose(folder, wanted, on_progress=_shown()), folder), folder, CHOICES_FILE, as_json=as_json)


def agree(
    folder: FolderArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Of `agreement`, over those of the evaluation: judges=[{model: NAME}] repeats=2 episodes=100.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have another judge, or the same one again, judge the answers: raw agreement and Cohen's kappa.

    Needs a judge (GRM_BASE_URL, GRM_API_KEY, GRM_MODEL_NAME, or judges[..].url). Writes opinions.jsonl and adds to
    metrics.json. What is in opinions.jsonl is not asked again.
    """
    from afm.evaluation.agreement import OPINIONS_FILE, AgreementSettings, agree
    from afm.evaluation.config import saved_section

    wanted = saved_section(folder, "agreement", AgreementSettings, settings or [])
    _tell(_run(agree(folder, wanted, on_progress=_shown()), folder), folder, OPINIONS_FILE, as_json=as_json)


def print_judged(metrics: Metrics) -> None:
    """best-of-k beside what chance and an oracle would choose, and how far judges agree."""
    from afm.evaluation.wording import agreement_words, best_of_words, ours, percent

    for one in metrics.best_of:
        print(f"  {best_of_words(one)}")
    for k in sorted({one.k for one in metrics.best_of}):
        oracle = metrics.pass_at_k_intervals.get(k)
        chance = metrics.pass_at_1.value if metrics.pass_at_1 else None
        print(
            f"    beside pass@{k} {ours(oracle) if oracle else '–'}, a choice by lot {percent(chance)}, "
            f"majority of {metrics.rounds} {percent(metrics.majority)}"
        )
    for pair in metrics.agreement:
        print(f"  {agreement_words(pair)}")


def _shown() -> Any:
    view = ProgressView(sys.stderr)

    def show(done: int, total: int) -> None:
        view.update("verdicts", done, total)

    return show


def _run(work: Coroutine[Any, Any, Metrics], folder: Path) -> Metrics:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues in {folder}", file=sys.stderr)
        raise typer.Exit(130) from None


def _tell(metrics: Metrics, folder: Path, file: str, *, as_json: bool) -> None:
    if as_json:
        print(metrics.model_dump_json(indent=2, ensure_ascii=True))
        return
    print_judged(metrics)
    print(f"\nverdicts: {folder / file}\nnext: {afm_command()} report {shlex.quote(str(folder))}")
