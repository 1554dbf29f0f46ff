"""Findings of a check, and the checks of GPUs: driver, nvcc, compiler, packages that can be imported."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from afm.errors import AfmError, ConfigError, exists_next_to, no_such_file
from afm.file_kinds import configs_folder

T = TypeVar("T")

FLASH_ATTENTION = "flash_attn.flash_attn_interface"
"""A module of flash-attn only; flash-attn-4 makes ``import flash_attn`` succeed without it."""
CROSS_ENTROPY = "flash_attn.ops.triton.cross_entropy"
# verl 0.9.1: verl/workers/config/model.py:185, verl/utils/model.py:649 and, for the slower path,
# verl/utils/torch_functional.py:106
WHY_FLASH_ATTENTION = "verl asks for flash_attention_2, and its critic has no other choice"
_PAGE = "docs/install.md"
BUILD_ADVICE = f"build flash-attn 2.8.3 with nvcc, see {_PAGE}"
_SLOW_PATH = "verl silently takes a slower path for log-probabilities"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")
_CUDA_OF_LOCKS = 13
_IMPORT_S = 300
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_PROBE = """
import importlib, json, os, sys
errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        errors[name] = f"{type(error).__name__}: {error}"
torch = sys.modules.get("torch")
cuda = getattr(getattr(torch, "version", None), "cuda", None)
answer = {"errors": errors, "cuda": cuda, "usable": bool(cuda) and torch.cuda.is_available()}
print("", json.dumps(answer), sep="\\n", flush=True)
os._exit(0)
"""


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        """Return the line that ``afm doctor`` prints."""
        return f"{self.level:<8} {self.subject:<15} {self.text}"

    @property
    def why(self) -> str:
        """The text without the :attr:`next_step`."""
        return self.text.removesuffix(f"; {self.next_step}") if self.next_step else self.text

    @property
    def next_step(self) -> str:
        """The last clause of a warning or error: what to do; empty if there is nothing to do."""
        if self.level in (Level.OK, Level.INFO) or "; " not in self.text:
            return ""
        return self.text.rpartition("; ")[2]


class Report:
    """Findings, in order.

    Args:
        on_check: Gets the subject of each check before it starts.
    """

    def __init__(self, on_check: Callable[[str], None] = lambda subject: None) -> None:
        self.findings: list[Finding] = []
        self._on_check, self._subjects = on_check, set[str]()

    def checking(self, subject: str) -> None:
        """Tell what is checked next, once for each subject."""
        if subject not in self._subjects:
            self._subjects.add(subject)
            self._on_check(subject)

    def add(self, *findings: Finding) -> None:
        """Add findings."""
        self.findings += findings

    def asked(self, subject: str, question: Callable[[], T]) -> T | None:
        """Return what ``question`` returns, or add its error as a finding and return ``None``."""
        self.checking(subject)
        try:
            return question()
        except AfmError as error:
            lines = re.sub(r"(?<![:;])\s*\n\s*", "; ", str(error))  # commands of several lines stay apart
            self.add(Finding(Level.ERROR, subject, " ".join(lines.split())))
            return None


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.level is Level.ERROR for finding in findings)


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raise an error if any finding is one.

    Raises:
        ConfigError: Lists every error.
    """
    if errors := [finding.text for finding in findings if finding.level is Level.ERROR]:
        raise ConfigError("; ".join(errors))


@dataclass(frozen=True, slots=True)
class Imports:
    """Result of imports in a separate process: errors by module, CUDA version of torch, whether a GPU is usable."""

    errors: Mapping[str, str]
    cuda: str | None = None
    usable: bool = False


def lock_advice(lock: str) -> str:
    """Return the command that installs a lock file. Plain ``pip install -r`` fails at flash-attn.

    >>> lock_advice("gpu-sft")
    'in the checkout of this project run: requirements/install-gpu.sh gpu-sft'
    """
    return f"in the checkout of this project run: requirements/install-gpu.sh {lock}"


_ORGANISATIONS = {
    "Qwen",
    "meta-llama",
    "mistralai",
    "HuggingFaceTB",
    "deepseek-ai",
    "allenai",
    "google",
    "microsoft",
}
"""Organisations on the Hub. Any other first part of a name is more likely a folder that was typed wrong."""


