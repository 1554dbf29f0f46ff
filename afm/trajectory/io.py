"""Files of rows: records as JSON lines (append-only, one write per record), and rows of JSONL or of one JSON array."""

from __future__ import annotations

import json
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from afm.errors import DataError, fault_words, json_word, utf8_advice, with_path
from afm.runs.journal import Journal
from afm.trajectory.record import Record


def read_records(path: str | Path) -> Iterator[Record | DataError]:
    """Yield the record of each line, or the error of a bad line with path and line number. Skips blank lines.

    Raises:
        DataError: The file cannot be opened.
    """
    return (item for _, item in numbered_records(path))


def numbered_records(path: str | Path) -> Iterator[tuple[int, Record | DataError]]:
    """Yield the items of :func:`read_records` with their 1-based lines."""
    for number, line in raw_lines(Path(path)):
        if not line.strip():
            continue
        try:
            yield number, record_of_line(line, path)
        except DataError as error:
            yield number, DataError(error.message, path=str(path), line=number)


def load_records(path: str | Path) -> list[Record]:
    """Return all records of a file. The first bad line is an error."""
    records = []
    for item in read_records(path):
        if isinstance(item, DataError):
            raise item
        records.append(item)
    return records


class RecordWriter(Journal):
    """Appends records to a JSONL file, for one writer at a time.

    A killed process leaves at most an incomplete last line. Opening the file again moves that line to
    ``<file>.partial`` and logs a warning.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path), exclusive=False)

    def write(self, record: Record) -> int:
        """Write one record and return the new length of the file in bytes.

        Raises:
            DataError: JSON cannot express the record.
            ValueError: The writer is not open.
        """
        return self.append(line_of_record(record, self.path))


def append_record(path: str | Path, record: Record) -> None:
    """Append one record in a single write, so that several processes of a machine can write to the file."""
    line = line_of_record(record, Path(path))
    with Path(path).open("ab", buffering=0) as file:
        file.write(line)


def line_of_record(record: Record, path: Path | None = None) -> bytes:
    """Return a record as one line with its line feed. ``path`` is the file in error messages.

    Raises:
        DataError: JSON cannot express the record.
    """
    try:
        return record.model_dump_json().encode() + b"\n"
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise DataError(
            f"record {record.id!r} cannot be written: {error}", path=None if path is None else str(path)
        ) from None


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their 1-based numbers, with one in memory at a time.

    A byte order mark before a line is left out. A file that was joined from several has some.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from ((number, line.removeprefix(BOM_UTF8)) for number, line in enumerate(file, start=1))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None


def record_of_line(line: bytes, path: str | Path = "FILE") -> Record:
    """Return the record of one line. The error of an invalid line has no location."""
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        cut = "" if line.endswith(b"\n") else " (the last line may be incomplete)"
        raise DataError(explain(error, path) + cut) from None


def convert_advice(path: str | Path, row: Any = None) -> str:
    """Return the next step for a file with rows of another format. ``row`` is one of them, perhaps a question."""
    return questions_advice(path, row) or (
        f"convert the file first: afm convert {shlex.quote(str(path))} --to coa --agent NAME -o RECORDS.jsonl"
    )


QUESTIONS = "these are questions"


def questions_advice(path: str | Path, row: Any) -> str:
    """Return the next step for a file whose rows are questions, empty for any other row."""
    if (
        not isinstance(row, Mapping)
        or not row.keys() & {"question", "prompt"}
        or row.keys() & {*_OF_LOGS.split()}
    ):
        return ""
    return f"{QUESTIONS}; a team works on them: afm data distill {shlex.quote(str(path))} --output-dir DIR"


def explain(error: ValidationError, path: str | Path = "FILE") -> str:
    """Return the first fault of a record in one line: key, value, expectation. For another format, how to convert it."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        fault = line_item(bytes(first["input"]).decode("utf-8", "surrogateescape"), Path(path), 1)
        if isinstance(fault, DataError) and not fault.message.startswith("invalid JSON: "):
            return fault.message
        return f"invalid JSON: {first['ctx']['error']}; expected one trajectory record per line"
    row = first["input"]
    if not first["loc"] or (first["type"] == "missing" and isinstance(row, dict) and "segments" not in row):
        shown = f"an object with {', '.join(sorted(row)[:6])}" if isinstance(row, dict) else json_word(row)
        return f"got {shown}, expected a trajectory record; {convert_advice(path, row)}"
    key = ".".join(str(part) for part in first["loc"]) or "row"
    others = error.error_count() - 1
    more = f" (and {others} more fault{'s' if others > 1 else ''})" if others else ""
    return f"{key}: {fault_words(first, _UNKNOWN_KEY)}{more}"


_UNKNOWN_KEY = "unknown key; keys of your own go into `provenance`"

_OF_LOGS = "messages conversations input output response completion steps segments chosen"
_BLANK, _SEPARATOR = re.compile(r"\s*"), re.compile(r"[\s,]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_OTHER_CONTENT: dict[bytes | tuple[bytes, ...], str] = {
    b"\x1f\x8b": "a file packed with gzip, expected rows as text; unpack it: gunzip -c FILE > ROWS.jsonl",
    b"\x28\xb5\x2f\xfd": "a file packed with zstd, expected rows as text; unpack it: zstd -dc FILE > ROWS.jsonl",
    b"PK\x03\x04": "a spreadsheet or a zip archive, expected rows as text; save a spreadsheet as CSV: "
    "libreoffice --convert-to csv FILE, and unpack an archive: unzip FILE",
    b"PAR1": "a parquet file, expected rows as text; write them so: python -c 'import sys, json, pyarrow.parquet as p; "
    "[print(json.dumps(row)) for row in p.read_table(sys.argv[1]).to_pylist()]' FILE > ROWS.jsonl. Questions in it are "
    "read by afm data prepare tasks FILE --data-source NAME -o TASKS.jsonl",
    (b"{'", b"[{'"): "the text of a Python object, expected JSON; write each row with json.dumps(row)",
}
"""Maps the first bytes of files that are not JSON text to what they are and what to do."""
_UTF_16 = {"UTF-16": (b"\xff\xfe", b"\xfe\xff"), "UTF-16LE": (b"{\0", b"[\0"), "UTF-16BE": (b"\0{", b"\0[")}
_OVER_LINES = "a JSON object over several lines, expected one JSON value per line; write it so: jq -c . FILE > ROWS.jsonl"
_TABLE = (
    "a table (CSV), expected one JSON object per line; questions in a file that ends in .csv are read by "
    "afm data prepare tasks FILE --data-source NAME -o TASKS.jsonl"
)
_HEADER = re.compile(rb'("[^"]*"|[A-Za-z_][^{\[:"]*)[,;\t][^{\[]*\Z')


def refuse_other_content(path: Path, *, lists: bool = True, tables: bool = False) -> None:
    """Name what a file is that cannot hold rows of JSON, by its first bytes and its first line.

    Args:
        lists: Whether the file, or a line of it, may be a JSON list.
        tables: Whether it may be a table, also in UTF-16.

    Raises:
        DataError: It is packed, UTF-16, a table, or one object over several lines.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_BLOCK_CHARS)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None
    text = line.removeprefix(BOM_UTF8).strip()
    got = next((what for head, what in _OTHER_CONTENT.items() if line.startswith(head)), None)
    got = got or (_OVER_LINES if text == b"{" else _TABLE if _HEADER.match(text) and not tables else None)
    if got is None and text.startswith(b"[") and not lists:
        got = f"a JSON list, expected one JSON object per line; {convert_advice(path)}"
    wide = {} if tables else _UTF_16
    if encoding := next((name for name, heads in wide.items() if line.startswith(heads)), None):
        got = f"UTF-16, expected UTF-8; convert it: {utf8_advice(path, encoding)}"
    if got is not None:
        raise DataError(f"got {with_path(got, path)}", path=str(path), line=1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. A key that occurs twice is an error, because readers would keep only its last value."""
    item = dict(pairs)
    if len(item) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in item if keys.count(key) > 1)
        raise DataError(f"the key {key!r} occurs twice in one object; keep one of them")
    return item


_DECODER, _LENIENT = json.JSONDecoder(object_pairs_hook=_unique), json.JSONDecoder()
_BLOCK_CHARS = 1 << 16
_LONGEST_WORD = 16
"""More characters than any word or escape of JSON has. An error nearer to the end may result from a cut."""


class BrokenArrayError(DataError):
    """A JSON array breaks off, so that the rows after that place cannot be separated or counted."""


