"""Statistics and examples of the training data, from the token ids and labels that the trainer gets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from afm.terminal import visible
from afm.trajectory.tags import blocks

STATISTICS_FILE = "data_statistics.json"
EXAMPLES_FILE = "data_examples.txt"

IGNORED = -100
PROMPT = "(prompt)"
"""Everything before the first trained token."""
BETWEEN = "(between)"
"""Text outside of all tags: template tokens, later questions, plain answers."""
SAMPLED_SEQUENCES = 2000
"""Number of sequences, evenly spread, in which roles are counted; decoding all sequences would be slow."""

_SHOWN_CHARS = 300
_EXAMPLES = 3
_SHOWN_TOKENS = 40
_COLUMNS = ("input_ids", "labels")
_SIDES = ("", "chosen_", "rejected_")

Ids: TypeAlias = Any
"""A one-dimensional numpy array of int64; numpy is untyped in this project."""


@dataclass(frozen=True, slots=True)
class RoleShare:
    """Tokens of one tag in the sampled sequences, and how many of them have a loss."""

    tokens: int
    trained: int


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """Statistics of a data set; token counts exclude padding.

    Attributes:
        rows: Rows that the trainer gets, which may be packs or pairs.
        sequences: Trajectories in the rows.
        trained: Tokens with a loss.
        length_percentiles: Length of a sequence in tokens at 0, 50, 95 and 100 percent.
        cutoff_len: Longest allowed sequence.
        at_cutoff: Sequences of this length, which were cut or fit exactly.
        duplicates: Sequences whose tokens equal those of an earlier sequence.
        sampled: Sequences in which ``roles`` were counted.
        roles: Tokens by tag, in order of appearance.
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


def count_tokens(dataset: Any, tokenizer: Any, cutoff_len: int) -> DataStatistics:
    """Count the tokens of a data set of single rows, pairs, or packs (which have ``position_ids``).

    Raises:
        ValueError: The data set has no rows.
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
        raise ValueError("the data set has no rows")
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
    )


def sequences(dataset: Any) -> Iterator[tuple[Ids, Ids]]:
    """Yield token ids and labels of every trajectory without padding; split pairs and packs."""
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
    """Return the prefixes of the columns of ids and labels: empty, or the sides of a pair. Other data has no prefixes."""
    names = set(getattr(dataset, "column_names", None) or ())
    return [side for side in _SIDES if {side + name for name in _COLUMNS} <= names]


def _unpacked(ids: Ids, labels: Ids, positions: Ids) -> Iterator[tuple[Ids, Ids]]:
    begins = np.flatnonzero(positions == 0).tolist()
    for start, end in pairwise([*begins, len(ids)]):
        if end - start > 1 or labels[start] != IGNORED:  # every padding token has position 0
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
    """Yield the names of the tags in a sequence, each with the tokens that begin in it."""
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
    """Decodes single tokens; a character that spans two tokens becomes replacement characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text: dict[int, str] = {}

    def of(self, ids: Ids) -> list[str]:
        """Return the text of each token."""
        unknown = [token for token in np.unique(ids).tolist() if token not in self._text]
        if unknown:
            texts = self._tokenizer.batch_decode([[token] for token in unknown])
            self._text.update(zip(unknown, texts, strict=True))
        return [self._text[token] for token in ids.tolist()]


def first_without_label(dataset: Any) -> Ids | None:
    """Return the beginning of the first sequence without loss, if any; the token at position 0 never has a loss."""
    for ids, labels in sequences(dataset):
        if not (labels[1:] != IGNORED).any():
            return ids[:_SHOWN_TOKENS]
    return None


def show_data(dataset: Any, tokenizer: Any, cutoff_len: int, output_dir: Path) -> None:
    """Print the statistics and three shortened examples; save both in full next to the model.

    Does nothing for rows without ids and labels.
    """
    if not sequence_sides(dataset):
        return
    statistics = count_tokens(dataset, tokenizer, cutoff_len)
    shown = list(examples(dataset, statistics, _EXAMPLES))
    print(statistics_table(statistics), flush=True)
    for title, ids, labels in shown:
        print(f"{title}\n{visible(rendered(ids, labels, tokenizer, _SHOWN_CHARS))}\n", flush=True)
    output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(statistics), indent=2, ensure_ascii=False) + "\n"
    (output_dir / STATISTICS_FILE).write_text(text, encoding="utf-8")
    whole = [f"{title}\n{rendered(ids, labels, tokenizer)}\n" for title, ids, labels in shown]
    (output_dir / EXAMPLES_FILE).write_text("\n".join(whole), encoding="utf-8")