def fetch_advice(model: str, key: str = "") -> str:
    """Return how to get a model of the Hub, one of Qwen's perhaps without its organisation; empty for any other name.

    Args:
        key: The setting that also takes names on the Hub. Without it the model is fetched by a command.
    """
    if not (match := re.fullmatch(r"(?:(\w[\w.-]*)/)?(\w[\w.-]*)", model)):
        return ""
    organisation, name = match.groups()
    if organisation not in _ORGANISATIONS if organisation else not name.startswith("Qwen"):
        return ""
    source = f"{organisation or 'Qwen'}/{name}"
    if key:
        return f"; on the Hub it is {key}={source}"
    return f"; to fetch it from the Hub: afm import {source} -o models/{name}"


def made_by(path: str | Path) -> str:
    """Return the commands that make a file of a shipped data set or fetch a published model, empty for any other path."""
    from afm.configuration import read_file  # not for `--help`

    try:
        root = configs_folder().parent
        place = Path(path).absolute().relative_to(root).parts
        published = read_file(root / "configs/data/models.yaml").get("sets", {})
    except (ConfigError, ValueError):
        return ""
    match place:
        case ["data", name, _, *_] if (root / "data" / name / "prepare.sh").is_file():
            fetch = f"afm data download {name} --output-dir data/{name}/raw"
            return f"; to make it: {fetch} && data/{name}/prepare.sh"
        case ["data", name, _, *_] if (root / "train" / name / "all.sh").is_file():
            return f"; to make it: train/{name}/all.sh, which trains too"
        case ["data", name, _, *_] if (root / "configs/data" / f"{name}.yaml").is_file():
            raw = f"data/{name}/raw"
            prepare = f"afm data prepare published {name} --all --data {raw} --output-dir data/{name}"
            return f"; to make it: afm data download {name} --all --output-dir {raw} && {prepare}"
        case ["models", name] if name in published:
            fetch = f"afm data download models --output-dir models --only {name}"
            return f"; train it (afm sft CONFIG), or fetch the published one: {fetch}"
    return ""


def absent(path: str | Path, config: str | Path | None, what: str = "file") -> tuple[str, str]:
    """Return that a path which ``config`` names is missing, and the next step: where it is, or what makes it."""
    beside = exists_next_to(path, config)
    return (f"no such {what}", beside) if beside else (no_such_file(path, what), made_by(path))


def has_gpu() -> bool:
    """Return whether this machine has nvidia-smi. If so, training on GPUs is expected to work here."""
    return shutil.which(_QUERY[0]) is not None


def try_imports(modules: Sequence[str]) -> Imports:
    """Import modules in another process, which a compiled module that does not fit the GPU or torch may kill.

    If the process dies, each module is imported in its own process, so that only the faulty ones have an error.
    """
    errors = {
        name: "is not installed"
        for name in modules
        if importlib.util.find_spec(name.partition(".")[0]) is None
    }
    present = [name for name in modules if name not in errors]
    if not present:
        return Imports(errors)
    try:
        command = [sys.executable, "-c", _PROBE, *present]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired):
        why = f"cannot be imported: Python did not start, or took longer than {_IMPORT_S} s"
        return Imports(errors | dict.fromkeys(present, why))
    except (ValueError, IndexError):
        if len(present) == 1:
            return Imports(
                errors | {present[0]: f"ends Python when it is imported (status {done.returncode})"}
            )
        alone = [try_imports([name]) for name in present]
        for imports in alone:
            errors |= imports.errors
        cuda = next((imports.cuda for imports in alone if imports.cuda), None)
        return Imports(errors, cuda, any(imports.usable for imports in alone))
    failed = {name: f"cannot be imported: {_line(text)}" for name, text in answer["errors"].items()}
    return Imports(errors | failed, answer["cuda"], answer["usable"])


