"""A corpus: a stream of passages, their search terms, and the first stage of a build, a resumable pass over the corpus.

The pass writes the passage store and, for BM25, how often each term occurs in each passage. Every ``CHECKPOINT``
passages, it notes the length of each file. After a kill, it truncates the files to the last note and continues there.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from afm.errors import DataError, json_word
from afm.runs.atomic import replace_text
from afm.trajectory.io import json_fault, refuse_other_content

_WORD = re.compile(r"\w\w+")
_COMMON = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
to was will with
"""
_STOP_WORDS = frozenset(_COMMON.split())


def terms_of(text: str) -> list[str]:
    """Return the lower-case words of two characters or more in order, without the most common English words."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def key_of(term: str) -> int:
    """Hash a term to 64 bits; the chance of a collision among ten million terms is 3 in a million."""
    return int.from_bytes(
        hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


STORE, OFFSETS = "passages.jsonl", "passages.offsets.npy"
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CorpusPassage:
    """One passage, in the form that clients of Search-R1's server expect.

    Attributes:
        contents: The title in quotes, a line feed and the text.
    """

    id: str
    contents: str

    def line(self) -> bytes:
        """Return the passage as a line of the store."""
        return (
            json.dumps({"id": self.id, "contents": self.contents}, ensure_ascii=False).encode(
                "utf-8", "replace"
            )
            + b"\n"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A passage with its position in the corpus.

    Attributes:
        line: Line number, from 1.
        end: Offset of the byte after the line, in the uncompressed corpus.
    """

    passage: CorpusPassage
    line: int
    end: int


def read_corpus(path: Path, *, start: int = 0, line: int = 0) -> Iterator[Row]:
    """Yield the rows of a corpus of JSON lines ``{"id", "contents"}`` (or ``{"id", "title", "text"}``), which may be ``.gz``.

    Args:
        start: Offset in the uncompressed corpus to begin at; must be the beginning of a line.
        line: Number of lines before it.

    Raises:
        DataError: A line is not a passage, or the compressed data is incomplete.
    """
    if path.suffix != ".gz" and not start:
        refuse_other_content(path)
    with _opened(path) as file:
        try:
            if start:
                _skip(file, start)
            position, number = start, line
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                position += len(raw)
                if len(raw) > MAX_LINE_BYTES:
                    raise DataError(f"longer than {MAX_LINE_BYTES >> 20} MiB", path=str(path), line=number)
                if raw.strip():
                    yield Row(_passage(raw, path, number), number, position)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"broken compressed data: {error}; download the file again, or leave .gz out of the name of a plain file",
                path=str(path),
            ) from None


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.suffix == ".gz":
            return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
        return path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a corpus of JSON lines", path=str(path)
        ) from None


def _skip(file: IO[bytes], count: int) -> None:
    if not isinstance(file.raw, gzip.GzipFile):  # type: ignore[attr-defined]
        file.seek(count)
        return
    while count and (piece := file.read(min(count, 1 << 24))):
        count -= len(piece)


EXPECTED = (
    'expected one object per line: {"id": "1", "contents": "TITLE and text"}, or with `title` and `text`'
)


def _passage(raw: bytes, path: Path, number: int) -> CorpusPassage:
    try:
        row = json.loads(raw.removeprefix(BOM_UTF8 if number == 1 else b"").decode("utf-8"))
    except UnicodeDecodeError as error:
        why = f"byte {error.start + 1} of the line is not UTF-8, expected one JSON object per line in UTF-8"
        raise DataError(f"not JSON: {why}", path=str(path), line=number) from None
    except (ValueError, RecursionError) as error:
        why = f"{json_fault(error)}; {EXPECTED}"
        raise DataError(f"not JSON: {why}", path=str(path), line=number) from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str | int):
        got = f"an object with {', '.join(row)}" if isinstance(row, dict) else json_word(row)
        raise DataError(f"got {got:.80}; {EXPECTED}", path=str(path), line=number)
    contents = row.get("contents")
    if contents is None and isinstance(row.get("text"), str):
        contents = f'"{row.get("title", "")}"\n{row["text"]}'
    if not isinstance(contents, str):
        raise DataError(f"contents: got {contents!r:.60}; {EXPECTED}", path=str(path), line=number)
    return CorpusPassage(str(row["id"]), contents)


_PIECE_BYTES = 1 << 16
_PIECES = 256


