"""Start trainings: ``llamafactory-patch-cli`` (all of ``llamafactory-cli``) and :func:`run_sft`."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import AfmError, ConfigError, UsageError
from afm.planning import positive_variable
from afm.planning.findings import has_gpu
from afm.processes import follow_parent
from llamafactory_patch import output
from llamafactory_patch.config import SftJob, check_sources, fsdp_settings, resolve
from llamafactory_patch.process import folder_lock, process_border, run_logged
from llamafactory_patch.trackers import check_trackers, tracker_variables


@dataclass(frozen=True, slots=True)
class Node:
    """This computer among those of a training; they count from 0."""

    number: int = 0
    count: int = 1


def this_node(env: Mapping[str, str]) -> Node:
    """What ``NNODES`` and ``NODE_RANK`` say; one node need not say anything.

    Raises:
        ConfigError: They contradict each other, or leave open who is who: two first nodes would wait for each other.
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
_LOG_TAIL_BYTES = 1 << 16
_LAST_LINES = 15
_SHOWN_VARIABLES = (*_TORCHRUN_VARIABLES, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def run_sft(
    config_path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False, echo: bool = True
) -> int:
    """Fine-tune as a configuration says; the call returns when the training ends.

    The trainer runs as a child process. ``output_dir`` receives the model with its tokenizer, ``agent.yaml`` (if
    the configuration names an agent), ``sft_config.yaml`` (exactly what the trainer got), ``training.log``,
    ``trainer_log.jsonl`` (a line per logged step: current_steps, loss, lr), ``data_statistics.json`` and
    ``data_examples.txt`` (what is trained on, also shown before the first step) and ``sft_manifest.json``. A finished
    training is not repeated, an interrupted one continues from its last complete checkpoint;
    ``overwrite_output_dir=true`` starts anew. In a job of several nodes (``NNODES``, ``NODE_RANK``,
    ``MASTER_ADDR``), call it on each.

    Args:
        config_path: YAML of LLaMA-Factory's training arguments, the arguments this package adds, and
            :data:`llamafactory_patch.config.OWN_KEYS`.
        overrides: ``key=value`` pairs that replace keys of the YAML.
        dry_run: Print the resolved command and configuration, say what is missing, and start nothing.
        echo: Show the trainer's output on standard output, too.

    Returns:
        The trainer's exit status; 0 also when there was nothing left to do. Of a dry run 1 when something is missing.

    Raises:
        ConfigError: The configuration or the description of this node is wrong, or ``output_dir`` holds another run.
        UsageError: An override is no ``key=value``.
        EngineError: Another process trains into ``output_dir``.
    """
    job = resolve(config_path, overrides)
    node = this_node(os.environ)
    if dry_run:
        return _show(job, node)
    check_sources(job)
    check_trackers(job, os.environ)
    if output.is_finished(job):
        print(f"{job.output_dir} is finished; for another run choose another output_dir")
        return 0
    job.output_dir.mkdir(parents=True, exist_ok=True)
    with folder_lock(job.output_dir, f".sft.{node.number}.lock") as lock:
        note = output.prepare(job, node=node.number, progress_bar=echo and sys.stdout.isatty())
        if note:
            print(note, flush=True)
        began = time.monotonic()
        log_name = f"training.node{node.number}.log" if node.number else "training.log"
        env = os.environ | _variables(job, node)
        log_path = job.output_dir / log_name
        start = log_path.stat().st_size if log_path.exists() else 0
        status = run_logged(_command(job, node), env=env, log_path=log_path, keep_open=(lock,), echo=echo)
        if status == 0 and not node.number:
            output.finish(job, seconds=time.monotonic() - began)
    if status != 0 and not echo:
        print(_reason(log_path, start, status), file=sys.stderr, flush=True)
    return status


def _reason(log_path: Path, start: int, status: int) -> str:
    """Why a quiet training ended: the error in its part of the log, or the last lines there."""
    with log_path.open("rb") as file:
        file.seek(max(start, log_path.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return "\n".join(
        [f"error: the trainer ended with status {status}; last lines of {log_path}:", *lines[-_LAST_LINES:]]
    )


def _show(job: SftJob, node: Node) -> int:
    """Print what would be run; 1 if something is missing that it needs."""
    from llamafactory_patch.doctor import obstacles, prompt_words

    print(_described(job, node))
    if not job.config.get("use_cpu") and not has_gpu():
        print("warning: this machine has no GPU (no nvidia-smi), which the recipe is for", file=sys.stderr)
    missing = obstacles(job, os.environ)
    try:
        for text in prompt_words(job) if not missing else ():
            print(f"# {text}")
    except AfmError as error:
        missing = [str(error)]
    for text in missing:
        print(f"error: this would not start: {text}", file=sys.stderr)
    return 1 if missing else 0


def main() -> None:
    """``llamafactory-patch-cli``: ``CONFIG.yaml [key=value ...] [--dry-run]`` calls :func:`run_sft`.

    Every other command line is LLaMA-Factory's own (``train CONFIG``, ``export CONFIG``, ``chat CONFIG``, ...),
    run with the plugin installed.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    follow_parent()
    with process_border():
        words = [word for word in sys.argv[1:] if word != "--dry-run"]
        if words and words[0].endswith((".yaml", ".yml")):
            raise SystemExit(run_sft(words[0], words[1:], dry_run="--dry-run" in sys.argv))
        if any(word.partition("=")[0] == "--swanlab_api_key" for word in words):
            raise UsageError(
                "--swanlab_api_key: a key on a command line is seen by everybody on the machine; set the environment "
                "variable SWANLAB_API_KEY and leave the option out"
            )
        from llamafactory_patch.plugin import install
        from llamafactory_patch.preview import install_preview

        install()
        install_preview()
        _launch()


def _launch() -> None:
    """Hand over to LLaMA-Factory, whose relaunch under torchrun must run our worker.

    ``llamafactory.launcher.launch`` (0.9.5) gives torchrun its own ``__file__``, finds torchrun on the PATH and
    splits the command at blanks: so we set the first, extend the second and pass paths without the third.
    """
    from subprocess import CalledProcessError

    from llamafactory import launcher

    from llamafactory_patch import worker

    launcher.__file__ = _without_blanks(Path(worker.__file__))
    if len(sys.argv) > 2 and Path(sys.argv[2]).is_file():
        sys.argv[2] = _without_blanks(Path(sys.argv[2]))
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    try:
        launcher.launch()
    except CalledProcessError as error:  # torchrun has told the reason
        raise SystemExit(error.returncode if error.returncode > 0 else 128 - error.returncode) from None


def _without_blanks(path: Path) -> str:
    """The path itself, or a link to it that needs no quoting."""
    if not any(character.isspace() for character in str(path)):
        return str(path)
    folder = Path(tempfile.mkdtemp(prefix="llamafactory_patch_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = folder / f"{'_'.join(path.stem.split())}{path.suffix}"
    link.symlink_to(path.resolve())
    return str(link)


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # unwinds, so that a torchrun below us is ended, too


def _command(job: SftJob, node: Node) -> list[str]:
    config = str(output.config_path(job, node.number))
    return [sys.executable, "-P", "-m", "llamafactory_patch.launcher", "train", config]


def _variables(job: SftJob, node: Node) -> dict[str, str]:
    """What the child's environment has besides or instead of ours."""
    wanted = {"PYTHONUNBUFFERED": "1"} | tracker_variables(job)
    if job.threads is not None:
        # Threads that spin while they wait made steps ten times slower on a busy machine.
        wanted |= {"OMP_NUM_THREADS": str(job.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if node.count > 1:
        wanted |= {"NODE_RANK": str(node.number), "MASTER_PORT": "29500"}
    if job.config.get("deepspeed") or job.config.get("fsdp") or node.count > 1:
        wanted["FORCE_TORCHRUN"] = "1"  # LLaMA-Factory asks for it even on one device
    if job.config.get("fsdp"):
        wanted |= _fsdp_variables(fsdp_settings(job))
    if not sys.stdout.isatty():
        wanted |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    chosen = {name: os.environ.get(name) or value for name, value in wanted.items()}
    return chosen | ({"CUDA_VISIBLE_DEVICES": ""} if job.config.get("use_cpu") else {})


def _fsdp_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """What LLaMA-Factory and accelerate ask the environment about FSDP while the model is loaded.

    ``TrainingArguments`` hands on the rest of the file, but not ``state_dict_type`` (transformers 5.5.4): the
    model would be saved in shards that nothing else reads.
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
    return f"{output.config_text(job, job.config)}\n{' '.join(words)}"


if __name__ == "__main__":
    main()