def statistics_table(statistics: DataStatistics) -> str:
    """Return the statistics as text."""
    low, middle, high, top = statistics.length_percentiles
    packed = f" in {statistics.rows:,} rows" if statistics.rows != statistics.sequences else ""
    lines = [
        f"training data: {statistics.sequences:,} sequences{packed}, {statistics.tokens:,} tokens, "
        f"{_percent(statistics.trained, statistics.tokens)} trained on",
        f"  length: {low:,} to {top:,} tokens, median {middle:,}, 95 % up to {high:,}",
        f"  as long as cutoff_len ({statistics.cutoff_len:,}), so probably cut: {statistics.at_cutoff:,}",
        f"  equal to an earlier one: {statistics.duplicates:,}",
        f"  by tag, in {statistics.sampled:,} sequences:",
    ]
    total = sum(role.tokens for role in statistics.roles.values())
    for name, role in statistics.roles.items():
        share = f"{_percent(role.tokens, total):>7} of the tokens"
        lines.append(f"    {name:<18} {share}, {_percent(role.trained, role.tokens):>7} of them trained on")
    return "\n".join(lines)


def rendered(ids: Ids, labels: Ids, tokenizer: Any, max_chars: int | None = None) -> str:
    """Decode tokens; tokens without loss are in ⟦ ⟧. The middle of stretches above ``max_chars`` is cut out."""
    parts = []
    pairs = zip(ids.tolist(), (labels != IGNORED).tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        text = _shortened(tokenizer.decode([token for token, _ in run]), max_chars)
        parts.append(text if trained else f"⟦{text}⟧")
    return "".join(parts)


def examples(dataset: Any, statistics: DataStatistics, count: int) -> Iterator[tuple[str, Ids, Ids]]:
    """Yield the first sequence, one from the middle, the first of the longest, and further ones up to ``count``."""
    longest = next(
        number
        for number, (ids, _) in enumerate(sequences(dataset))
        if len(ids) == statistics.length_percentiles[-1]
    )
    total = statistics.sequences
    chosen = dict.fromkeys((0, total // 2, longest, *range(min(count, total))))
    for number in sorted(islice(chosen, count)):
        ids, labels = next(islice(sequences(dataset), number, None))
        title = f"--- sequence {number + 1}: {len(ids):,} tokens; ⟦no loss⟧"
        yield title, ids, labels


def _shortened(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def print_examples(
    dataset: Any,
    tokenizer: Any,
    cutoff_len: int,
    count: int,
    *,
    prompts: object = None,
    as_json: bool = False,
) -> None:
    """Print the statistics of a run's data, and ``count`` whole sequences.

    Shows the first sequence, one from the middle, the longest, and then those after the first.

    Args:
        prompts: Prompts of the rows.
        as_json: Print one object for the statistics and one for each sequence (``tokens``, ``trained``,
            ``trained_text``, ``masked_text``) instead.
    """
    statistics = count_tokens(dataset, tokenizer, cutoff_len)
    print(json.dumps(asdict(statistics), ensure_ascii=False) if as_json else statistics_table(statistics))
    if prompts is not None and not as_json:
        print(f"  {prompts}")
    for title, ids, labels in examples(dataset, statistics, count):
        if as_json:
            print(json.dumps(_row(ids, labels, tokenizer), ensure_ascii=False))
        else:
            print(f"\n{title}\n{visible(rendered(ids, labels, tokenizer))}")


def _row(ids: Ids, labels: Ids, tokenizer: Any) -> dict[str, Any]:
    trained = labels != IGNORED
    return {
        "tokens": len(ids),
        "trained": int(trained.sum()),
        "trained_text": tokenizer.decode(ids[trained].tolist()),
        "masked_text": tokenizer.decode(ids[~trained].tolist()),
    }
