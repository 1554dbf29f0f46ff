"""Encoding text that continues other text.

Some tokenizers (SentencePiece-like ones, as Llama-2's) put a blank before every text they are given. At the
beginning of a turn that is how the model was trained; before an observation in the middle of one it would be a
blank that nobody wrote.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary


class ContinuingTokenizer:
    """The same vocabulary and merges, without a blank put before a text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, texts: list[str]) -> dict[str, list[Any]]:
        """Ids and offsets of each text, without special tokens."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": [encoding.offsets for encoding in encodings],
        }


_made: WeakKeyDictionary[Any, tuple[int, ContinuingTokenizer | None]] = WeakKeyDictionary()


def continuing(tokenizer: Any) -> ContinuingTokenizer | None:
    """How a fast Hugging Face tokenizer encodes a continuation, ``None`` if like any other text."""
    size = len(tokenizer)  # tokens may be added later
    known = _made.get(tokenizer)
    if known is None or known[0] != size:
        known = (size, _make(tokenizer.backend_tokenizer))
        _made[tokenizer] = known
    return known[1]


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` as the continuation of another text."""
    variant = continuing(tokenizer)
    if variant is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(variant([text])["input_ids"][0])


def _make(backend: Any) -> ContinuingTokenizer | None:
    from tokenizers import Tokenizer

    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    found = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    bare = {name: _without_blank(part) for name, part in found.items()}
    if bare == found:
        return None
    copy = Tokenizer.from_str(json.dumps({**json.loads(backend.to_str()), **bare}))
    copy.no_truncation()
    copy.no_padding()
    return ContinuingTokenizer(copy)


def _without_blank(part: Any) -> Any:
    """A component's description without what puts a blank before a text."""
    if isinstance(part, list):
        return [bare for item in part if (bare := _without_blank(item)) is not None]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Prepend":
        return None
    changed = {key: _without_blank(value) for key, value in part.items()}
    if kind == "Metaspace":
        changed["prepend_scheme"] = "never"
    if kind == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed
