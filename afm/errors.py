"""The errors of the framework: one tree, in which each leaf is also a standard-library type.

A message states what failed, the value found, what was expected and what to do next. Data errors
carry ``path`` and ``line`` and print as ``train.jsonl:17: ... at character 412``.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any


class AfmError(Exception):
    """Base class of all errors that this framework raises."""


class ConfigError(AfmError, ValueError):
    """A configuration file, key or value is wrong."""


class UsageError(AfmError, ValueError):
    """The command line was used wrongly (exit status 2).

    Attributes:
        command: The command, such as ``afm data filter``, if it is known.
    """

    command = ""

    def described(self) -> str:
        """Return the message after the command. If it ends with no command, it says where the help is."""
        text = str(self)
        help_advice = f"{'' if text.endswith('?') else ';'} see {self.command} --help"
        says_command = not self.command or re.search(r"(?<!`)\bafm [a-z]|--help", text)
        return f"{self.command}: {text}{'' if says_command else help_advice}".removeprefix(": ")


class DataError(AfmError, ValueError):
    """A row or file of data is wrong.

    Attributes:
        message: The description without its location.
        path: File of the row, if known.
        line: 1-based line in ``path``, if known.
    """

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None) -> None:
        self.message = message
        self.path = path
        self.line = line
        super().__init__(f"{location(path, line)}{message}")


class Fault(StrEnum):
    """Faults of trajectories."""

    UNKNOWN_ROLE = "unknown_role"
    NESTED = "nested"
    STRAY_TEXT = "stray_text"
    STRAY_CLOSE = "stray_close"
    UNCLOSED = "unclosed"
    TRANSITION = "transition"
    THOUGHT = "thought"
    COUNT = "count"
    EMPTY = "empty"
    OBSERVATION = "observation"
    AUTHOR = "author"
    NO_ANSWER = "no_answer"
    ANSWER_FORMAT = "answer_format"
    ARGUMENT = "argument"
    AFTER_ANSWER = "after_answer"


class TrajectoryError(DataError):
    """A trajectory breaks the rules of its agent.

    Attributes:
        kind: The broken rule.
        character: 0-based offset into the trajectory's text.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Fault | None = None,
        character: int = 0,
        path: str | None = None,
        line: int | None = None,
    ) -> None:
        self.kind = kind
        self.character = character
        super().__init__(message, path=path, line=line)

    def located(self, path: str | None, line: int | None) -> TrajectoryError:
        """Return the same error with the file and line of its row."""
        return TrajectoryError(self.message, kind=self.kind, character=self.character, path=path, line=line)


class BadArgumentError(DataError):
    """A tool cannot use an argument. The agent reads the message."""


class RepeatedErrors:
    """Passes three errors of each kind and counts the rest, for files with the same fault in every row.

    Errors are of one kind if their messages differ only in numbers, quoted texts and ids of spans.
    """

    SHOWN = 3
    _VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\bspan_\w+|\d+")

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def is_new(self, error: object, kind: str = "") -> bool:
        """Return whether to show this error: it is among the first three of its kind, if given, or of its message's."""
        message = error.message if isinstance(error, DataError) else str(error)
        kind = kind or self.kind_of(message)
        self._first.setdefault(kind, message)
        self._counts[kind] += 1
        return self._counts[kind] <= self.SHOWN

    @classmethod
    def kind_of(cls, message: str) -> str:
        """Return a message without what differs among errors of its kind."""
        return cls._VARIES.sub("#", message)

    def rest(self) -> Iterator[str]:
        """Yield one line for each kind with errors that were not shown."""
        for kind, count in self._counts.items():
            if count > self.SHOWN:
                yield f"... and {count - self.SHOWN:,} more like it: {' '.join(self._first[kind].split())}"


def reasons_by_kind(refused: Sequence[str]) -> str:
    """Return the first reason of each of the five most frequent kinds, with its number of rows if there are several."""
    first = {RepeatedErrors.kind_of(reason): reason for reason in reversed(refused)}
    kinds = Counter(map(RepeatedErrors.kind_of, refused)).most_common()
    shown = "; ".join(f"{count:,}: {first[kind]}" for kind, count in kinds[:5])
    return refused[0] if len(kinds) == 1 else shown + ("; ..." if kinds[5:] else "")


