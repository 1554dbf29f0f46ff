"""``afm eval``: run a benchmark, resumable, and print its figures."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.progress import ProgressView
from afm.cli.project import afm_command
from afm.errors import ConfigError

if TYPE_CHECKING:
    from afm.evaluation import Metrics
    from afm.evaluation.config import EvalConfig


def evaluation(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the benchmark, e.g. configs/eval/aime24.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="For example model=DIR sampling.temperature=0.6 limit=10."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings, check them, run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json at the end.")] = False,
) -> None:
    """Evaluate a model with the agent's own loop; a run that was killed continues with the same command.

    Writes manifest.json, episodes.jsonl and metrics.json into out_dir.
    """
    from afm.evaluation.config import load_config

    settings = load_config(config, overrides or [])
    if dry_run:
        _dry_run(settings)
        return
    metrics = _run(settings)
    if as_json:
        print(metrics.model_dump_json(indent=2))
    else:
        _summary(settings, metrics)


def _dry_run(settings: EvalConfig) -> None:
    """Everything that can be checked without loading the model."""
    from afm.evaluation.config import dump_config
    from afm.evaluation.job import load_tasks
    from afm.rewards import load_reward
    from afm.tools import load_tools

    print(dump_config(settings), end="")
    spec = settings.spec()
    limits = settings.episode_limits(spec)
    folder = settings.model.folder
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"model.path: {folder} is no folder; expected a model's folder or an http(s) address"
        )
    if settings.tools_in_use is not None:
        load_tools(settings.tools_in_use)
    load_reward(settings.rewards)
    tasks = load_tasks(settings)
    print(f"# agent {spec.name} ({spec.digest}), {limits.max_turns} tool calls at most")
    print(f"# {len(tasks)} tasks x {settings.rounds} rounds into {settings.out_dir}; nothing was run")


def _run(settings: EvalConfig) -> Metrics:
    from afm.evaluation.job import run_job

    view = ProgressView(sys.stderr)

    def show(done: int, total: int) -> None:
        view.update(f"{settings.name}, episodes", done, total)

    try:
        return asyncio.run(run_job(settings, on_progress=show))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues in {settings.out_dir}", file=sys.stderr)
        raise typer.Exit(130) from None


def _summary(settings: EvalConfig, metrics: Metrics) -> None:
    from afm.evaluation.words import hallucination_words, number, percent

    score = metrics.pass_at_1
    if score is not None:
        name = f"avg@{metrics.rounds}" if metrics.rounds > 1 else "pass@1"
        interval = f"95 % interval {percent(score.low)} to {percent(score.high)}"
        print(f"{settings.name}: {name} {percent(score.value)} ({interval})")
    if metrics.rounds > 1:
        print(f"  pass@{metrics.rounds} {percent(metrics.pass_at_k[metrics.rounds])}")
    print(f"  {metrics.scored} of {metrics.episodes} episodes scored, {metrics.questions} questions")
    print(
        f"  format valid {percent(metrics.format_valid)}, tool calls {number(metrics.tool_calls)}, "
        f"agent tokens {number(metrics.agent_tokens)}, {number(metrics.seconds)} s an episode"
    )
    if words := hallucination_words(metrics):
        print(f"  {words}")
    print(
        f"\nepisodes: {settings.out_dir}/episodes.jsonl\nnext: {afm_command()} report {shlex.quote(str(settings.out_dir))}"
    )
