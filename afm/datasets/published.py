"""Read published rows through a reader into tasks, conversations or samples, and extract published prompts.

Prompts are constants of a Python file, which is parsed and never executed, or surround the questions of rows. This
project does not ship these texts. A list in ``configs/data/`` names repository, commit, file and constant, ``afm data
download`` fetches the file, and ``afm data prepare published`` writes the text with ``{question}``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from afm.configuration import Settings
from afm.datasets.readers.row import AlpacaRow, ReadRow, RowReader
from afm.datasets.row_files import columnar_rows, published_rows
from afm.datasets.schema import Task, checked_gold, plain_value
from afm.errors import DataError, RepeatedErrors, first_fault, json_word, suggestion
from afm.runs.atomic import replace_text, replacing

_KEY_BYTES = 12
_SHOW_EVERY = 500
_REASON_CHARS = 100
_DETAILS = re.compile(r"(?:,|:) got |; (?:expected|did you mean) ")
_SHOWN_REASONS = 3

OnRow = Callable[[int], None]
"""Receives the number of rows read so far."""


@dataclass(slots=True)
class ReadCounts:
    """Counts of the rows of a preparation.

    Attributes:
        read: All rows.
        made: Rows in the output.
        repeated: Rows left out because an earlier row has the same id and content.
        renamed: Rows with a new id, because an earlier row with other content has theirs.
        refused: Bad rows by reason.
        firsts: The first bad row of each reason.
        by_file: Rows read, by file.
        left_out: Good rows that the list of sets excludes, by reason (:mod:`afm.datasets.prepared`).
    """

    read: int = 0
    made: int = 0
    repeated: int = 0
    renamed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, DataError] = field(default_factory=dict)
    by_file: Counter[Path] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def bad(self) -> int:
        """Number of refused rows."""
        return sum(self.refused.values())

    def as_counts(self) -> dict[str, int]:
        """Return the counts for a manifest."""
        counts = {"read": self.read, "made": self.made, "repeated": self.repeated}
        counts |= {"bad": self.bad, "renamed": self.renamed}
        return counts | ({"left_out": self.left_out.total()} if self.left_out else {})

    def summary(self) -> str:
        """Return the commonest reasons why rows were not made, with the place of the first row of each."""
        reasons = (self.refused + self.left_out).most_common(_SHOWN_REASONS)
        return "; ".join(f"{count} {self.placed(reason)}" for reason, count in reasons) or "there are none"

    def placed(self, reason: str) -> str:
        """Return a reason in the words of its first row, with file and line, if that row is known."""
        first = self.firsts.get(reason)
        return f"{first.message} (first at {first.path}:{first.line})" if first else reason

    def refuse(self, error: DataError) -> None:
        """Count a bad row."""
        reason = _DETAILS.split(error.message, maxsplit=1)[0][:_REASON_CHARS]  # what rows have in common
        self.refused[reason] += 1
        self.firsts.setdefault(reason, error)

    def leave_out(self, reason: str) -> None:
        """Move a good row from ``made`` to ``left_out``."""
        self.made -= 1
        self.left_out[reason] += 1


class BadRows:
    """A file of refused rows: one JSON line each with file, line and reason. If ``strict``, the first one is an error.

    Attributes:
        count: Number of refused rows.
        listed: The first three of each kind.
        place: File and line of the row that is read, ``None`` between files.
    """

    def __init__(self, file: IO[str], *, strict: bool = False) -> None:
        self.count = 0
        self.listed: list[DataError] = []
        self.repeats = RepeatedErrors()
        self.place: tuple[Path, int] | None = None
        self._file = file
        self._strict = strict

    def note(self, error: DataError) -> None:
        """Write a refused row, or raise its error."""
        if self._strict:
            raise error
        self.count += 1
        if self.repeats.is_new(error):
            self.listed.append(error)
        row = {"file": error.path, "line": error.line, "reason": error.message}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def listing_bad_rows(path: Path, *, strict: bool = False) -> Iterator[BadRows]:
    """List refused rows in ``path``. The file appears if the block succeeds, and only if there are refused rows.

    Adds the file and line of the row that is read to an error of the block without a location.
    """
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as sink:
        bad = BadRows(sink, strict=strict)
        try:
            yield bad
        except DataError as error:
            if error.path is not None or bad.place is None:
                raise
            file, line = bad.place
            raise DataError(error.message, path=str(file), line=line) from None
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
    """Stream the rows that a reader makes of files. Every row is counted as made, repeated or refused (in ``bad``).

    Args:
        label: Prefix of the ids of rows without ids.
        data_source: Data source of tasks whose reader sets none.

    Raises:
        DataError: A whole file cannot be read, or a row is bad and ``bad`` is strict.
    """
    seen: dict[str, bytes] = {}
    for file in files:
        for line, row in rows_of(file, reader):
            counts.read += 1
            counts.by_file[file] += 1
            bad.place = file, line
            if on_row is not None and counts.read % _SHOW_EVERY == 0:
                on_row(counts.read)
            default = f"{label}-{counts.read}"
            try:
                made = _make(row, reader, default, data_source)
            except DataError as error:
                placed = DataError(error.message, path=str(file), line=line)
                counts.refuse(placed)
                bad.note(placed)
                continue
            if (unique := _with_unique_id(made, default, seen)) is None:
                counts.repeated += 1
                continue
            counts.renamed += unique is not made
            counts.made += 1
            yield unique
        bad.place = None


def rows_of(file: Path, reader: RowReader) -> Iterator[tuple[int, Any]]:
    """Yield rows as :func:`published_rows` does, and unpack layouts with many rows in one."""
    for line, row in published_rows(file):
        if reader.unpack is None or not isinstance(row, Mapping):
            yield line, row
            continue
        try:
            yield from ((line, unpacked) for unpacked in reader.unpack(file.stem, row))
        except DataError as error:
            raise DataError(error.message, path=str(file), line=line) from None


def _make(row: Any, reader: RowReader, default: str, data_source: str | None) -> ReadRow:
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"got {json_word(row)}, expected an object")
    try:
        made = reader.read(row, default)
    except ValidationError as error:
        raise DataError(first_fault(error)) from None
    if not isinstance(made, Task):
        return made
    plain = {
        "ground_truth": checked_gold(made.ground_truth, "ground_truth"),
        "extra_info": plain_value(made.extra_info, "extra_info"),
    }
    made = made.model_copy(update=plain)
    if not made.data_source:
        if not data_source:
            raise DataError(
                "the row has no data_source; give one: --data-source NAME, or `data_source` in the list of sets"
            )
        made = made.model_copy(update={"data_source": data_source})
    return made


def _with_unique_id(made: ReadRow, default: str, seen: dict[str, bytes]) -> ReadRow | None:
    """Return the row with a unique id, or ``None`` if it repeats an earlier row.

    Rows with equal ids would form one group in reinforcement learning, so a second question with an id gets the default
    id of rows without one.
    """
    if isinstance(made, AlpacaRow):
        return made
    content = made.question if isinstance(made, Task) else made.model_dump_json(include={"messages"})
    key = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
    before = seen.setdefault(made.id, key)
    if before is key:
        return made
    if before == key:
        return None
    if seen.setdefault(default, key) is not key:  # another row has this id
        default = f"{default}-{key.hex()}"
        seen[default] = key
    return made.model_copy(update={"id": default})


PROMPTS_FOLDER = "prompts"
"""Folder of prompts in the folder of the downloads."""
QUESTION = "{question}"
_PROMPT = "{prompt}"


class PublishedPrompt(Settings):
    """One prompt."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]*$")
    """Name of the text file, without its suffix."""
    file: str
    """Path in the repository: a Python file, or a parquet file of rows with prompts."""
    constant: str = ""
    """Name of the string constant at the top level of a Python file."""
    form: str = Field(default=f"{_PROMPT}\n\nQuestion: {QUESTION}", pattern=r"\{prompt\}")
    """The user's turn around it: ``{prompt}`` is the text without blanks at its ends, ``{question}`` stays.
    """

    def write(self, sources: Path, folder: Path) -> Path:
        """Write the text of ``sources/file`` to ``folder/name.txt``, with the errors of :meth:`text`.

        A line break follows the text. Readers of prompts remove it (:mod:`afm.agents.prompt_source`).
        """
        path = folder / f"{self.name}.txt"
        replace_text(path, self.text(sources) + "\n")
        return path

    def text(self, sources: Path) -> str:
        """Return the user turn, which contains ``{question}`` exactly once."""
        source = sources / self.file
        if source.suffix == ".parquet":
            text = around_questions(source)
        else:
            text = self.form.replace(_PROMPT, text_constant(source, self.constant).strip())
        if (count := text.count(QUESTION)) != 1:
            raise DataError(
                f"prompt {self.name!r}: {QUESTION} occurs {count} times, expected once; "
                "correct `form` in the list of sets",
                path=str(source),
            )
        return text