class MissingExtraError(AfmError, ImportError):
    """An optional dependency is absent; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; {install_advice(extra)}")


class EngineError(AfmError, RuntimeError):
    """The model, the trainer or its server failed (never the agent's fault)."""


class RefusedError(EngineError):
    """The engine rejected this request or gave an empty answer. A retry would not help."""


class BudgetSpentError(EngineError):
    """The budget of a run is spent. Finished work is kept."""


class ToolError(AfmError, RuntimeError):
    """A tool's infrastructure failed (never the agent's fault)."""


class ReplayError(AfmError, LookupError):
    """A call is missing from the cassette that a run replays."""


class SandboxError(ToolError):
    """The sandbox itself failed, as opposed to the program inside it."""


class SandboxUnavailableError(SandboxError):
    """No isolation is available, and model-written code does not run without it."""


class SandboxBusyError(SandboxError):
    """Too many runs are waiting for the sandbox."""


class OwnCodeError(AfmError, RuntimeError):
    """The user's own Python code failed: a tool, a reward or a team."""


class RewardError(AfmError, RuntimeError):
    """A verifier's infrastructure failed: the sample has no score."""


def install_advice(extra: str = "") -> str:
    """Return the command that installs this project, with an extra if given. No package index has the project yet."""
    target = f"'.[{extra}]'" if extra else "."
    return f"in the checkout of this project run: pip install -e {target}"


def location(path: str | None, line: int | None) -> str:
    """Return the ``file:line: `` prefix of a data error, empty if the place is unknown."""
    if path is None:
        return "" if line is None else f"line {line}: "
    return f"{path}: " if line is None else f"{path}:{line}: "


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known word, or else with all known words."""
    words = sorted(map(str, known))
    close = get_close_matches(name, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of: {', '.join(words)}"


def json_word(value: object) -> str:
    """Return what a value of a row or a YAML is: null, boolean, number, text, list or object; else its class."""
    return _JSON_WORDS.get(type(value), type(value).__name__)


_JSON_WORDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    str: "text",
    tuple: "list",
    dict: "object",
    **dict.fromkeys((int, float), "number"),
}


def expectation(message: str) -> str:
    """Return what a message of Pydantic expects, in the words of :func:`json_word`."""
    opening = r"^(Value error, |Input |String |List |Tuple |Dictionary )?(should )?(be |have )?(expected )?"
    text = re.sub(rf"{opening}|, unable to .*|, got a number .*| after validation, not .*", "", message)
    text = text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    kind = re.match(r"a valid (\w+)|None$", text)
    return _EXPECTED.get(kind[1] or "None", text.replace("valid ", "", 1)) if kind else text


_EXPECTED = {
    "None": "null",
    "string": "text",
    "integer": "a whole number",
    "boolean": "true or false",
    "dictionary": "an object",
    **dict.fromkeys(("tuple", "array", "set", "frozenset"), "a list"),
}


def fault_words(fault: Mapping[str, Any], unknown: str = "unknown key") -> str:
    """Return a fault that Pydantic found, such as ``got 'x' (text), expected a whole number``."""
    kind, message, value = fault["type"], str(fault["msg"]).removeprefix("Value error, "), fault["input"]
    if kind == "json_invalid" or (kind == "value_error" and (message.startswith("got ") or not fault["loc"])):
        return message
    if kind in ("missing", "extra_forbidden"):
        return "missing, but required" if kind == "missing" else unknown
    try:
        shown = without_password(repr(value))
    except ValueError:  # Python does not print integers of more than 4,300 digits
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"got {shown} ({json_word(value)}), expected {expectation(message)}"


def first_fault(error: Any, whole: str = "the object") -> str:
    """Return the first fault of a ``pydantic.ValidationError`` with its key. ``whole`` stands for an empty key."""
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc'])) or whole}: {fault_words(fault)}"


def _kind(name: str) -> str:
    """Return what a file holds by the ending of its name: rows, or settings and code; empty for any other ending."""
    if (suffix := Path(name).suffix) in (".jsonl", ".csv", ".parquet"):
        return "rows"
    return "code" if suffix in (".yaml", ".yml", ".py") else ""


def no_such_file(path: str | Path, what: str = "file") -> str:
    """Return ``no such file``, and the path that was probably meant: one part of it has the nearest name there is.

    If it exists in the folder above or in one folder below, the command was probably run in the wrong folder.
    """
    path = Path(path)
    if not path.is_absolute() and path.parts:
        places = [place for place in (Path(".."), *Path().glob("*/")) if (place / path).exists()]
        if len(places) == 1:
            return f"no such {what} ({places[0] / path} exists: cd {shlex.quote(str(places[0]))})"
    wrong = next((part for part in (*reversed(path.parents), path) if not part.exists()), path)
    try:
        names = [entry.name for entry in wrong.parent.iterdir()]
    except OSError:
        names = []
    for name in get_close_matches(wrong.name, names, n=5):
        # An ending alone makes short names alike.
        alike = get_close_matches(wrong.stem, [Path(name).stem]) and _kind(name) in (_kind(wrong.name), "")
        near = wrong.with_name(name) / path.relative_to(wrong)
        if alike and (near.is_dir() if what == "folder" else near.exists()):
            return f"no such {what} (did you mean {near}?)"
    made = re.match(
        r"runs/quickstart(-wiki)?(/(data|eval_rl|eval_sft|rl|sft|start|world)(/|$)|$)", path.as_posix()
    )
    if made and not Path(*path.parts[:2]).exists():
        return f"no such {what} (./quickstart.sh{' --world wiki' if made[1] else ''} makes it)"
    return f"no such {what}"


_ADDRESS = re.compile(r"(\w://)([^\s/?#'\"]+@)?((?:(?!,\w+://)[^\s?'\"])*)(\?(?:(?!,\w+://)[^\s'\"])*)?")
"""One address, also in a list with commas."""


def without_password(text: str) -> str:
    """Return ``text`` with ``***`` for user, password and query of the addresses in it."""
    return _ADDRESS.sub(
        lambda match: f"{match[1]}{'***@' if match[2] else ''}{match[3]}{'?***' if match[4] else ''}", text
    )


def utf8_advice(path: Path, encoding: str = "WINDOWS-1252") -> str:
    """Return the command that writes a file as UTF-8, with `_utf8` in its name."""
    new = path.with_name(f"{path.stem}_utf8{path.suffix}")
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"


_YAML_ADVICE = {
    r"expected <block end>, but found '<scalar>'": "the quotes end before the text does; between ' write '' for ', and between "
    '" write \\\\" for "',
    r"expected <block end>, but found '([}\]])'": r"a '\1' too many",
    r"expected <block end>, .*": "the line is indented like no line above it; keys of one mapping begin in the same column",
    r"expected ',' or '([}\]])', but got .*": r"'\1' is missing, or quotes around a text with ': ' or quotes in it",
    r"mapping values are not allowed here": "a second ': ', or a wrong indentation; put a text with ': ' between quotes",
    r"could not find expected ':'": "a key lacks ': ' after it",
    r"found unexpected end of stream": "quotes that are opened in the text are not closed",
    r"found character '([@`%])' .*": r"no text begins with \1; put it between quotes",
}
"""Maps problems in the parser's words to what to change."""


def yaml_fault(error: Exception, path: Path) -> str:
    """Return the place of a fault in a YAML, in the words of its author: where the open part began, and the line."""
    at, begun = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if at is None:
        return " ".join(str(error).split())
    problem = str(getattr(error, "problem", ""))
    where = f"line {at.line + 1}, column {at.column + 1}: "
    if problem.startswith("found character '\\t'"):
        return f"{where}a tab, expected spaces; this replaces all tabs: sed -i 's/\\t/  /g' {shlex.quote(str(path))}"
    known = ((re.fullmatch(pattern, problem), text) for pattern, text in _YAML_ADVICE.items())
    said = next((match.expand(text) for match, text in known if match), problem)
    since = f" (begun in line {begun.line + 1})" if begun and begun.line < at.line else ""
    line = (at.get_snippet(indent=0, max_length=70) or "").partition("\n")[0]
    return f"{where}{said}{since}{f', in: {line.strip()}' if line else ''}"


def with_path(text: str, path: str | Path) -> str:
    """Return a command that advises ``FILE`` with the file that is meant."""
    return re.sub(r"(?<= )FILE\b", lambda match: shlex.quote(str(path)), text)


def exists_next_to(path: str | Path, config: str | Path | None) -> str:
    """Return the next step if the missing ``path`` is next to the YAML that names it; empty if it does not."""
    folder = Path(config).parent if config is not None else None
    if folder is None or Path(path).is_absolute() or Path(path).exists() or not (folder / path).exists():
        return ""
    there = f"cd {shlex.quote(str(folder))} and run the command there with {Path(str(config)).name}"
    return f"; {folder / path} exists: {there}"


def described(error: AfmError | OSError, output: str = "--output-dir") -> str:
    """Return the message of an error. An error of the system gets its file, what was expected, and the next step.

    Args:
        output: The option or key that sets the folder of the output.
    """
    if not isinstance(error, OSError):
        return error.described() if isinstance(error, UsageError) else str(error)
    if error.errno in NO_SPACE:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}; delete files there, or choose another disk, and run the same command again"
    if error.filename is None:
        return str(error)
    reason = str(_REASONS.get(type(error), error.strerror))
    return f"{error.filename}: {reason.replace('OUTPUT', output)}"


NO_SPACE = (ENOSPC, EDQUOT)
"""Errors of a full disk."""
_REASONS: dict[type[OSError], str] = {
    FileExistsError: "is a file; expected a folder, choose another OUTPUT",
    NotADirectoryError: "a part of this path is a file; expected a folder, choose another OUTPUT",
    FileNotFoundError: "no such file, and none can be written there; check the path, or choose another place",
    PermissionError: "permission denied; choose a place that you may read and write",
    IsADirectoryError: "is a folder; expected a file",
}
"""What failed and the next step, by the error of the system."""
