"""From who wrote the text to which tokens are trained on.

Agent text is trained on, environment text is not. How a token is treated that would hold characters of
both is the :class:`Boundary`; ``SPLIT`` leaves no such token, because every author's text is encoded on its
own. That is also what an episode does, where observations are appended as tokens of their own, so training and
rollouts see the same ids for the same text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from afm.errors import ConfigError
from afm.trajectory.types import Author, Segment


class Boundary(StrEnum):
    """What happens to a token at the joint of two authors."""

    SPLIT = "split"
    """Each author's text is encoded alone; no token holds both."""
    MASK = "mask"
    """The joined text is encoded; a token with any environment character is masked."""
    KEEP = "keep"
    """The joined text is encoded; a token with any agent character is trained on."""


@dataclass(frozen=True, slots=True)
class MaskedIds:
    """Token ids and, as long, their mask: 1 where the agent wrote the token, else 0."""

    ids: list[int]
    mask: list[int]


def encode_segments(
    tokenizer: Any, segments: Sequence[Segment], boundary: Boundary = Boundary.SPLIT
) -> MaskedIds:
    """Encode one response; see :func:`encode_batch`, which is faster for many."""
    return encode_batch(tokenizer, [segments], boundary)[0]


def encode_batch(
    tokenizer: Any, rows: Sequence[Sequence[Segment]], boundary: Boundary = Boundary.SPLIT
) -> list[MaskedIds]:
    """Encode many responses in one call of the tokenizer; no special tokens are added.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        rows: The segments of each response; neighbours by one author count as one text.
        boundary: Treatment of the joints.

    Raises:
        ConfigError: The tokenizer is a slow one, which cannot say where its tokens stand.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, expected a fast one (a folder with tokenizer.json)"
        )
    joined = [_joined(row) for row in rows]
    return (
        _encode_split(tokenizer, joined)
        if boundary is Boundary.SPLIT
        else _encode_whole(tokenizer, joined, boundary)
    )


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    filled = (segment for segment in segments if segment.text)
    groups = groupby(filled, key=attrgetter("author"))
    return [Segment(author, "".join(segment.text for segment in group)) for author, group in groups]


def _encode_split(tokenizer: Any, rows: Sequence[Sequence[Segment]]) -> list[MaskedIds]:
    texts = [segment.text for row in rows for segment in row]
    encoded = iter(_encode(tokenizer, texts)["input_ids"]) if texts else iter(())
    result = []
    for row in rows:
        masked = MaskedIds([], [])
        for segment in row:
            ids = next(encoded)
            masked.ids.extend(ids)
            masked.mask.extend([int(segment.author is Author.AGENT)] * len(ids))
        result.append(masked)
    return result


def _encode_whole(tokenizer: Any, rows: Sequence[Sequence[Segment]], boundary: Boundary) -> list[MaskedIds]:
    if not rows:
        return []
    encoded = _encode(tokenizer, ["".join(segment.text for segment in row) for row in rows], offsets=True)
    result = []
    for ids, offsets, row in zip(encoded["input_ids"], encoded["offset_mapping"], rows, strict=True):
        result.append(MaskedIds(ids, _mask_of(offsets, row, boundary)))
    return result


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
    """Range of the tokens that lie inside ``[start, stop)``, or for ``MASK`` that touch it."""
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
