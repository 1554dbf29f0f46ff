"""``afm eval``: run a benchmark, resumable, and print its figures."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from afm.evaluation import Metrics
    from afm.evaluation.config import EvalConfig

_PLAIN_INTERVAL_S = 10.0


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
    if settings.tools is not None:
        load_tools(settings.tools)
    load_reward(settings.rewards)
    tasks = load_tasks(settings)
    print(f"# agent {spec.name} ({spec.digest}), {limits.max_turns} tool calls at most")
    print(f"# {len(tasks)} tasks x {settings.rounds} rounds into {settings.out_dir}; nothing was run")


def _run(settings: EvalConfig) -> Metrics:
    from afm.evaluation.job import run_job

    try:
        with _Counter(settings.name) as counter:
            return asyncio.run(run_job(settings, on_progress=counter.show))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues in {settings.out_dir}", file=sys.stderr)
        raise typer.Exit(130) from None


class _Counter:
    """A bar on a terminal, a plain line now and then elsewhere; both on standard error."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last = 0.0
        self._first: int | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> _Counter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int) -> None:
        if self._first is None:
            self._first = done
            if done:
                print(f"{self._title}: {done} of {total} episodes were finished before", file=sys.stderr)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            return
        now = time.monotonic()
        if done == total or now - self._last >= _PLAIN_INTERVAL_S:
            self._last = now
            print(f"{self._title}: {done} of {total} episodes", file=sys.stderr, flush=True)


def _summary(settings: EvalConfig, metrics: Metrics) -> None:
    from afm.evaluation.words import number, percent

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
    print(f"\nepisodes: {settings.out_dir}/episodes.jsonl\nnext: afm report {settings.out_dir}")