def gpu_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check the GPUs of this machine and what training on them needs. Without GPUs this is one finding."""
    if not has_gpu():
        yield Finding(Level.OK, "gpu", "none (no nvidia-smi): training runs on the CPU, for the tiny recipes")
        return
    try:
        gpus, overview = _output(*_QUERY), _output(_QUERY[0])
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(Level.WARNING, "gpu", f"nvidia-smi fails: {error}; repair the driver")
        return
    for number, line in enumerate(filter(None, gpus.splitlines())):
        yield Finding(Level.OK, "gpu", f"{number}: {line}")
    imports = try_imports(["torch", FLASH_ATTENTION, CROSS_ENTROPY])
    yield from _torch(imports)
    yield driver_finding(_CUDA.search(overview), imports.cuda)
    yield _nvcc(env, imports.cuda)
    yield _compiler(env)
    if package_version("verl"):
        yield from _flash_attention(imports, env)


def _torch(imports: Imports) -> Iterator[Finding]:
    torch = package_version("torch")
    if torch and "torch" in imports.errors:
        yield Finding(
            Level.ERROR, "gpu", f"torch {torch} {imports.errors['torch']}; install a GPU lock again"
        )
    elif torch and imports.cuda is None:
        text = f"torch {torch} does not use them; {lock_advice('gpu-sft')} (for RL: gpu-rl-vllm or gpu-rl-sglang)"
        yield Finding(Level.WARNING, "gpu", text)
    elif torch and not imports.usable:
        text = f"torch {torch} sees no GPU that it can use"
        yield Finding(Level.ERROR, "gpu", f"{text}; check the driver, CUDA_VISIBLE_DEVICES and permissions")


def driver_finding(supported: re.Match[str] | None, built: str | None) -> Finding:
    """Compare the CUDA version that the driver supports with the one that torch is built for.

    A driver runs every release up to its own major version, but not the next major version.
    """
    if supported is None:
        return Finding(Level.WARNING, "driver", "nvidia-smi prints no CUDA version; repair the driver")
    text = f"supports CUDA up to {supported[1]}.{supported[2]}"
    if built is None:
        old = int(supported[1]) < _CUDA_OF_LOCKS
        text += f"; the GPU locks need a driver for CUDA {_CUDA_OF_LOCKS}" if old else ""
        return Finding(Level.WARNING if old else Level.OK, "driver", text)
    if int(supported[1]) < int(built.partition(".")[0]):
        text = f"{text}, torch is built for CUDA {built}; install a driver for CUDA {built} or newer"
        return Finding(Level.ERROR, "driver", text)
    return Finding(Level.OK, "driver", f"{text}, torch is built for {built}")


def _nvcc(env: Mapping[str, str], built: str | None) -> Finding:
    """Find nvcc where torch's extension builder looks for it: CUDA_HOME, PATH, /usr/local/cuda."""
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    path = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    wanted = f"CUDA {built}" if built else "the CUDA that torch is built for"
    advice = f"install the toolkit of {wanted}, and set CUDA_HOME to its folder"
    if not Path(path).is_file():
        text = f"not found at {path}: flash-attn cannot be built, and SGLang, FlashInfer and DeepSpeed cannot compile their kernels"
        return Finding(Level.WARNING, "nvcc", f"{text}; {advice}")
    try:
        release = _RELEASE.search(_output(path, "--version"))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(Level.WARNING, "nvcc", f"{path} fails: {error}; {advice}")
    if release is None:
        return Finding(Level.WARNING, "nvcc", f"{path} prints no release; {advice}")
    text = f"{path}, CUDA {release[1]}.{release[2]}"
    if built and release[1] != built.partition(".")[0]:
        return Finding(Level.WARNING, "nvcc", f"{text}, torch is built for CUDA {built}; {advice}")
    return Finding(Level.OK, "nvcc", text)


def _compiler(env: Mapping[str, str]) -> Finding:
    names = [env["CXX"]] if env.get("CXX") else ["c++", "g++", "clang++"]
    if path := next(filter(None, map(shutil.which, names)), None):
        return Finding(Level.OK, "compiler", path)
    text = f"no C++ compiler ({', '.join(names)}): Triton and flash-attn need one; apt-get install g++"
    return Finding(Level.WARNING, "compiler", text)


def _flash_attention(imports: Imports, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check flash-attn, and report what verl does without it."""
    if why := imports.errors.get(FLASH_ATTENTION):
        text = f"flash-attn {why}: {WHY_FLASH_ATTENTION}, so GPU recipes end when they load the model"
        yield Finding(Level.WARNING, "flash-attn", f"{text}; {BUILD_ADVICE}")
    else:
        yield Finding(Level.OK, "flash-attn", f"{package_version('flash-attn')} can be imported")
    if why := imports.errors.get(CROSS_ENTROPY):
        text = f"flash-attn's cross entropy {why}: {_SLOW_PATH}"
        yield Finding(Level.WARNING, "log-probs", f"{text}; {BUILD_ADVICE}")
    elif env.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1":
        text = f"VERL_DISABLE_FLASH_ATTN_CE=1: {_SLOW_PATH}; unset it, unless every run must give equal bits"
        yield Finding(Level.WARNING, "log-probs", text)
    else:
        yield Finding(Level.OK, "log-probs", "with flash-attn's cross entropy")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def _line(text: str) -> str:
    return " ".join(text.split())[:300].replace("; ", ", ")


def package_version(package: str) -> str | None:
    """Return the installed version, or ``None`` if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
