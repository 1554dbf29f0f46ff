"""Embeddings by any sentence-transformers model, with the prefixes that E5 models were trained with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from afm.errors import EngineError, MissingExtraError

_BATCH = 64


def default_prefixes(model: str) -> tuple[str, str]:
    """What stands before queries and passages: ``query: `` and ``passage: `` for E5 models, nothing for others."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    is_e5 = "e5" in name.replace("_", "-").split("-")
    return ("query: ", "passage: ") if is_e5 else ("", "")


class Encoder:
    """Text to vectors of length 1.

    Args:
        model: Folder or name of a sentence-transformers model.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        EngineError: The model cannot be loaded.
    """

    def __init__(
        self, model: str, query_prefix: str, passage_prefix: str, *, device: str | None = None
    ) -> None:
        if find_spec("sentence_transformers") is None:
            raise MissingExtraError("sentence-transformers", "dense")
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix
        try:
            self._model = SentenceTransformer(model, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"embedding model {model!r} cannot be loaded: {error}") from error
        self.dimensions = int(self._model.get_embedding_dimension() or 0)

    def queries(self, texts: Sequence[str]) -> Any:
        """Vectors of queries, float32, shape (texts, dimensions)."""
        return self._encoded([self._query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Any:
        """Vectors of passages, float32, shape (texts, dimensions); what the model cannot take is cut off at the end."""
        return self._encoded([self._passage_prefix + text for text in texts])

    def _encoded(self, texts: list[str]) -> Any:
        return self._model.encode(
            texts,
            batch_size=_BATCH,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
