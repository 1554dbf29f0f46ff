"""Choices that settings and options of the command line share. The module is light, so that help answers at once."""

from __future__ import annotations

from enum import StrEnum


class WorldKind(StrEnum):
    """The worlds that `afm data world` makes."""

    MATH = "math"
    WIKI = "wiki"


class GoldForm(StrEnum):
    """How RL rows hold gold answers; our rewards read all three."""

    TEXT = "text"
    """A text: the answer itself, or JSON of ``{"target": [..]}`` or of the tests. Any kinds of rows fit in one file."""
    QUESTION = "question"
    """JSON of ``{"target": [..], "question": ..}``, as AFM's script writes it."""
    TARGET = "target"
    """An object ``{"target": [..]}``, as AFM's documentation says."""


class Boundary(StrEnum):
    """What happens to a token at the joint of two authors."""

    SPLIT = "split"
    """Each author's text is encoded alone; no token holds both."""
    MASK = "mask"
    """The joined text is encoded; a token with any environment character is masked."""
    KEEP = "keep"
    """The joined text is encoded; a token with any agent character is trained on."""


class PublishedIndex(StrEnum):
    """FAISS indexes that can be had ready-made."""

    FLAT = "flat"
    """Exact; what the published agents were trained with."""
    HNSW = "hnsw"
    """Approximate, fast on CPUs."""
    NONE = "none"
    """The corpus alone."""
