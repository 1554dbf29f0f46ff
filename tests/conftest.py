"""Real benchmark rows and vocabularies, which are not part of the repository."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes is the machine's doing: other jobs run beside the tests.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

_FOLDER = Path(os.environ.get("AFM_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared"))


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


_LONG = ("test_quickstart.py", "test_training.py")
"""Files whose tests train; begun last, one of them would keep one process busy while the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONG)