def sample_of(path: Path) -> int:
    """Return the CRC-32 of 256 pieces of 64 KiB, spread over the file; up to 16 MiB they cover all of it."""
    size, crc = path.stat().st_size, 0
    step = max(_PIECE_BYTES, (size - _PIECE_BYTES) // (_PIECES - 1))
    with path.open("rb") as file:
        for begin in range(0, size, step):
            file.seek(begin)
            crc = zlib.crc32(file.read(_PIECE_BYTES), crc)
    return crc


Progress = Callable[[str, int, int | None], None]
CHECKPOINT = 10_000
NOTE = "collected.json"
VOCABULARY = "vocabulary.txt"
SPILLS = {"ends": "q", "lengths": "I", "distinct": "H", "terms": "I", "counts": "H"}
"""Files of numbers. Per passage: end in the store, terms, distinct terms. Per distinct term of a passage: term, count."""
_MOST_COUNTED = 65_535


@dataclass(slots=True)
class Note:
    """Progress of the pass.

    Attributes:
        corpus, corpus_bytes, corpus_sample: Identify the corpus, so that the pass does not continue with another one.
        position, line: Position in the uncompressed corpus.
        sizes: Size of each file in bytes.
    """

    corpus: str
    corpus_bytes: int
    position: int
    line: int
    passages: int
    terms: int
    sizes: dict[str, int]
    finished: bool = False
    corpus_sample: int | None = None


class Collector:
    """Writes the files of the first stage.

    Args:
        corpus: JSON lines, may be ``.gz``.
        folder: Index folder.
        work: Folder for files that the finished index does not need.
    """

    def __init__(self, corpus: Path, folder: Path, work: Path) -> None:
        self._corpus = corpus
        self._paths = {name: work / f"{name}.bin" for name in SPILLS}
        self._paths |= {"store": folder / STORE, "vocabulary": work / VOCABULARY}
        self._note_path = work / NOTE
        work.mkdir(parents=True, exist_ok=True)

    def run(self, total: int | None, progress: Progress) -> Note:
        """Read the corpus to its end.

        Raises:
            DataError: The corpus is wrong, or is not the one that the pass began with.
        """
        note = self._begun()
        if note.finished:
            return note
        vocabulary = self._cut_back(note)
        files = {name: path.open("ab") for name, path in self._paths.items()}
        try:
            self._read(note, vocabulary, files, total, progress)
        finally:
            for file in files.values():
                file.close()
        if not note.passages:
            raise DataError("the corpus holds no passage", path=str(self._corpus))
        note.finished = True
        self._save(note)
        return note

    def _read(
        self,
        note: Note,
        vocabulary: dict[str, int],
        files: Mapping[str, IO[bytes]],
        total: int | None,
        progress: Progress,
    ) -> None:
        rows = read_corpus(self._corpus, start=note.position, line=note.line)
        end = note.sizes["store"]
        while chunk := list(islice(rows, CHECKPOINT)):
            end = _write(chunk, vocabulary, files, end)
            new = islice(vocabulary, note.terms, None)
            files["vocabulary"].write("".join(f"{term}\n" for term in new).encode("utf-8", "surrogatepass"))
            for name, file in files.items():
                file.flush()
                note.sizes[name] = file.tell()
            note.position, note.line = chunk[-1].end, chunk[-1].line
            note.passages += len(chunk)
            note.terms = len(vocabulary)
            self._save(note)
            progress("passages read", note.passages, total)

    def _begun(self) -> Note:
        size = self._corpus.stat().st_size
        sample = sample_of(self._corpus)
        if not self._note_path.is_file():
            sizes = dict.fromkeys(self._paths, 0)
            return Note(self._corpus.name, size, 0, 0, 0, 0, sizes, corpus_sample=sample)
        note = Note(**json.loads(self._note_path.read_text(encoding="utf-8")))
        if (note.corpus, note.corpus_bytes, note.corpus_sample) != (self._corpus.name, size, sample):
            raise DataError(
                f"{self._note_path.parent} has a build of {note.corpus} ({note.corpus_bytes:,} bytes), got "
                f"{self._corpus.name} ({size:,} bytes), or other content; delete that folder to start over"
            )
        return note

    def _cut_back(self, note: Note) -> dict[str, int]:
        for name, path in self._paths.items():
            path.touch()
            if path.stat().st_size < note.sizes[name]:
                raise DataError(f"shorter than noted; delete {path.parent} to start over", path=str(path))
            with path.open("r+b") as file:
                file.truncate(note.sizes[name])
        words = self._paths["vocabulary"].read_bytes().decode("utf-8", "surrogatepass").split("\n")[:-1]
        return {word: number for number, word in enumerate(words)}

    def _save(self, note: Note) -> None:
        replace_text(self._note_path, json.dumps(asdict(note)))


def _write(chunk: list[Row], vocabulary: dict[str, int], files: Mapping[str, IO[bytes]], end: int) -> int:
    columns = {name: array(code) for name, code in SPILLS.items()}
    lines = []
    number = vocabulary.setdefault
    for row in chunk:
        line = row.passage.line()
        lines.append(line)
        end += len(line)
        words = terms_of(row.passage.contents)
        counts = Counter(words)
        columns["ends"].append(end)
        columns["lengths"].append(len(words))
        columns["distinct"].append(min(len(counts), _MOST_COUNTED))
        kept = counts if len(counts) <= _MOST_COUNTED else dict(islice(counts.items(), _MOST_COUNTED))
        columns["terms"].extend([number(word, len(vocabulary)) for word in kept])
        columns["counts"].extend([min(count, _MOST_COUNTED) for count in kept.values()])
    files["store"].write(b"".join(lines))
    for name, column in columns.items():
        column.tofile(files[name])
    return end
