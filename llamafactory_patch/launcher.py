"""Start training runs: ``llamafactory-patch-cli`` (with all of ``llamafactory-cli``) and :func:`run_sft`."""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from afm.configuration import parse_yaml
from afm.errors import AfmError, ConfigError, UsageError
from afm.findings import has_gpu
from afm.memory_arithmetic import positive_variable
from afm.processes import KEPT_MEMORY, die_with_parent, follow_parent, run_logged
from afm.runs.folder import RunFolder
from afm.terminal import ProgressView
from llamafactory_patch import run_folder
from llamafactory_patch.checks import check_sources, check_trackers, stale_data, tracker_variables
from llamafactory_patch.config import SftJob, fsdp_settings, resolve
from llamafactory_patch.settings import SftSettings, split_config


@dataclass(frozen=True, slots=True)
class Node:
    """This node of a run; nodes are numbered from 0."""

    number: int = 0
    count: int = 1


def this_node(env: Mapping[str, str]) -> Node:
    """Read this node from ``NNODES`` and ``NODE_RANK``; a single node needs neither.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    positive_variable(env, "NPROC_PER_NODE", 1)
    count = positive_variable(env, "NNODES", 1)
    text = env.get("NODE_RANK") or ("0" if count == 1 else "")
    if not text.isascii() or not text.isdigit() or int(text) >= count:
        raise ConfigError(
            f"NODE_RANK: set it to the number of this node (scripts: RANK), a number below NNODES={count}; got {text!r}"
        )
    if count > 1 and not env.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR: set it to the host name of node 0, since NNODES={count}")
    return Node(int(text), count)


_TORCHRUN_VARIABLES = (
    "FORCE_TORCHRUN",
    "NNODES",
    "NODE_RANK",
    "NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LOCK_WAIT_S = 30.0
"""The processes of a killed training hold the lock until all of them have ended."""
_LOG_TAIL_BYTES = 1 << 16
_LAST_LINES = 15
_INTERRUPTED = 128 + signal.SIGINT
_RANK = "rank"
"""Argument that tells :func:`main` that torchrun has started it."""
_SHOWN_VARIABLES = (*_TORCHRUN_VARIABLES, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *KEPT_MEMORY)


def run_sft(
    config_path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False, echo: bool = True
) -> int:
    """Fine-tune a model, and return when the run ends.

    A child process tokenises the rows into ``output_dir/tokenized`` and trains. ``output_dir`` receives the model with
    its tokenizer, ``agent.yaml`` (if the configuration names an agent), ``sft_config.yaml`` (the configuration that the
    trainer got) and ``training.log``. The figures are in ``trainer_log.jsonl`` (one line per logged step: current_steps,
    loss, lr), ``data_statistics.json`` and ``data_examples.txt`` (the training data, also printed before the first step)
    and ``sft_manifest.json``. A finished training is not repeated. An interrupted training continues from its last
    complete checkpoint; ``overwrite_output_dir=true`` starts over. In a job of several nodes (``NNODES``,
    ``NODE_RANK``, ``MASTER_ADDR``), call this function on each node.

    Args:
        config_path: YAML of LLaMA-Factory's training arguments and :class:`llamafactory_patch.settings.SftSettings`.
        overrides: ``key=value`` pairs that replace keys of the YAML.
        dry_run: Print the resolved command and configuration, report what is missing, and start nothing.
        echo: Show the trainer's output on standard output. Otherwise show only steps, loss and the time left, as
            ``afm rl`` does.

    Returns:
        The trainer's exit status; 0 if there was nothing left to do. For a dry run, 1 if something is missing.

    Raises:
        ConfigError: The configuration or the description of this node is wrong, ``output_dir`` has another run, or
            another process trains into it.
        UsageError: An override is not ``key=value``.
    """
    job = resolve(config_path, overrides)
    node = this_node(os.environ)
    if dry_run:
        return _show(job, node)
    check_sources(job)
    _warn_about_prompts(job)
    check_trackers(job, os.environ)
    if run_folder.is_finished(job):
        print(f"{job.output_dir} is finished; for another run, choose another output_dir")
        return 0
    job.output_dir.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(job.output_dir, "output_dir")
    with folder.locked(name=f".sft.{node.number}.lock", wait_s=_LOCK_WAIT_S) as lock:
        note = run_folder.prepare(job, node=node.number, progress_bar=echo and sys.stdout.isatty())
        if note:
            print(note, flush=True)
        began = time.monotonic()
        log_name = f"training.node{node.number}.log" if node.number else "training.log"
        log_path = job.output_dir / log_name
        start = log_path.stat().st_size if log_path.exists() else 0
        status = _train(job, node, log_path, lock, echo=echo)
        if status == 0 and not node.number:
            run_folder.finish(job, seconds=time.monotonic() - began)
    if status == 0 and not node.number:
        print(f"model: {job.output_dir}", flush=True)
    elif status == _INTERRUPTED:
        print("stopped; run the same command again to resume", file=sys.stderr, flush=True)
    elif status != 0 and not echo:
        print(_reason(log_path, start, status), file=sys.stderr, flush=True)
    return status


def _train(job: SftJob, node: Node, log_path: Path, lock: int, *, echo: bool) -> int:
    """Run the trainer to its end, and return its exit status."""
    command, env, view = _command(job, node), os.environ | _variables(job, node), ProgressView()
    watch = None if echo else show_steps(job.output_dir / run_folder.HISTORY_FILE, view)
    if not echo:
        print(
            f"loading the rows and the model; the first step follows in about a minute. Log: {log_path}",
            flush=True,
        )
    status = run_logged(command, env=env, log_path=log_path, keep_open=(lock,), watch=watch)
    view.close()
    return status


def show_steps(history: Path, view: ProgressView) -> Callable[[], None]:
    """Return a function that shows a new last step in ``history``, with its loss and the time left."""
    seen = (run_folder.last_logged(history) or {}).get("current_steps")
    begun: tuple[int, float] | None = None

    def show() -> None:
        nonlocal seen, begun
        last = run_folder.last_logged(history)
        if last is None or last["current_steps"] == seen:
            return
        step, total, now = last["current_steps"], last["total_steps"], time.monotonic()
        seen, begun = step, begun or (step, now)
        note = f", loss {last['loss']:.4g}" if "loss" in last else ""
        if begun[0] < step < total:
            seconds = (now - begun[1]) / (step - begun[0]) * (total - step)
            note += f", {timedelta(seconds=round(seconds))} left"
        view.update("training steps", step, total, note)

    return show


def _reason(log_path: Path, start: int, status: int) -> str:
    """Return why a quiet training ended: the error in its part of the log, or the last lines."""
    with log_path.open("rb") as file:
        file.seek(max(start, log_path.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return "\n".join(
        [f"error: the trainer ended with status {status}; last lines of {log_path}:", *lines[-_LAST_LINES:]]
    )


def _warn_about_prompts(job: SftJob) -> None:
    for stale in stale_data(job):
        print(f"warning: {stale}", file=sys.stderr)


def _show(job: SftJob, node: Node) -> int:
    """Print what would run; return 1 if something is missing."""
    from llamafactory_patch.doctor import obstacles, prompt_summaries

    print(_described(job, node))
    if not job.config.get("use_cpu") and not has_gpu():
        print("warning: this recipe needs a GPU, and this machine has none (no nvidia-smi)", file=sys.stderr)
    missing = obstacles(job, os.environ)
    try:
        for text in prompt_summaries(job) if not missing else ():
            print(f"# {text}")
    except AfmError as error:
        missing = [str(error)]
    if not missing:
        _warn_about_prompts(job)
    for text in missing:
        print(f"error: this would not start: {text}", file=sys.stderr)
    return 1 if missing else 0


def main() -> None:
    """``llamafactory-patch-cli``: ``CONFIG.yaml [key=value ...] [--dry-run] [--quiet]`` calls :func:`run_sft`.

    Every other command line is one of LLaMA-Factory (``train CONFIG``, ``export CONFIG``, ``chat CONFIG``, ...). For
    ``train``, the rows are tokenised first.
    """
    if sys.argv[1:2] == [_RANK]:
        del sys.argv[1]
        with _errors_end_the_process():
            _train_rank()
        return
    signal.signal(signal.SIGTERM, _exit_on_signal)
    follow_parent()
    with _errors_end_the_process():
        words = [word for word in sys.argv[1:] if word not in ("--dry-run", "--quiet")]
        if words and words[0].endswith((".yaml", ".yml")):
            dry_run, quiet = "--dry-run" in sys.argv, "--quiet" in sys.argv
            raise SystemExit(run_sft(words[0], words[1:], dry_run=dry_run, echo=not quiet))
        if any(word.partition("=")[0] == "--swanlab_api_key" for word in words):
            raise UsageError(
                "--swanlab_api_key: all users of the machine can see a key on a command line; remove the option and set "
                "the environment variable SWANLAB_API_KEY"
            )
        from llamafactory_patch.engine import load_engine, mend_trainer

        load_engine()
        mend_trainer()
        if words[:1] == ["train"] and not {"-h", "--help"} & set(words):
            sys.argv[2:] = [str(stock_training(words[1:]))]
        _launch()


@contextmanager
def _errors_end_the_process() -> Iterator[None]:
    """For the errors of this project, print one message and exit with the documented status."""
    try:
        yield
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def stock_training(words: list[str]) -> Path:
    """Tokenise the rows of a run; return the configuration file for LLaMA-Factory."""
    from llamafactory_patch.engine import TOKENISED_STAGES

    config = training_config(words)
    output_dir = Path(config.get("output_dir") or "trainer_output")
    folder = Path(config.get("tokenized_path") or output_dir / run_folder.TOKENISED_FOLDER)
    several = positive_variable(os.environ, "NNODES", 1) > 1
    node = int(os.environ.get("NODE_RANK") or 0) if several else 0
    # In a child process, so that its memory, random state and devices do not affect the run.
    sys.stdout.flush()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_tokenise, args=(config, folder, output_dir, node), daemon=True)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(child.exitcode if child.exitcode > 0 else 128 - child.exitcode)
    stock, _ = split_config(config)
    if config.get("stage", "sft") in TOKENISED_STAGES and folder.is_dir():
        stock["tokenized_path"] = str(folder)
    file = Path(tempfile.mkdtemp(prefix="llamafactory_patch_")) / "training.yaml"
    atexit.register(shutil.rmtree, file.parent, ignore_errors=True)
    file.write_text(yaml.safe_dump(stock, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return file


def _tokenise(config: Mapping[str, Any], folder: Path, output_dir: Path, node: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    with _errors_end_the_process():
        from llamafactory_patch.tokenise import provide

        provide(config, folder, output_dir, node=node)


def training_config(words: list[str]) -> dict[str, Any]:
    """Parse a run's configuration as LLaMA-Factory does: a file and ``key=value``, or flags."""
    from llamafactory.hparams import read_args
    from llamafactory.hparams.parser import _TRAIN_ARGS
    from transformers import HfArgumentParser

    sys.argv, before = [sys.argv[0], *words], sys.argv
    try:
        config = read_args()
    finally:
        sys.argv = before
    if isinstance(config, dict):
        return {str(key): value for key, value in config.items()}
    parser = HfArgumentParser(_TRAIN_ARGS)
    for key in SftSettings.model_fields:
        parser.add_argument(f"--{key}", nargs="?", const=True, type=parse_yaml)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    flags, unknown = parser.parse_known_args(config)
    if unknown:
        raise UsageError(f"unknown arguments: {' '.join(unknown)}; see llamafactory-patch-cli train --help")
    return dict(vars(flags))


