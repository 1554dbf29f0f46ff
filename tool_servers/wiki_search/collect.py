"""First stage of a build: one pass over the corpus, resumable at any moment.

It writes the passage store and, for BM25, which terms stand how often in which passage. Every ``CHECKPOINT`` passages a
note says how long each file was; after a kill the files are cut back to the last note and the pass goes on from there.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from afm.errors import DataError
from afm.runs.atomic import replace_text
from tool_servers.wiki_search.manifest import sample_of
from tool_servers.wiki_search.passages import STORE, Row, read_corpus, terms_of

Progress = Callable[[str, int, int | None], None]
CHECKPOINT = 10_000
NOTE = "collected.json"
VOCABULARY = "vocabulary.txt"
SPILLS = {"ends": "q", "lengths": "I", "distinct": "H", "terms": "I", "counts": "H"}
"""Files of numbers: end of each passage in the store, its terms, its distinct terms; then for each of these number and count."""
_MOST_COUNTED = 65_535


@dataclass(slots=True)
class Note:
    """How far the pass is.

    Attributes:
        corpus, corpus_bytes, corpus_sample: Which file, so that no other is continued with.
        position, line: In the uncompressed corpus.
        sizes: Bytes of every file written so far.
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
        corpus: JSON lines, also ``.gz``.
        folder: Of the index.
        work: For files that the finished index does not need.
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
            DataError: The corpus is wrong, or is not the one that was begun with.
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
                f"{self._note_path.parent} holds a build of {note.corpus} ({note.corpus_bytes:,} bytes), got "
                f"{self._corpus.name} ({size:,} bytes), or another content; delete that folder to begin anew"
            )
        return note

    def _cut_back(self, note: Note) -> dict[str, int]:
        for name, path in self._paths.items():
            path.touch()
            if path.stat().st_size < note.sizes[name]:
                raise DataError(f"shorter than noted; delete {path.parent} to begin anew", path=str(path))
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
