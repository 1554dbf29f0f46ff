"""``afm quickstart``, from nothing to a report, and ``afm init``, a starter for your own task."""

from __future__ import annotations

import csv
import os
import random
import shlex
import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import afm
from afm.choices import WorldKind
from afm.cli.options import MAX_SEED, configs_folder, file_option
from afm.cli.train import model_source
from afm.errors import UsageError
from afm.terminal import ProgressView, afm_command

if TYPE_CHECKING:
    from afm.cli.pipeline import Quickstart
    from afm.cli.recipes import Recipe
    from afm.evaluation import Metrics


_QUIET = {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that silence progress bars and warnings of libraries, unless they are set."""


def quickstart(
    world: Annotated[
        WorldKind,
        typer.Option(
            help="math: word problems and programs; wiki: questions and an encyclopaedia to search."
        ),
    ] = WorldKind.MATH,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Pre-trained model to start from: a folder, a GGUF file, ORGANISATION/NAME on the Hub, or smollm2 "
            "[default: 0.7 M parameters with random weights].",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run [default: runs/quickstart, with -wiki or -base added for these]."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the world, the model and all sampling.")
    ] = 0,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Run the same stages with very few training steps, in about 3 minutes."),
    ] = False,
    real_data: Annotated[
        Path | None,
        file_option(
            "Another benchmark file (parquet or JSONL) to evaluate on; works on a finished run [default: none]."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser at the end.")] = False,
) -> None:
    """Run the whole path on a CPU, from questions to a report.

    A scripted team answers questions. Its trajectories train a small model by SFT, then RL. Both models are evaluated.

    It takes 7 to 9 minutes on 2 idle cores, with --world wiki 20 to 26. With --base it takes longer and prints an
    estimate first. If interrupted, run the same command again to resume.
    """
    from afm.cli.pipeline import STAGES_FILE, Quickstart, read_stages

    os.environ |= _QUIET | os.environ
    recipe = _recipe(world, base)
    folder = (output_dir or recipe.folder).resolve()
    real = real_data.resolve() if real_data else None
    view = ProgressView()
    plan = recipe.smoke if smoke else recipe.full
    job = Quickstart(folder, configs_folder(), recipe, plan, seed, real, view.update, base)
    job.check_real_data()
    settings = {"seed": seed, "smoke": smoke, "recipe": job.recipe_digest()} | _choices(world, base)
    before = sum(stage.seconds for stage in read_stages(folder / STAGES_FILE))
    _run(job, settings, view)
    job.report()
    _summary(job, sum(stage.seconds for stage in read_stages(folder / STAGES_FILE)) - before, before)
    if show:
        typer.launch(job.report_path.as_uri())


def _run(job: Quickstart, settings: dict[str, Any], view: ProgressView) -> None:
    from afm.cli.pipeline import run_stages

    try:
        run_stages(job.stages(), job.out, settings, view.line)
    except KeyboardInterrupt:
        view.line("stopped; run the same command again to resume")
        raise typer.Exit(130) from None


def _choices(world: WorldKind, base: str | None) -> dict[str, str]:
    """Return world and base as settings, without the defaults."""
    choices = {} if world is WorldKind.MATH else {"world": world.value}
    return choices if base is None else choices | {"base": str(model_source(base))}


def _recipe(world: WorldKind, base: str | None) -> Recipe:
    from afm.cli.recipes import FROM_BASE, RECIPES

    if base is None:
        return RECIPES[world]
    if world not in FROM_BASE:
        raise UsageError(f"--base: no recipe for the world {world.value!r}; use --world math")
    return FROM_BASE[world]


def _summary(job: Quickstart, seconds: float, before_s: float) -> None:
    from afm.evaluation.report_folder import read_stages

    earlier = f", after {before_s / 60:.1f} minutes in earlier starts" if before_s else ""
    print(f"\nDone in {seconds / 60:.1f} minutes{earlier}.\n")
    print(f"  {'stage':24} {'pass@1':>7}  {'95 % interval':>18}  {'format':>6}  {'tool calls':>10}")
    for stage in read_stages(job.out):
        print(f"  {stage.name:24} {_stage_figures(stage.metrics)}")
    print(f"\nReport: {job.report_path}\n\nNext:")
    for line in _next_steps(job):
        print(f"  {line}")
    print()


def _next_steps(job: Quickstart) -> Iterator[str]:
    recipe = job.recipe
    if server := recipe.server_command(job.world):
        yield f"{afm_command()} {shlex.join(server)}     # leave it running; then in another terminal:"
    ask = ["ask", job.example(), "--agent", recipe.agent, "--model", str(job.out / "rl")]
    if recipe.world is not WorldKind.MATH:
        ask += ["--tools", str(job.tools_config)]
    yield f"{afm_command()} {shlex.join(ask[:2])} \\\n      {shlex.join(ask[2:])}"
    yield f"{afm_command()} view {shlex.quote(str(job.out))} --open     # every episode, in a browser"
    again = "./quickstart.sh" if recipe.world is WorldKind.MATH else f"./quickstart.sh --world {recipe.world}"
    if job.base is not None:
        again += f" --base {shlex.quote(job.base)}"
    yield f"{again} --seed 1 --output-dir runs/seed1     # again, with other random numbers"
    files = f"configs/tiny/sft/{recipe.training}.yaml, configs/tiny/rl/{recipe.training}.yaml"
    yield f"the recipe: {files}"
    yield "on GPUs: docs/tutorials/nodes.md"


def _stage_figures(metrics: Metrics) -> str:
    from afm.evaluation.wording import percent

    score = metrics.pass_at_1
    if score is None:
        return "no episode was scored"
    interval = f"{percent(score.low)} to {percent(score.high)}"
    valid, calls = percent(metrics.format_valid or 0, 0), metrics.tool_calls or 0
    return f"{percent(score.value):>7}  {interval:>18}  {valid:>6}  {calls:10.2f}"


_SIZES = {"train": 12000, "rl": 512, "heldout": 100}
"""Number of questions for the team, reinforcement learning and evaluation. Each date is in one set only."""
_FILES = (".yaml", ".yml", ".json", ".jsonl", ".csv", ".py")
"""Endings of files, which the folder of a task does not have."""
_FIRST_DAY, _DAYS = date(1900, 1, 1), 73_000
_COLUMNS = ("question", "answer", "data_source")


def init(
    folder: Annotated[Path, typer.Argument(help="New or empty folder, for example my_task.")],
) -> None:
    """Write a starter project for your own task.

    It holds an agent, a tool, a reward, a team, questions and recipes. Its README lists the commands, from the
    questions to a report. Change one file at a time.

    Example: afm init my_task
    """
    state = ""
    new = not (folder.exists() or folder.is_symlink())
    if not new and (not folder.is_dir() or any(folder.iterdir())):
        state = "is a folder with files in it" if folder.is_dir() else "is a file"
    elif folder.suffix in _FILES and new:
        state = "is the name of a file"
    if state:
        raise UsageError(f"{folder} {state}; expected a new or an empty folder, for example {_free(folder)}")
    try:
        _copy(Path(afm.__file__).parent / "starter", folder)
        _write_questions(folder / "questions")
    except BaseException:  # half a starter would stand in the way of the same command
        for path in folder.glob("*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)
        if new and folder.is_dir():
            folder.rmdir()
        raise
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(file)
    print(
        f"\nnext: cd {shlex.quote(str(folder))} && {afm_command()} doctor tools.yaml     (README.md has all commands)"
    )


def _free(folder: Path) -> Path:
    """Return a name like ``folder``, without the ending of a file, that is not taken."""
    name = "my_task" if folder.name in ("", "..") else folder.stem if folder.suffix in _FILES else folder.name
    names = (name, *(f"{name}_{number}" for number in range(2, 1_000)))
    place = folder if folder.name in ("", "..") else folder.parent
    return next(free for free in map(place.joinpath, names) if not free.exists())


def _copy(source: Path, folder: Path) -> None:
    """Copy the files, so that an error names the one that failed."""
    for file in source.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def _write_questions(folder: Path) -> None:
    """Write the questions as tables. They are the same in every starter."""
    folder.mkdir()
    days = random.Random(0).sample(range(_DAYS), sum(_SIZES.values()))
    for name, count in _SIZES.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(_COLUMNS)
            for _ in range(count):
                day = _FIRST_DAY + timedelta(days.pop())
                table.writerow((f"Which weekday was {day}?", f"{day:%A}", "weekdays"))
