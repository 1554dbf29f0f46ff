"""The passages of a page that say most about what an agent looks for (BM25), without any model."""

from __future__ import annotations

import re

from tool_servers.wiki_search.passages import terms_of

_PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=#)")
_SENTENCES = re.compile(r"(?<=[.!?。！？])\s+|\n")
_CUT = "\n[...]\n"


def passages(text: str, size: int) -> list[str]:
    """``text`` in pieces of about ``size`` characters: whole paragraphs where possible, else sentences."""
    pieces: list[str] = []
    for paragraph in _PARAGRAPHS.split(text):
        pieces += [paragraph] if len(paragraph) <= size else _SENTENCES.split(paragraph)
    joined: list[str] = []
    for piece in pieces:
        piece = piece.strip()
        if joined and len(joined[-1]) + len(piece) < size:
            joined[-1] += "\n" + piece
            continue
        joined += [piece[start : start + size] for start in range(0, len(piece), size)]
    return [piece for piece in joined if piece]


def best_passages(text: str, goal: str, max_chars: int, size: int = 800) -> str:
    """The passages nearest to ``goal``, in the order of the page, within ``max_chars`` characters.

    A text that is short enough is returned whole. The first passage is always kept: it says what the page is.
    Without a goal, or when no word of it occurs, the page's beginning.
    """
    if len(text) <= max_chars:
        return text
    found = passages(text, min(size, max(1, max_chars // 4)))
    order = _ranking(found, goal)
    if not order:
        return text[: max_chars - len(_CUT)].rstrip() + _CUT.rstrip()
    kept: set[int] = set()
    room = max_chars - len(_CUT)
    for number in (0, *order):
        cost = len(found[number]) + len(_CUT)
        if number not in kept and cost <= room:
            kept.add(number)
            room -= cost
    return _joined(found, sorted(kept))


def best_chunks(text: str, goal: str, size: int, most: int) -> list[str]:
    """At most ``most`` pieces of about ``size`` characters, in the order of the page: those nearest to ``goal``."""
    found = passages(text, size)
    if len(found) <= most:
        return found
    order = [0, *(number for number in _ranking(found, goal) if number != 0), *range(1, len(found))]
    return [found[number] for number in sorted(list(dict.fromkeys(order))[:most])]


def _ranking(found: list[str], goal: str) -> list[int]:
    """Numbers of the passages that share a word with ``goal``, the best first."""
    import bm25s
    import numpy as np

    words = list(dict.fromkeys(_words(goal)))
    corpus = [_words(passage) or ["-"] for passage in found]
    known = set().union(*map(set, corpus)) if corpus else set()
    asked = [word for word in words if word in known]
    if not asked:
        return []
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    scores = index.get_scores(asked)
    return [int(number) for number in np.argsort(-scores, kind="stable") if scores[number] > 0]


def _words(text: str) -> list[str]:
    """Lower-case words but the most common ones; of longer ones a plural's ending is dropped."""
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in terms_of(text)]


def _joined(found: list[str], numbers: list[int]) -> str:
    parts: list[str] = []
    for place, number in enumerate(numbers):
        if place:
            parts.append("\n" if number == numbers[place - 1] + 1 else _CUT)
        parts.append(found[number])
    return "".join(parts) + ("" if numbers[-1] == len(found) - 1 else _CUT.rstrip())
