"""The loss mask: which tokens are trained on, from who wrote each part of the text.

Agent text is trained on, environment text is not. :class:`Boundary` controls tokens with characters of both.
``SPLIT`` encodes each author's text separately, so there are no such tokens. An episode does the same: it appends
observations as separate tokens. So training and rollouts see the same ids for the same text.

Some tokenizers (SentencePiece-like ones, such as Llama-2's) put a space before every text. At the beginning of a turn
the model was trained with that space. In the middle of a turn the space was never written. So a variant of the
tokenizer without it encodes text that continues other text.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from afm.choices import Boundary
from afm.errors import ConfigError
from afm.trajectory.tags import Author, Segment, blocks


@dataclass(frozen=True, slots=True)
class MaskedIds:
    """Token ids and their mask of the same length: 1 if the token is trained on, else 0."""

    ids: list[int]
    mask: list[int]

    def __repr__(self) -> str:
        return f"MaskedIds(tokens={len(self.ids)}, trained={sum(self.mask)})"


def encode_batch(
    tokenizer: Any,
    rows: Sequence[Sequence[Segment]],
    boundary: Boundary = Boundary.SPLIT,
    *,
    roles_without_loss: Sequence[str] = (),
) -> list[MaskedIds]:
    """Encode many responses in one call of a fast Hugging Face tokenizer, without special tokens.

    Args:
        rows: The segments of each response. Adjacent segments of one author count as one text.
        roles_without_loss: Roles of the agent that are not trained on, tags included. The ids stay the same. A token
            with any character of these roles has mask 0.

    Raises:
        ConfigError: The tokenizer is a slow one, which does not report the positions of tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, expected a fast one (a folder with tokenizer.json)"
        )
    joined = [_joined(row) for row in rows]
    roles = tuple(roles_without_loss)
    return (
        _encode_split(tokenizer, joined, roles)
        if boundary is Boundary.SPLIT
        else _encode_whole(tokenizer, joined, boundary, roles)
    )


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    filled = (segment for segment in segments if segment.text)
    groups = groupby(filled, key=attrgetter("author"))
    return [Segment(author, "".join(segment.text for segment in group)) for author, group in groups]


def _encode_split(
    tokenizer: Any, rows: Sequence[Sequence[Segment]], roles: tuple[str, ...]
) -> list[MaskedIds]:
    encoded = _encode_pieces(tokenizer, rows, offsets=bool(roles))
    result = []
    for row in rows:
        masked = MaskedIds([], [])
        for segment in row:
            ids, offsets = next(encoded)
            mask = [int(segment.author is Author.AGENT)] * len(ids)
            if roles:
                _silence(mask, offsets, [segment], roles)
            masked.ids.extend(ids)
            masked.mask.extend(mask)
        result.append(masked)
    return result


