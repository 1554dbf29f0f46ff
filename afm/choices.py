"""Choices that settings and command-line options share. The module is light, so that help is fast."""

from __future__ import annotations

from enum import StrEnum


class WorldKind(StrEnum):
    """The worlds of `afm data world`."""

    MATH = "math"
    WIKI = "wiki"


class GoldForm(StrEnum):
    """Forms of gold answers in RL rows. Our rewards read all three."""

    TEXT = "text"
    """A text: the answer, or JSON of ``{"target": [..]}`` or of the tests. One file can hold all kinds of rows."""
    QUESTION = "question"
    """JSON of ``{"target": [..], "question": ..}``, as AFM's script writes it."""
    TARGET = "target"
    """An object ``{"target": [..]}``, as AFM's documentation says."""


class Boundary(StrEnum):
    """Treatment of a token with text of two authors."""

    SPLIT = "split"
    """Each author's text is encoded separately, so no token holds both."""
    MASK = "mask"
    """The joined text is encoded. A token with any environment character is masked."""
    KEEP = "keep"
    """The joined text is encoded. A token with any agent character is trained on."""


class PublishedIndex(StrEnum):
    """Published FAISS indexes."""

    FLAT = "flat"
    """Exact. The published agents were trained with it."""
    HNSW = "hnsw"
    """Approximate, fast on CPUs."""
    NONE = "none"
    """Only the corpus."""