def text_constant(file: Path, name: str) -> str:
    """Return the string that a Python file assigns to a top-level name: a literal, or a literal with ``.strip()``.

    Raises:
        DataError: The file is missing, is not Python, or has no string of that name.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except OSError:
        raise DataError("no such file; `afm data download` fetches it", path=str(file)) from None
    except (SyntaxError, ValueError) as error:
        raise DataError(f"not a Python file: {error}", path=str(file)) from None
    texts = {
        target.id: text
        for node in tree.body
        if isinstance(node, ast.Assign) and (text := _literal(node.value)) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if name not in texts:
        raise DataError(f"no string constant {name!r}; {suggestion(name, texts)}", path=str(file))
    return texts[name]


def around_questions(file: Path) -> str:
    """Return the common beginning and end of the user turns of a parquet file, with ``{question}`` between.

    A word that all questions begin with, and a line that all questions end with, belongs to the questions.

    Raises:
        DataError: The file is missing, has fewer than two rows, or has a row without a user turn.
    """
    if not file.is_file():
        raise DataError("no such file; `afm data download` fetches it", path=str(file))
    turns = [_user_turn(row, file, number) for number, row in columnar_rows(file)]
    if len(set(turns)) < 2:
        raise DataError(
            f"{len(set(turns))} different prompts, expected two or more to compare", path=str(file)
        )
    before = re.sub(r"\S+\Z", "", _shared_start(turns))
    after = _shared_start([turn[len(before) :][::-1] for turn in turns])[::-1]
    return before + QUESTION + re.sub(r"\A[^\n]+", "", after)


def _shared_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    differs = (place for place, (mine, other) in enumerate(zip(first, last, strict=False)) if mine != other)
    return first[: next(differs, len(first))]


def _user_turn(row: Any, file: Path, number: int) -> str:
    try:
        return str(next(turn["content"] for turn in reversed(row["prompt"]) if turn["role"] == "user"))
    except (DataError, KeyError, TypeError, StopIteration):
        raise DataError("expected `prompt` with a user turn", path=str(file), line=number) from None


def _literal(value: ast.expr) -> str | None:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr="strip"), args=[], keywords=[]):
            text = _literal(inner)
            return None if text is None else text.strip()
    return None
