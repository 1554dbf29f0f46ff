"""Rows of published files through a reader: made into tasks, conversations or samples, or refused with file and line."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from afm.datasets.readers.row import AlpacaRow, ReadRow, RowReader
from afm.datasets.schema import Task, batch_rows, checked_gold, parquet_rows, plain_value
from afm.errors import DataError, MissingExtraError
from afm.runs.atomic import replacing
from afm.trajectory.io import json_rows

_TABLES = {".tsv": "\t", ".csv": ","}
_KEY_BYTES = 12
_SHOW_EVERY = 500
_REASON_CHARS = 100
_FIRST_BAD = 5
ARROW_SUFFIX = ".arrow"
_STATE, _SPLITS, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
SUFFIXES = (".parquet", ".jsonl", ".json", ARROW_SUFFIX, *_TABLES)

OnRow = Callable[[int], None]
"""Receives how many rows have been read."""


@dataclass(slots=True)
class ReadCounts:
    """What became of the rows.

    Attributes:
        read: All of them.
        made: Turned into something.
        repeated: Left out because an earlier row says the same under the same id.
        renamed: ReadRow, under an id of their own: theirs was an earlier row's, which says something else.
        refused: Bad rows by reason.
        by_file: Rows that were read, by file.
        left_out: Good rows that a list of sets does not want, by reason (:mod:`afm.datasets.prepared`).
    """

    read: int = 0
    made: int = 0
    repeated: int = 0
    renamed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    by_file: Counter[Path] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def bad(self) -> int:
        """Rows that were refused."""
        return sum(self.refused.values())

    def as_counts(self) -> dict[str, int]:
        """For a manifest."""
        counts = {"read": self.read, "made": self.made, "repeated": self.repeated}
        counts |= {"bad": self.bad, "renamed": self.renamed}
        return counts | ({"left_out": self.left_out.total()} if self.left_out else {})

    def summary(self) -> str:
        """The commonest reasons why rows were not made."""
        reasons = (self.refused + self.left_out).most_common(3)
        return "; ".join(f"{count} {reason}" for reason, count in reasons) or "there are none"

    def leave_out(self, reason: str) -> None:
        """Count a row that was made as one that is not wanted."""
        self.made -= 1
        self.left_out[reason] += 1


class BadRows:
    """Writes down the rows that are refused: file, line and reason, one JSON line each; if ``strict``, the first is an error.

    Attributes:
        count: How many there were.
        first: The first few of them.
    """

    def __init__(self, file: IO[str], *, strict: bool = False) -> None:
        self.count = 0
        self.first: list[DataError] = []
        self._file = file
        self._strict = strict

    def note(self, error: DataError) -> None:
        """Write one down, or raise it."""
        if self._strict:
            raise error
        self.count += 1
        if self.count <= _FIRST_BAD:
            self.first.append(error)
        row = {"file": error.path, "line": error.line, "reason": error.message}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def listing_bad_rows(path: Path, *, strict: bool = False) -> Iterator[BadRows]:
    """Refused rows are listed in ``path``, which appears when the block ends well and is absent when there were none."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as sink:
        bad = BadRows(sink, strict=strict)
        yield bad
    if not bad.count:
        path.unlink()


def read_published(
    files: Iterable[Path],
    reader: RowReader,
    bad: BadRows,
    counts: ReadCounts,
    *,
    label: str,
    data_source: str | None = None,
    on_row: OnRow | None = None,
) -> Iterator[ReadRow]:
    """Stream what a reader makes of files; every row is made, repeated or noted in ``bad``, and counted as that.

    Args:
        label: Begins the ids of rows that have none.
        data_source: Of tasks whose reader gives none.

    Raises:
        DataError: A file cannot be read as a whole, or ``bad`` is strict.
    """
    seen: dict[str, bytes] = {}
    for file in files:
        for line, row in rows_of(file, reader):
            counts.read += 1
            counts.by_file[file] += 1
            if on_row is not None and counts.read % _SHOW_EVERY == 0:
                on_row(counts.read)
            default = f"{label}-{counts.read}"
            try:
                made = _make(row, reader, default, data_source)
            except DataError as error:
                counts.refused[_reason(error.message)] += 1
                bad.note(DataError(error.message, path=str(file), line=line))
                continue
            if (unique := _with_unique_id(made, default, seen)) is None:
                counts.repeated += 1
                continue
            counts.renamed += unique is not made
            counts.made += 1
            yield unique


def rows_of(file: Path, reader: RowReader) -> Iterator[tuple[int, Any]]:
    """As :func:`published_rows`, with the rows taken out where the layout packs many into one."""
    for line, row in published_rows(file):
        if reader.unpack is None or not isinstance(row, Mapping):
            yield line, row
            continue
        try:
            yield from ((line, unpacked) for unpacked in reader.unpack(file.stem, row))
        except DataError as error:
            raise DataError(error.message, path=str(file)) from None


