"""``afm reproduce``: check what is missing, then run the stages. A finished stage finds its results and ends at once."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from afm.cli.options import configs_folder
from afm.cli.reproduce_stages import (
    AGENTS,
    NAMES,
    ChainStage,
    Reproduction,
    StageCommand,
    check_overrides,
    process_environment,
)
from afm.cli.reproduce_word_problems import WORD_PROBLEMS, WordProblems
from afm.errors import ConfigError, EngineError, UsageError, suggestion
from afm.findings import lock_advice

_KNOWN = AGENTS | WORD_PROBLEMS
_READY = "ready: "
_ABSENT = ("tools", "packages", "judge")
"""Findings of `afm doctor` that are warnings there, because another machine may run the job, but stop a run here."""
_NO_GPU = (
    "this machine has no GPU (no nvidia-smi); TINY=1 runs the chain on a CPU (svamp and gsm8k: --size 135m)"
)
_NO_ENGINE = f"neither vllm nor sglang is installed; {lock_advice('gpu-rl-vllm')}"


_SizeOption = Annotated[
    str,
    typer.Option(
        envvar="SIZE",
        help="Size of the model: 3b, 7b or 32b; for svamp and gsm8k 135m (on a CPU) or 1.5b "
        "[default: 7b, or 135m for svamp and gsm8k].",
    ),
]
_BenchmarksOption = Annotated[
    str,
    typer.Option(
        envvar="BENCHMARKS", help="Names of benchmarks, separated by spaces [default: all of the agent]."
    ),
]


_RootOption = Annotated[
    Path | None,
    typer.Option(
        envvar="ROOT",
        file_okay=False,
        help="Folder of data, models and runs [default: this folder, or runs/reproduce/AGENT with --tiny].",
    ),
]


def reproduce(
    agent: Annotated[str, typer.Argument(help=f"One of {', '.join(_KNOWN)}.")],
    further: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STAGE.KEY=VALUE",
            help="Overrides of a stage, for example rl.ray_address=node0:6379 eval.limit=10.",
        ),
    ] = None,
    size: _SizeOption = "",
    first: Annotated[
        str, typer.Option("--from", envvar="FROM", help=f"First stage to run: {', '.join(NAMES)}.")
    ] = NAMES[0],
    benchmarks: _BenchmarksOption = "",
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            envvar="TINY",
            help="Run the same stages on a CPU, with generated rows and a tiny model.",
        ),
    ] = False,
    root: _RootOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the commands of each stage and what is missing; run nothing."),
    ] = False,
) -> None:
    """Reproduce one of AFM's agents from its published data.

    The stages are download, prepare, sft, rl, eval and report. For svamp and gsm8k the report compares a general model
    before SFT, after SFT and after RL.

    If anything is missing, the command lists it before the first stage, with exit status 1. If interrupted, run the
    same command again to resume.
    """
    run = _reproduction(agent, further or [], size, benchmarks.split(), root, tiny=tiny)
    if first not in NAMES:
        raise UsageError(f"--from (FROM) {first}: no such stage; {suggestion(first, NAMES)}")
    stages = run.stages()
    passed, ahead = stages[: NAMES.index(first)], stages[NAMES.index(first) :]
    missing = [
        f"{path}: missing, stage {stage.name} makes it"
        for stage in passed
        for path in stage.makes
        if not path.exists()
    ]
    if dry_run or not (tiny or missing):
        missing += _find_missing(run, ahead, show=dry_run)
    for text in missing:
        print(f"error: this would not start: {text}", file=sys.stderr)
    if missing:
        raise typer.Exit(1)
    if not dry_run:
        for number, stage in enumerate(ahead, NAMES.index(first) + 1):
            _run_stage(run, stage, f"[{number}/{len(NAMES)}] {stage.name}")


def _reproduction(
    agent: str, further: list[str], size: str, benchmarks: list[str], root: Path | None, *, tiny: bool
) -> Reproduction:
    if agent not in _KNOWN:
        raise UsageError(f"AGENT {agent}: no such agent; {suggestion(agent, _KNOWN)}")
    chosen = _KNOWN[agent]
    size = size or chosen.usual_size
    if size not in chosen.sizes:
        raise UsageError(
            f"--size (SIZE) {size}: {agent} is published in other sizes; expected {' or '.join(chosen.sizes)}"
        )
    configs = configs_folder()
    if tiny and agent in WORD_PROBLEMS:
        raise UsageError(f"--tiny (TINY) is not for {agent}; --size {chosen.usual_size} runs on a CPU")
    if tiny:
        place = (root or Path("runs/reproduce") / agent).resolve()
        sets = _rehearsal().make_repositories(chosen.short, place / "hub", configs)
        size = "tiny"
    else:
        place, sets = (root or Path.cwd()).resolve(), configs / f"data/{agent}.yaml"
    kind = WordProblems if agent in WORD_PROBLEMS else Reproduction
    return kind(chosen, place, configs.parent, size, tiny, sets, check_overrides(further), tuple(benchmarks))


def _find_missing(run: Reproduction, stages: Sequence[ChainStage], *, show: bool) -> list[str]:
    """Return everything that is missing. With ``show``, also print the commands."""
    from afm.findings import has_gpu

    trains = any(stage.name in ("sft", "rl", "eval") for stage in stages)
    missing = [] if not run.on_gpu or not trains or has_gpu() else [_NO_GPU]
    if show:
        for stage in stages:
            print(f"# {stage.name}", *map(_command_line, stage.commands), sep="\n", flush=True)
    made: list[Path] = []
    for stage in stages:
        check = stage.commands[0].check  # the stage's other commands differ only in their data
        if check and not run.tiny:
            print(f"# checking {stage.name}: `afm doctor` loads its engine, up to two minutes", flush=True)
            errors = list(_errors(run.python(stage.name), check, made))
            missing += [f"{stage.name}: {text}" for text in [*errors, *_later_needs(run, stage, errors)]]
        made += stage.makes
    if show and not run.tiny and stages[0].name == "download":
        download = _command_line(stages[0].commands[0])
        print(f"# not checked: whether the files can be downloaded; try: {download} --dry-run")
    return list(dict.fromkeys(missing))


def _later_needs(run: Reproduction, stage: ChainStage, errors: Sequence[str]) -> Iterator[str]:
    """Yield needs that `afm doctor` sees only after earlier stages, which may take days, have made rows and model."""
    if stage.name == "eval" and run.serves and not _serves_models(run):
        yield _NO_ENGINE
    asks = run.agent.judged and stage.name in ("rl", "eval") and not run.own_judge(stage.name)
    if asks and not any(text.startswith("judge: ") for text in errors):
        yield from _judge()


def _judge() -> Iterator[str]:
    from afm.settings import load_settings
    from afm.tools.health import unanswered

    url = load_settings().grm_base_url
    if url is None:
        yield "judge: no endpoint; set GRM_BASE_URL, GRM_API_KEY and GRM_MODEL_NAME (docs/judge.md)"
    elif why := asyncio.run(unanswered(url)):
        yield f"judge: no answer from {url} ({why}); start it, or correct its address"


def _serves_models(run: Reproduction) -> bool:
    engines = "import sys, importlib.util as u; sys.exit(not any(map(u.find_spec, ('vllm', 'sglang'))))"
    return subprocess.run([run.python("eval"), "-c", engines], check=False).returncode == 0


def _errors(python: Path, check: Sequence[str], made: Sequence[Path]) -> Iterator[str]:
    """Yield what `afm doctor` reports as wrong or missing, except paths that earlier stages make."""
    words = [str(python), "-P", "-m", "afm.cli.main", "doctor", *check, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]
    except ValueError:
        yield (done.stderr.strip().splitlines() or ["`afm doctor` printed nothing"])[-1]
        return
    coming = {str(path.parent) for path in made} | {str(path) for path in made}
    for finding in findings:
        text = "; ".join(part for part in (finding["why"], finding["next_step"]) if part)
        absent = finding["subject"] in _ABSENT or "ray_address" in text
        wrong = finding["status"] == "fail" or (finding["status"] == "warn" and absent)
        if wrong and "without a key" not in text and not any(path in text for path in coming):
            yield f"{finding['subject']}: {text}"


def _command_line(command: StageCommand) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.variables.items()]
    return " ".join([*variables, shlex.join(command.words)])


def _rehearsal() -> ModuleType:
    """Return the module with the repositories, servers and model of ``TINY=1``."""
    if (folder := str(configs_folder().parent / "examples/rehearsal")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("rehearsal")


def _run_stage(run: Reproduction, stage: ChainStage, title: str) -> None:
    print(title, flush=True)
    began = time.monotonic()
    if run.tiny and stage.name == "sft":
        _rehearsal().make_start_model(run)
    if stage.name == "report":
        _link_runs(run)
    around = _rehearsal().serving(run, stage.name, run.root / "hub") if run.tiny else nullcontext()
    with around, _served_model(run, stage) as commands:
        for command in commands:
            print(f"  {_command_line(command)}", flush=True)
            done = subprocess.run(
                command.words,
                env=process_environment(command.variables, run.python(stage.name)),
                cwd=run.project,
                check=False,
            )
            if done.returncode != 0:
                raise EngineError(
                    f"stage {stage.name} ended with status {done.returncode}; run the same command again to resume there"
                )
    print(f"  {stage.name}: {time.monotonic() - began:.0f} s", flush=True)
    for path in stage.makes:
        if not path.exists():
            raise EngineError(f"stage {stage.name} succeeded but did not write {path}")


@contextmanager
def _served_model(run: Reproduction, stage: ChainStage) -> Iterator[Sequence[StageCommand]]:
    """Yield the stage's commands. An evaluation on GPUs gets a model server, which stops at the end of the block."""
    if not run.serves or stage.name != "eval" or all(path.exists() for path in stage.makes):
        yield stage.commands
        return
    if not _serves_models(run):
        raise ConfigError(f"evaluation: {_NO_ENGINE}")
    words = ["afm", "serve", "model", str(run.model), "--name", run.model.name]
    words += [f"--replicas={os.environ.get('REPLICAS', '1')}"]
    words += [f"--tensor-parallel={os.environ.get('TENSOR_PARALLEL', '1')}"]
    env = process_environment({}, run.python(stage.name))
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                print(f"  {line}", end="", flush=True)
                if line.startswith(_READY):
                    urls = next(word for word in shlex.split(line) if word.startswith("model="))
                    yield run.stages(urls.removeprefix("model="))[NAMES.index("eval")].commands
                    return
            raise EngineError("the model's server did not start; see its output above")
        finally:
            server.terminate()


def _link_runs(run: Reproduction) -> None:
    """Link both training runs next to the evaluations, where the report looks for their curves."""
    for name, target in (("sft", run.sft_model), ("rl", run.rl_run)):
        link = run.results / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, run.results))
