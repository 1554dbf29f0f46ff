"""Decoded rows of JSONL, or of one JSON array, one in memory at a time."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from afm.errors import DataError
from afm.trajectory.io import raw_lines

_BLANK, _SEPARATOR = re.compile(r"\s*"), re.compile(r"[\s,]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder()
_BLOCK_CHARS = 1 << 16
_LONGEST_WORD = 16
"""More characters than a word or an escape of JSON has: an error nearer to the end may come from a cut."""


class BrokenArrayError(DataError):
    """A JSON array breaks off, so that the rows behind that place cannot be told apart or counted."""


def json_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Decoded rows of JSONL, or of one JSON array, with the line they begin on; one in memory at a time.

    A :class:`DataError` stands in place of a row that is no JSON or no Unicode text. In an array that breaks off, a
    :class:`BrokenArrayError` is the last item.

    Raises:
        DataError: The file cannot be read.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            text = _ArrayText(file)
            if text.begins_array():
                yield from _array_items(text, path)
                return
        for number, line in raw_lines(path):
            row = line.removeprefix(BOM_UTF8 if number == 1 else b"")
            if row.strip():
                yield number, _line_item(row.decode("utf-8", "surrogateescape"), path, number)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None


def _line_item(text: str, path: Path, line: int) -> Any:
    try:
        return _unicode(json.loads(text), text)
    except DataError as error:
        return DataError(error.message, path=str(path), line=line)
    except (ValueError, RecursionError) as error:
        return DataError(f"no JSON: {error}", path=str(path), line=line)


def _unicode(item: Any, text: str) -> Any:
    """``item`` if all of it can be written as UTF-8; ``text`` is what it was read from."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a byte that is no UTF-8 at character {error.start}") from None
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"half a character ({half!r}), expected surrogates in pairs") from None
    return item


class _ArrayText:
    """What has been read of a file and not been used up.

    Attributes:
        line: 1-based line of the position.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self.line = 1

    def begins_array(self) -> bool:
        """Whether the first character that is not blank opens an array; the position is behind it then."""
        found = self.skip(_BLANK) == "["
        if found:
            self.step()
        return found

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Go behind all that matches; the character that follows, empty at the end of the file."""
        while True:
            self._go(pattern.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def step(self) -> None:
        """Go behind the next character, which is no line feed."""
        self._at += 1

    def item(self) -> tuple[int, Any]:
        """The item at the position with its line; reads as far as it needs to.

        Raises:
            DataError: It is no Unicode text.
            ValueError: It is no JSON.
        """
        while True:
            try:
                item, end = _DECODER.raw_decode(self._text, self._at)
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
        return line, _unicode(item, text)

    def _go(self, position: int) -> None:
        self.line += self._text.count("\n", self._at, position)
        self._at = position

    def _read(self) -> bool:
        """Read on, twice as much while an item lasts, and forget what is used up; ``False`` at the end."""
        more = self._file.read(max(_BLOCK_CHARS, len(self._text) - self._at))
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


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
            yield broken(f"no JSON from here on: {error}")
            return
    if not following:
        yield broken("the JSON array is never closed")
        return
    line = text.line
    text.step()
    if text.skip(_BLANK):
        yield (
            line,
            BrokenArrayError("the JSON array ends here, but the file goes on", path=str(path), line=line),
        )