def _launch() -> None:
    """Call LLaMA-Factory so that its relaunch under torchrun runs :func:`main`.

    ``llamafactory.launcher.launch`` (0.9.5) passes its own ``__file__`` to torchrun and finds torchrun on the PATH.
    """
    from subprocess import CalledProcessError

    from llamafactory import launcher

    launcher.__file__ = f"--module llamafactory_patch.launcher {_RANK}"
    os.environ["PYTHONSAFEPATH"] = "1"  # otherwise the working folder is first on the path of every rank
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    try:
        launcher.launch()
    except CalledProcessError as error:  # torchrun has printed the reason
        raise SystemExit(error.returncode if error.returncode > 0 else 128 - error.returncode) from None


def _train_rank() -> None:
    """Run LLaMA-Factory's training; torchrun starts this on every rank."""
    die_with_parent(signal.SIGKILL)
    from llamafactory_patch.engine import load_engine, mend_trainer

    load_engine()
    mend_trainer()
    from llamafactory.train.tuner import run_exp

    run_exp()


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # unwinds the stack, so that a child torchrun is stopped too


def _command(job: SftJob, node: Node) -> list[str]:
    config = str(run_folder.config_path(job, node.number))
    return [sys.executable, "-P", "-m", "llamafactory_patch.launcher", "train", config]