def json_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the decoded rows of JSONL or of one JSON array with their first lines, with one in memory at a time.

    A row that is not JSON or not Unicode is yielded as a :class:`DataError`. If an array breaks off, the last item is a
    :class:`BrokenArrayError`.

    Raises:
        DataError: The file cannot be read.
    """
    path = Path(path)
    refuse_other_content(path)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            text = _ArrayText(file)
            if text.begins_array():
                yield from _array_items(text, path)
                return
        for number, row in raw_lines(path):
            if row.strip():
                yield number, line_item(row.decode("utf-8", "surrogateescape"), path, number)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None


_MEND = "; expected one JSON value per line; correct the text there, or remove the row"
_APART = "; put each on its own line"


def line_item(text: str, path: Path, line: int) -> Any:
    """Return the value on a line, or the :class:`DataError` of reading it."""
    try:
        return _unicode(_DECODER.decode(text), text, path)
    except DataError as error:
        return DataError(error.message, path=str(path), line=line)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else 0
        inside = str(error).startswith("Unterminated string") or 0 < len(text) - at < _LONGEST_WORD
        cut = (
            "; the file ends early, inside this line" if at > 0 and inside and not text.endswith("\n") else ""
        )
        fault = json_fault(error)
        whole = fault if fault.endswith(_APART) else f"invalid JSON: {fault}{cut}{_MEND}"
        return DataError(whole, path=str(path), line=line)


def _unicode(item: Any, text: str, path: Path) -> Any:
    """Return ``item``, which was decoded from ``text``, if all of it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"a byte that is not UTF-8 at character {error.start}; save the file as UTF-8"
        raise DataError(f"{what}, for example so: {utf8_advice(path)}") from None
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"half a character ({half!r}), expected surrogates in pairs") from None
    return item


class _ArrayText:
    """The unread rest of a file. ``line`` is the line of the position, from 1."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self.line = 1

    def begins_array(self) -> bool:
        """Return whether the first non-blank character opens an array, and move past it in that case."""
        begins = self.skip(_BLANK) == "["
        if begins:
            self.step()
        return begins

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move past everything that matches and return the next character, empty at the end of the file."""
        while True:
            self._go(pattern.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def step(self) -> None:
        """Move past the next character, which is not a line feed."""
        self._at += 1

    def item(self) -> tuple[int, Any]:
        """Return the item at the position with its line, reading as much as needed.

        Raises:
            DataError: The item is not Unicode text, or repeats a key.
            ValueError: The item is not JSON.
        """
        while True:
            try:
                item, end, fault = self._decoded()
            except json.JSONDecodeError as error:
                cut = (
                    error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LONGEST_WORD
                )
                if not (cut and self._read()):
                    raise
                continue
            if end < len(self._text) or not self._read():
                break
        line, text = self.line, self._text[self._at : end]
        self._go(end)
        if fault is not None:
            raise fault
        return line, _unicode(item, text, Path(self._file.name))

    def _decoded(self) -> tuple[Any, int, DataError | None]:
        """Return the value at the position, where it ends, and the error about its keys, if there is one."""
        try:
            return *_DECODER.raw_decode(self._text, self._at), None
        except DataError as error:
            return *_LENIENT.raw_decode(self._text, self._at), error

    def _go(self, position: int) -> None:
        self.line += self._text.count("\n", self._at, position)
        self._at = position

    def _read(self) -> bool:
        """Read more, doubling while an item lasts, and drop the used text. Return ``False`` at the end."""
        more = self._file.read(max(_BLOCK_CHARS, len(self._text) - self._at))
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def json_fault(error: ValueError | RecursionError) -> str:
    """Return why one line of text is invalid JSON, with the character (from 1) and without words about Python."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        if error.msg == "Extra data" and error.doc[error.pos] in '{["':
            return f"two JSON values on one line, the second at character {error.pos + 1}{_APART}"
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return "a number with more than 4,300 digits" if "limit (4300 digits)" in str(error) else str(error)


def _array_items(text: _ArrayText, path: Path) -> Iterator[tuple[int, Any]]:
    def broken(message: str) -> tuple[int, DataError]:
        return text.line, BrokenArrayError(message, path=str(path), line=text.line)

    while (following := text.skip(_SEPARATOR)) not in ("", "]"):
        line = text.line
        try:
            yield text.item()
        except DataError as error:
            yield line, DataError(error.message, path=str(path), line=line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else json_fault(error)
            yield broken(f"invalid JSON from here on: {why}{_MEND}")
            return
    if not following:
        yield broken("the JSON array is never closed")
        return
    line = text.line
    text.step()
    if text.skip(_BLANK):
        message = (
            "the JSON array ends here, but more text follows it; write one array, or an object on each line"
        )
        yield line, BrokenArrayError(message, path=str(path), line=line)
