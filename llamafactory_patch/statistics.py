"""What a training is about to learn from, counted on the very token ids and labels that the trainer gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from afm.trajectory.tags import blocks

IGNORED = -100
PROMPT = "(prompt)"
"""Everything before the first trained token."""
BETWEEN = "(between)"
"""Text of the dialogue outside of all tags: template tokens, later questions, plain answers."""
SAMPLED_SEQUENCES = 2000
"""Roles are told from decoded text, which is slow; this many sequences, evenly spread, stand for all."""

_COLUMNS = ("input_ids", "labels")
_SIDES = ("", "chosen_", "rejected_")

Ids: TypeAlias = Any
"""A one-dimensional numpy array of int64; numpy is untyped in this project."""


@dataclass(frozen=True, slots=True)
class RoleShare:
    """Tokens of one tag in the sampled sequences, and those of them with a loss."""

    tokens: int
    trained: int


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """A data set in numbers; token counts leave padding out.

    Attributes:
        rows: Rows the trainer gets: packs, when sequences were packed, or pairs.
        sequences: Trajectories in them.
        tokens: Of all sequences.
        trained: Tokens with a loss.
        length_percentiles: Length of a sequence at 0, 50, 95 and 100 percent.
        cutoff_len: Longest sequence allowed.
        at_cutoff: Sequences of that length, which were cut (or fitted exactly).
        duplicates: Sequences that equal an earlier one, token for token.
        sampled: Sequences from which ``roles`` were counted.
        roles: By tag, in order of appearance.
        first_only: Whether all this is said of the first rows of a stream.
    """

    rows: int
    sequences: int
    tokens: int
    trained: int
    length_percentiles: tuple[int, int, int, int]
    cutoff_len: int
    at_cutoff: int
    duplicates: int
    sampled: int
    roles: dict[str, RoleShare]
    first_only: bool = False


def count_tokens(
    dataset: Any, tokenizer: Any, cutoff_len: int, *, first_only: bool = False
) -> DataStatistics:
    """Count a tokenized data set with the columns ``input_ids`` and ``labels``, of pairs, or with ``position_ids``, if packed.

    Raises:
        ValueError: It has no row.
    """
    lengths: list[int] = []
    seen: set[int] = set()
    trained = duplicates = 0
    for ids, labels in sequences(dataset):
        lengths.append(len(ids))
        trained += int(np.count_nonzero(labels != IGNORED))
        digest = hash(ids.tobytes())
        duplicates += digest in seen
        seen.add(digest)
    if not lengths:
        raise ValueError("the data set has no row")
    percentiles: list[int] = np.percentile(lengths, (0, 50, 95, 100), method="nearest").tolist()
    low, middle, high, top = percentiles
    step = -(-len(lengths) // SAMPLED_SEQUENCES)
    sample = (pair for number, pair in enumerate(sequences(dataset)) if number % step == 0)
    return DataStatistics(
        rows=len(dataset),
        sequences=len(lengths),
        tokens=sum(lengths),
        trained=trained,
        length_percentiles=(low, middle, high, top),
        cutoff_len=cutoff_len,
        at_cutoff=sum(length >= cutoff_len for length in lengths),
        duplicates=duplicates,
        sampled=-(-len(lengths) // step),
        roles=_roles(sample, tokenizer),
        first_only=first_only,
    )


def sequences(dataset: Any) -> Iterator[tuple[Ids, Ids]]:
    """Token ids and labels of every trajectory, both of a pair, packs taken apart and padding left out."""
    sides = sequence_sides(dataset)
    packed = "position_ids" in dataset.column_names
    columns = [side + name for side in sides for name in _COLUMNS] + (["position_ids"] if packed else [])
    for batch in dataset.select_columns(columns).with_format("arrow").iter(batch_size=256):
        values = {name: batch.column(name).combine_chunks() for name in columns}
        flat = {name: np.asarray(array.flatten(), dtype=np.int64) for name, array in values.items()}
        for side in sides:
            offsets = np.asarray(values[f"{side}input_ids"].offsets)
            for start, end in pairwise((offsets - offsets[0]).tolist()):
                ids, labels = (flat[side + name][start:end] for name in _COLUMNS)
                if packed:
                    yield from _unpacked(ids, labels, flat["position_ids"][start:end])
                else:
                    yield ids, labels


def sequence_sides(dataset: Any) -> list[str]:
    """What the columns of ids and labels begin with: nothing, or the sides of a pair; none for other data."""
    names = set(getattr(dataset, "column_names", None) or ())
    return [side for side in _SIDES if {side + name for name in _COLUMNS} <= names]


def _unpacked(ids: Ids, labels: Ids, positions: Ids) -> Iterator[tuple[Ids, Ids]]:
    begins = np.flatnonzero(positions == 0).tolist()
    for start, end in pairwise([*begins, len(ids)]):
        if end - start > 1 or labels[start] != IGNORED:  # every padding token stands at position 0
            yield ids[start:end], labels[start:end]


def _roles(sample: Iterable[tuple[Ids, Ids]], tokenizer: Any) -> dict[str, RoleShare]:
    pieces = Pieces(tokenizer)
    tokens: dict[str, int] = {}
    trained: dict[str, int] = {}
    for ids, labels in sample:
        loss = labels != IGNORED
        for name, chosen in _tagged(pieces.of(ids), loss):
            tokens[name] = tokens.get(name, 0) + int(np.count_nonzero(chosen))
            trained[name] = trained.get(name, 0) + int(np.count_nonzero(loss & chosen))
    return {name: RoleShare(tokens[name], trained[name]) for name in tokens if tokens[name]}


def _tagged(texts: Sequence[str], loss: Any) -> Iterator[tuple[str, Any]]:
    """Names of the tags in a sequence, each with the tokens that begin in it."""
    begins = np.concatenate(([0], np.cumsum([len(text) for text in texts])))[:-1]
    first = int(np.argmax(loss)) if loss.any() else len(texts)
    left = np.arange(len(texts)) >= first
    yield PROMPT, ~left
    after = int(begins[first]) if first < len(texts) else 0
    for block in blocks("".join(texts), begin=after) if first < len(texts) else ():
        if block.end >= 0:
            inside = left & (begins >= block.start) & (begins < block.end)
            yield block.role, inside
            left &= ~inside
    yield BETWEEN, left


class Pieces:
    """The text of every token by itself; a letter cut by a token border shows as a replacement character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text: dict[int, str] = {}

    def of(self, ids: Ids) -> list[str]:
        """The text of each token."""
        unknown = [token for token in np.unique(ids).tolist() if token not in self._text]
        if unknown:
            texts = self._tokenizer.batch_decode([[token] for token in unknown])
            self._text.update(zip(unknown, texts, strict=True))
        return [self._text[token] for token in ids.tolist()]