def published_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a JSONL, JSON, parquet, TSV or CSV file with their lines (parquet: row numbers, from 1).

    A :class:`DataError` stands in place of a row that cannot be decoded.

    Raises:
        DataError: The file is missing, of another kind, or unreadable as a whole.
    """
    if not file.is_file():
        raise DataError(f"no such file; expected one of {', '.join(SUFFIXES)}", path=str(file))
    if file.suffix == ".parquet":
        return parquet_rows(file)
    if file.suffix == ARROW_SUFFIX:
        return _arrow_rows(file)
    if file.suffix in _TABLES:
        return _table_rows(file, _TABLES[file.suffix])
    if file.suffix in (".jsonl", ".json"):
        return json_rows(file)
    raise DataError(f"expected one of {', '.join(SUFFIXES)}", path=str(file))


def data_files(folder: Path) -> dict[Path, str]:
    """Files below a folder that can hold rows, sorted, each with its path as the Hub would call it.

    Of folders that ``save_to_disk`` wrote only the arrow files with rows are listed, not their descriptions.

    Raises:
        DataError: A saved folder is not whole.
    """
    saved = _saved_files(folder)
    places = [place for place in [folder, *folder.rglob("*")] if place.is_dir() and _is_saved(place)]
    names = {path: _hub_name(path, split) for path, split in saved.items()}
    for path in folder.rglob("*"):
        inside = any(place in path.parents for place in places)
        if path.suffix in SUFFIXES and path.is_file() and not inside:
            names[path] = path.relative_to(folder).as_posix()
    return dict(sorted(names.items()))


def _table_rows(file: Path, delimiter: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(sys.maxsize)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines, delimiter=delimiter)
            for row in table:
                if None in row or None in row.values():
                    wrong = f"expected {len(table.fieldnames or ())} fields, as in the first line"
                    yield table.line_num, DataError(wrong)
                else:
                    yield table.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"no readable table: {error}", path=str(file)) from None


def _make(row: Any, reader: RowReader, default: str, data_source: str | None) -> ReadRow:
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"got {type(row).__name__}, expected an object")
    try:
        made = reader.read(row, default)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not isinstance(made, Task):
        return made
    plain = {
        "ground_truth": checked_gold(made.ground_truth, "ground_truth"),
        "extra_info": plain_value(made.extra_info, "extra_info"),
    }
    made = made.model_copy(update=plain)
    if not made.data_source:
        if not data_source:
            raise DataError("the row names no data_source; give one with the command or the YAML")
        made = made.model_copy(update={"data_source": data_source})
    return made


def _with_unique_id(made: ReadRow, default: str, seen: dict[str, bytes]) -> ReadRow | None:
    """The row under an id that no other row has; ``None`` when it was there already.

    Rows of equal ids would fall into one group in reinforcement, so a second question under an id gets the id of a row
    that has none.
    """
    if isinstance(made, AlpacaRow):
        return made
    said = made.question if isinstance(made, Task) else made.model_dump_json(include={"messages"})
    key = hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
    before = seen.setdefault(made.id, key)
    if before is key:
        return made
    if before == key:
        return None
    if seen.setdefault(default, key) is not key:  # somebody else is called so
        default = f"{default}-{key.hex()}"
        seen[default] = key
    return made.model_copy(update={"id": default})


def _reason(message: str) -> str:
    """The reason without what is different in every row."""
    return message.partition(", got ")[0][:_REASON_CHARS]


# Folders that ``Dataset.save_to_disk`` wrote: arrow streams, with a ``state.json`` that names them; one of several splits has
# ``dataset_dict.json`` and one folder a split. AFM's download scripts leave the published sets in this form.


def _is_saved(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``, with or without splits."""
    return (folder / _SPLITS).is_file() or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def _saved_files(folder: Path) -> dict[Path, str]:
    """The arrow files of a saved folder, or of saved folders below it, with the split of each (empty: it has none)."""
    splits: dict[Path, str] = {}
    inside: set[Path] = set()
    for place in sorted([folder, *(path for path in folder.rglob("*") if path.is_dir())]):
        if place in inside or not _is_saved(place):
            continue
        if (place / _SPLITS).is_file():
            for split in map(_plain_name, _read_list(place / _SPLITS, "splits")):
                inside.add(place / split)
                splits |= dict.fromkeys(_saved_streams(place / split), split)
        else:
            splits |= dict.fromkeys(_saved_streams(place), "")
    return splits


def _hub_name(path: Path, split: str) -> str:
    """What the file would be called on the Hub, for patterns such as ``data/train-*.parquet``."""
    return f"data/{split or path.parent.name}-00000-of-00001.parquet"


def _arrow_rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Rows of an arrow stream, with their numbers from 1."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    number = 0
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                for row in batch_rows(batch):
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"no whole arrow stream ({error}); save the set with save_to_disk again", path=str(file)
        ) from None


def _saved_streams(folder: Path) -> list[Path]:
    listed = _read_list(folder / _STATE, "_data_files")
    files = [
        folder / _plain_name(entry.get("filename") if isinstance(entry, dict) else entry) for entry in listed
    ]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"no such file, though {folder / _STATE} names it; save the set again", path=str(file)
            )
    return files


def _read_list(path: Path, key: str) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))[key]
        if not isinstance(entries, list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"not readable as what save_to_disk writes, expected a list {key!r} ({type(error).__name__}); save the set again",
            path=str(path),
        ) from None
    return entries


def _plain_name(name: Any) -> str:
    """A name within its folder, which is all that save_to_disk writes."""
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise DataError(f"a folder of save_to_disk names {name!r}, expected a name within that folder")
    return name
