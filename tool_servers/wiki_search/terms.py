"""Text to search terms, and terms to the fixed-size keys by which an index on disk is looked up."""

from __future__ import annotations

import hashlib
import re

_WORD = re.compile(r"\w\w+")
_COMMON = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
to was will with
"""
_STOP_WORDS = frozenset(_COMMON.split())


def terms_of(text: str) -> list[str]:
    """Lower-case words of two characters or more without the most common English ones, in order."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def key_of(term: str) -> int:
    """64 bits that stand for a term; among ten million terms two share them with a chance of 3 in a million."""
    return int.from_bytes(
        hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
