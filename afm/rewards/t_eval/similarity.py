"""How alike two texts are, 0 to 1: by a model of sentences, or by their words where there is none."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from afm.errors import ConfigError, MissingExtraError


class Similarity(Protocol):
    """Compares texts."""

    @property
    def note(self) -> str:
        """What evidence ends with; empty for the published way."""
        ...

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """Cosine of every row with every column, at least 0."""
        ...


class Words:
    """Cosine of counted words: a stand-in that needs nothing, and no figure to compare with published ones."""

    note = " (word counts stand in for sentence embeddings)"

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """See :class:`Similarity`."""
        counted = [_counted(text) for text in columns]
        return [[_cosine(row, column) for column in counted] for row in map(_counted, rows)]


class Sentences:
    """Cosine of sentence embeddings; T-Eval's own are of all-mpnet-base-v2.

    Args:
        folder: Of a sentence-transformers model; it is loaded when it is first needed, on the CPU.

    Raises:
        MissingExtraError: sentence-transformers is not installed (with the first comparison).
        ConfigError: There is no such model in the folder (likewise).
    """

    note = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None
        self._lock = threading.Lock()

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """See :class:`Similarity`."""
        with self._lock:
            if self._model is None:
                self._model = _loaded(self._folder)
            vectors = self._model.encode(
                [*rows, *columns], normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
            )
        first, second = vectors[: len(rows)], vectors[len(rows) :]
        # Single precision: equal texts come out a hair below 1, and 1 is what counts as right.
        return [[max(0.0, round(float(value), 6)) for value in line] for line in first @ second.T]


def _loaded(folder: Path) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingExtraError("sentence-transformers", "dense") from None
    if not (folder / "modules.json").is_file():
        raise ConfigError(
            f"t_eval.embeddings: {folder} holds no sentence-transformers model (modules.json); expected the folder of all-mpnet-base-v2"
        )
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def _counted(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    if not one and not other:
        return 1.0
    product = sum(count * other[word] for word, count in one.items())
    lengths = math.hypot(*one.values()) * math.hypot(*other.values())
    return product / lengths if lengths else 0.0