def _variables(job: SftJob, node: Node) -> dict[str, str]:
    """Return the environment variables of the child that differ from those of this process."""
    wanted = {"PYTHONUNBUFFERED": "1"} | tracker_variables(job)
    if job.own.threads is not None:
        # On a busy machine, threads that spin while they wait made steps ten times slower.
        wanted |= {"OMP_NUM_THREADS": str(job.own.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if job.config.get("use_cpu"):
        wanted |= KEPT_MEMORY
    if node.count > 1:
        wanted |= {"NODE_RANK": str(node.number), "MASTER_PORT": "29500"}
    if job.config.get("deepspeed") or job.config.get("fsdp") or node.count > 1:
        wanted["FORCE_TORCHRUN"] = "1"  # LLaMA-Factory requires it even on one device
    if job.config.get("fsdp"):
        wanted |= _fsdp_variables(fsdp_settings(job))
    if not sys.stdout.isatty():
        wanted |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    chosen = {name: os.environ.get(name) or value for name, value in wanted.items()}
    return chosen | ({"CUDA_VISIBLE_DEVICES": ""} if job.config.get("use_cpu") else {})


def _fsdp_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for FSDP that LLaMA-Factory and accelerate read while the model is loaded.

    ``TrainingArguments`` passes on the rest of the file, but not ``state_dict_type`` (transformers 5.5.4). Without it, the
    model would be saved in shards that no other program reads.
    """
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(settings.get("version", 1)),
        "FSDP_STATE_DICT_TYPE": settings.get("state_dict_type", "FULL_STATE_DICT"),
    }


def _described(job: SftJob, node: Node) -> str:
    env = os.environ | _variables(job, node)
    variables: dict[str, Any] = {name: env[name] for name in _SHOWN_VARIABLES if name in env}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words += [shlex.quote(word) for word in _command(job, node)]
    return f"{run_folder.config_text(job, job.config)}\n{' '.join(words)}"


if __name__ == "__main__":
    main()