def _encode_pieces(
    tokenizer: Any, rows: Sequence[Sequence[Segment]], *, offsets: bool
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Return ids, and offsets on request, of every segment in order. All but the first of a row continue a text."""
    texts = [segment.text for row in rows for segment in row]
    if not texts:
        return
    variant = continuing(tokenizer)
    if variant is None:
        encoded = _encode(tokenizer, texts, offsets=offsets)
        every = encoded["offset_mapping"] if offsets else [[]] * len(texts)
        yield from zip(encoded["input_ids"], every, strict=True)
        return
    begins = _encode(tokenizer, [row[0].text for row in rows if row], offsets=True)
    follows = variant([segment.text for row in rows for segment in row[1:]])
    first, later = (zip(part["input_ids"], part["offset_mapping"], strict=True) for part in (begins, follows))
    for row in rows:
        for number in range(len(row)):
            yield next(later if number else first)


def _encode_whole(
    tokenizer: Any, rows: Sequence[Sequence[Segment]], boundary: Boundary, roles: tuple[str, ...]
) -> list[MaskedIds]:
    if not rows:
        return []
    encoded = _encode(tokenizer, ["".join(segment.text for segment in row) for row in rows], offsets=True)
    result = []
    for ids, offsets, row in zip(encoded["input_ids"], encoded["offset_mapping"], rows, strict=True):
        mask = _mask_of(offsets, row, boundary)
        if roles:
            _silence(mask, offsets, row, roles)
        result.append(MaskedIds(ids, mask))
    return result


def _silence(
    mask: list[int], offsets: Sequence[tuple[int, int]], row: Sequence[Segment], roles: tuple[str, ...]
) -> None:
    """Set the mask to 0 for every token that touches one of ``roles`` in the agent's text."""
    position = 0
    for segment in row:
        if segment.author is Author.AGENT:
            for start, stop in role_spans(segment.text, roles):
                first, last = _tokens_within(offsets, position + start, position + stop, Boundary.MASK)
                mask[first:last] = [0] * (last - first)
        position += len(segment.text)


def role_spans(text: str, roles: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of ``roles`` in the agent's ``text``. A role that is never closed ends with the text.

    A tag inside another role is text of that role.
    """
    for block in blocks(text):
        if block.role in roles:
            yield block.start, block.end if block.end >= 0 else len(text)
            if block.end < 0:
                return


def _mask_of(offsets: Sequence[tuple[int, int]], row: Sequence[Segment], boundary: Boundary) -> list[int]:
    mask = [1] * len(offsets)
    position = 0
    for segment in row:
        stop = position + len(segment.text)
        if segment.author is Author.ENVIRONMENT:
            first, last = _tokens_within(offsets, position, stop, boundary)
            mask[first:last] = [0] * (last - first)
        position = stop
    return mask


def _tokens_within(
    offsets: Sequence[tuple[int, int]], start: int, stop: int, boundary: Boundary
) -> tuple[int, int]:
    """Return the range of the tokens inside ``[start, stop)``, or, for ``MASK``, of those that touch it."""
    begin, end = itemgetter(0), itemgetter(1)
    if boundary is Boundary.MASK:
        return bisect_right(offsets, start, key=end), bisect_left(offsets, stop, key=begin)
    first = bisect_left(offsets, start, key=begin)
    return first, max(first, bisect_right(offsets, stop, key=end))


def _encode(tokenizer: Any, texts: list[str], *, offsets: bool = False) -> Any:
    return tokenizer(
        texts,
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        verbose=False,
    )


class ContinuingTokenizer:
    """A tokenizer with the same vocabulary and merges that puts no space before a text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, texts: list[str]) -> dict[str, list[Any]]:
        """Return ids and offsets of each text, without special tokens."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": [encoding.offsets for encoding in encodings],
        }


_made: WeakKeyDictionary[Any, tuple[int, ContinuingTokenizer | None]] = WeakKeyDictionary()


def continuing(tokenizer: Any) -> ContinuingTokenizer | None:
    """Return the variant that encodes continuations, or ``None`` if the tokenizer itself does."""
    size = len(tokenizer)  # tokens may be added later
    known = _made.get(tokenizer)
    if known is None or known[0] != size:
        known = (size, _make(tokenizer.backend_tokenizer))
        _made[tokenizer] = known
    return known[1]


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of ``text`` as the continuation of another text."""
    variant = continuing(tokenizer)
    if variant is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(variant([text])["input_ids"][0])


def _make(backend: Any) -> ContinuingTokenizer | None:
    from tokenizers import Tokenizer

    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    settings = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    bare = {name: _without_blank(part) for name, part in settings.items()}
    if bare == settings:
        return None
    copy = Tokenizer.from_str(json.dumps({**json.loads(backend.to_str()), **bare}))
    copy.no_truncation()
    copy.no_padding()
    return ContinuingTokenizer(copy)


def _without_blank(part: Any) -> Any:
    """Return a component's description without the part that puts a space before a text."""
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
