"""Read files of published rows: JSONL, JSON, parquet, tables, and folders of ``Dataset.save_to_disk``."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from afm.errors import DataError, MissingExtraError, no_such_file, utf8_advice
from afm.trajectory.io import json_rows, refuse_other_content

_TABLES = {".tsv": "\t", ".csv": ","}
_ARROW = ".arrow"
_STATE, _SPLITS, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
SUFFIXES = (".parquet", ".jsonl", ".json", _ARROW, *_TABLES)


def published_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a JSONL, JSON, parquet, TSV or CSV file with their lines (parquet: row numbers, from 1).

    A :class:`DataError` replaces a row that cannot be decoded.

    Raises:
        DataError: The file is missing, has another format, or cannot be read as a whole.
    """
    if not file.is_file():
        raise DataError(f"{no_such_file(file)}; expected one of {', '.join(SUFFIXES)}", path=str(file))
    if file.suffix in (".parquet", _ARROW):
        return columnar_rows(file)
    if file.suffix not in (".jsonl", ".json"):
        refuse_other_content(file, tables=True)
    if file.suffix in _TABLES:
        return _table_rows(file, _TABLES[file.suffix])
    if file.suffix in (".jsonl", ".json"):
        return json_rows(file)
    raise DataError(
        f"expected one of {', '.join(SUFFIXES)}; rename a table to .csv, and rows of JSON to .jsonl",
        path=str(file),
    )


def columnar_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any] | DataError]]:
    """Yield the rows of a parquet file or an arrow stream with their numbers, from 1. Memory holds one batch."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    try:
        if file.suffix == _ARROW:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                yield from enumerate(_decoded(batches), 1)
        else:
            with pq.ParquetFile(file) as table:
                yield from enumerate(_decoded(table.iter_batches(batch_size=256)), 1)
    except (pa.ArrowException, OSError) as error:
        stream = f"not a complete arrow stream ({error}); save the set with save_to_disk again"
        message = stream if file.suffix == _ARROW else f"not a readable parquet file: {error}"
        raise DataError(message, path=str(file)) from None


def _decoded(batches: Iterable[Any]) -> Iterator[dict[str, Any] | DataError]:
    """Yield the rows of Arrow batches. A :class:`DataError` replaces a row with a cell that cannot be decoded."""
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError):  # bytes that are not UTF-8, years beyond 9999
            for place in range(batch.num_rows):
                try:
                    yield from batch.slice(place, 1).to_pylist()
                except (ValueError, OverflowError) as error:
                    yield DataError(f"a value cannot be decoded: {error}")


def _table_rows(file: Path, delimiter: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(sys.maxsize)
    try:
        with file.open(encoding=_encoding(file), newline="") as lines:
            if delimiter == ",":
                header = lines.readline()  # spreadsheets write ; or a tab in locales with a decimal comma
                delimiter = next((mark for mark in (",", ";", "\t") if mark in header), ",")
                lines.seek(0)
            table = csv.DictReader(lines, delimiter=delimiter)
            names = table.fieldnames or ()
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                found = f"two columns are called {twice[0]!r}; rename one of them, or remove it"
                raise DataError(found, path=str(file), line=1)
            for row in table:
                if None in row or None in row.values():
                    wrong = f"expected {len(table.fieldnames or ())} fields, as in the first line"
                    yield table.line_num, DataError(wrong)
                else:
                    yield table.line_num, row
    except UnicodeDecodeError as error:
        line = _undecodable_line(file)
        raise DataError(
            f"not UTF-8 from here on ({error.reason}). Save the table as CSV UTF-8, or convert it: {utf8_advice(file)}",
            path=str(file),
            line=line,
        ) from None
    except csv.Error as error:
        raise DataError(f"not a readable table: {error}", path=str(file), line=table.line_num) from None


def _encoding(file: Path) -> str:
    """Return UTF-8, or UTF-16 if the file begins with its byte order mark, as a spreadsheet's "Unicode text" does."""
    with file.open("rb") as head:
        return "utf-16" if head.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _undecodable_line(file: Path) -> int | None:
    """Return the number of the first line that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return None


def data_files(folder: Path) -> dict[Path, str]:
    """Return the files below a folder that can hold rows, sorted, each with its path on the Hub.

    Of folders that ``save_to_disk`` wrote, only the arrow files with rows are listed. AFM's download scripts save the
    published sets in this form.

    Raises:
        DataError: A saved folder is incomplete.
    """
    names: dict[Path, str] = {}
    saved: set[Path] = set()
    for path in sorted([folder, *folder.rglob("*")]):  # a folder before its content
        if not saved.isdisjoint(path.parents):
            continue
        if path.is_dir() and (streams := _saved_files(path)) is not None:
            saved.add(path)
            names |= streams
        elif path.suffix in SUFFIXES and path.is_file():
            names[path] = path.relative_to(folder).as_posix()
    return dict(sorted(names.items()))


def _saved_files(folder: Path) -> dict[Path, str] | None:
    """Return the arrow files of a folder that ``save_to_disk`` wrote, with their paths on the Hub, else ``None``.

    ``state.json`` names them. A folder of several splits has ``dataset_dict.json`` and one folder per split.
    """
    hub_name = "data/{}-00000-of-00001.parquet"
    if (folder / _SPLITS).is_file():
        splits = map(_plain_name, _read_list(folder / _SPLITS, "splits"))
        return {file: hub_name.format(split) for split in splits for file in _saved_streams(folder / split)}
    if (folder / _STATE).is_file() and (folder / _INFO).is_file():
        return dict.fromkeys(_saved_streams(folder), hub_name.format(folder.name))
    return None


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
            f"not a file of save_to_disk: expected a list {key!r} ({type(error).__name__}); save the set again",
            path=str(path),
        ) from None
    return entries


def _plain_name(name: Any) -> str:
    """Return a file name without a folder, the only kind that save_to_disk writes."""
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise DataError(f"a folder of save_to_disk names {name!r}, expected a name within that folder")
    return name
