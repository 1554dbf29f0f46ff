"""Real benchmark rows and vocabularies, which are not part of the repository."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_budget import CpuBudget
from hypothesis import settings

# How long one example takes is the machine's doing: other jobs run beside the tests.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = Path(os.environ.get("AFM_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Each file gives the environment back: Ray, for one, writes into it that this machine has no GPU."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Path of a file or folder of the shared data; the test is skipped where that is absent."""

    def find(name: str) -> Path:
        path = _FOLDER / name
        if not path.exists():
            pytest.skip(f"{path} is absent; set AFM_SHARED_DATA to the folder that holds data and tokenizers")
        return path

    return find


@pytest.fixture(scope="session")
def qwen_folder(shared: Callable[[str], Path]) -> Path:
    """The real Qwen2.5 tokenizer."""
    return shared("tokenizers/qwen2.5")


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_folder: Path) -> Any:
    """The same, loaded once; nobody changes it."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(qwen_folder))


@pytest.fixture(scope="session")
def afm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in this process; ``status=None`` accepts every end."""
    from afm.cli.main import main

    # Its client writes errors to what is sys.stderr when it is imported, which must not be a redirected one.
    with contextlib.suppress(ImportError):
        importlib.import_module("mcp.client.stdio")

    def run(*words: object, status: int | None = 0, cwd: Path = _ROOT) -> subprocess.CompletedProcess[str]:
        out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
        sys.argv = ["afm", *map(str, words)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd):
                main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = before
        assert status in (None, code), out.getvalue() + err.getvalue()
        return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())

    return run


_LONG = ("test_training.py", "test_reproduce.py", "test_stock.py", "test_promises.py", "test_benchmarks.py")
"""Files that take longest; begun last, one of them would keep one process busy while the other has nothing left."""

_TEST_LIMITS = (20.0, 300.0)
"""CPU seconds, in the same unit, that a quick test and a slow one may cost, each with its setup.

A quick test takes a second, and may be the first to use a fixture that many share. The other limit is about twice the
heaviest setup: a run that many tests share.
"""

_TOTAL_LIMIT = 1550.0
"""CPU seconds of a whole run, in the unit of `cpu_budget.py`. On 2026-11-29, 1,202 were seen
without other jobs, and 1,381 beside two training runs."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuBudget(config, _TEST_LIMITS, _TOTAL_LIMIT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; tests marked `proof` run only where the marker expression names them."""
    if "proof" not in config.option.markexpr:
        proofs = [item for item in items if item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if item not in set(proofs)]
    items.sort(key=lambda item: item.path.name not in _LONG)
