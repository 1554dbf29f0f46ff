"""The tests of a row: test cases, test programs and checkers, in any of the published layouts.

LiveCodeBench packs its private tests as base64 of zlib of a pickle of one JSON string. They are read without
unpickling, because a pickle can run any code. Only the opcodes of a pickled string are accepted.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from afm.errors import DataError, json_word
from afm.rewards.text_match import is_literal

TEST_KEYS = ("public_test_cases", "private_test_cases", "metadata")
"""Keys with tests in a row of LiveCodeBench as its owner publishes it."""
_ID = re.compile(rb'"question_id"\s*:\s*"([^"\\]*)"')
_SETUP = ("import_prefix", "test_imports", "test_setup_code")
_TESTS = ("functional", "test", "test_list", "asserts", "assert_case", "challenge_test_list")
_SPLIT = ("public_tests", "private_tests", "generated_tests")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CHECKERS = ("checker", "generated_checker")
_KNOWN = (
    "stdin + expected_output, inputs + outputs (+ fn_name), public_test_cases / private_test_cases, public_tests / "
    "private_tests / generated_tests, a list of {input, output}, functional, test + entry_point, test_list; checker"
)


@dataclass(frozen=True, slots=True)
class PrintCase:
    """A text for standard input and the expected output. The output is ``None`` if only a checker can judge it."""

    stdin: str
    expected: str | None


@dataclass(frozen=True, slots=True)
class CallCase:
    """Arguments for the function :attr:`Problem.function`, and the expected return value (JSON data).

    Attributes:
        wrapped: Whether the value may also be the only item of the list ``expected``.
    """

    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """The tests that judge a program. At least one of the three kinds is not empty.

    Attributes:
        checker: A Python program, called with the files input, expected and output as its arguments.
        tests: A test program with asserts about functions that the program defines.
        function: The function that call cases call. Tests know it as ``candidate``.
        helpers: Definitions from the prompt that tests and programs may use (HumanEval's ``poly``).
    """

    printing: tuple[PrintCase, ...] = ()
    calling: tuple[CallCase, ...] = ()
    tests: str = ""
    function: str | None = None
    checker: str | None = None
    helpers: str = ""


def question_id(ground_truth: Any) -> str | None:
    """Return the problem's id in the row's benchmark."""
    data = _loaded(ground_truth)
    identifier = data.get("question_id") if isinstance(data, Mapping) else None
    return None if identifier is None else str(identifier)


def read_problem(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Problem:
    """Read the tests of a row.

    Args:
        ground_truth: As in the row, or as a JSON string.
        extra_info: That of the row. ``metadata`` may name the function.

    Raises:
        DataError: The row has no tests, or damaged ones.
    """
    data = _loaded(ground_truth)
    if isinstance(data, Mapping) and set(data) == {"target"}:
        data = _loaded(data["target"])
    if isinstance(data, Mapping) and "input_output" in data:
        data = {**data, **_mapping(_loaded(data["input_output"]), "input_output")}
    if _is_list(data):
        if any(isinstance(item, str) and is_literal(item) for item in data):
            raise DataError(f"the ground truth is a list of results, expected tests: {_KNOWN}")
        data = {"test_list": data} if all(isinstance(item, str) for item in data) else {"cases": data}
    problem = _Reader(_mapping(data, "the ground truth"), dict(extra_info or {})).read()
    if not (problem.printing or problem.calling or problem.tests):
        raise DataError(f"the row has no tests, it has {sorted(data)}; expected one of: {_KNOWN}")
    return problem


@dataclass
class _Reader:
    data: Mapping[str, Any]
    info: Mapping[str, Any]
    printing: list[PrintCase] = field(default_factory=list)
    calling: list[CallCase] = field(default_factory=list)

    def read(self) -> Problem:
        function = self._function()
        self._pairs(_column(self.data, "stdin"), _column(self.data, "expected_output"), None)
        self._pairs(_column(self.data, "inputs"), _column(self.data, "outputs"), function)
        for name in _SPLIT:
            if (part := _loaded(self.data.get(name))) is not None:
                part = _mapping(part, name)
                self._pairs(_column(part, "input"), _column(part, "output"), None)
        for name in ("cases", "public_test_cases", "private_test_cases"):
            for case in _cases(self.data.get(name), name):
                self._case(_mapping(case, name), function)
        checker = next((str(self.data[name]) for name in _CHECKERS if self.data.get(name)), None)
        helpers = _helpers(self.data, function) or _helpers(self.info, function)
        tests = self._tests(function)
        return Problem(tuple(self.printing), tuple(self.calling), tests, function, checker, helpers)

    def _function(self) -> str | None:
        for source in (self.data, self.info):
            for place in (source, _loaded(source.get("metadata"))):
                if isinstance(place, Mapping):
                    for key in ("fn_name", "func_name", "entry_point"):
                        if place.get(key):
                            return str(place[key])
        return None

    def _pairs(self, inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> None:
        if len(inputs) != len(outputs) and not (inputs and not outputs and self._has_checker()):
            raise DataError(f"got {len(inputs)} inputs and {len(outputs)} outputs, expected equal numbers")
        for number, value in enumerate(inputs):
            expected = outputs[number] if outputs else None
            if function is not None:
                wanted = _value(expected) if isinstance(value, str) else expected
                self.calling.append(CallCase(_arguments(value), wanted, wrapped=True))
            elif expected is None and not self._has_checker():  # a program that prints nothing would pass
                raise DataError("the output of a test case is null, expected a text, or a checker in the row")
            else:
                self.printing.append(PrintCase(_lines(value), None if expected is None else _lines(expected)))

    def _has_checker(self) -> bool:
        return any(self.data.get(name) for name in _CHECKERS)

    def _case(self, case: Mapping[str, Any], function: str | None) -> None:
        if "input" not in case or not ("output" in case or self._has_checker()):
            raise DataError(f"a test case has {sorted(case)}, expected input and output")
        if case.get("testtype") != "functional":
            self._pairs([case["input"]], [case["output"]] if "output" in case else [], None)
        elif function is None:
            raise DataError("functional test cases without a function name; expected metadata.func_name")
        else:
            self.calling.append(CallCase(_arguments(case["input"]), _value(case["output"])))

    def _tests(self, function: str | None) -> str:
        parts = [_joined(self.data.get(name)) for name in (*_SETUP, *_TESTS)]
        if not any(parts[len(_SETUP) :]):
            return ""
        if "def check(" in "\n".join(parts) and function is not None:
            parts.append(f"check({function})")
        return "\n".join(part for part in parts if part)


def _helpers(row: Mapping[str, Any], function: str | None) -> str:
    """Return the definitions of a prompt, a program that ends with the head of ``function``, without that function."""
    try:
        body = ast.parse(str(row.get("prompt") or "")).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    if function not in {node.name for node in body if isinstance(node, _DEFINITIONS)}:
        return ""
    kept = [
        node for node in body if isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Assign))
    ]
    return "\n".join(ast.unparse(node) for node in kept if getattr(node, "name", "") != function)


def _loaded(value: Any) -> Any:
    """Return ``value``, parsed as JSON if it is a text with a list or an object."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{what}: got {json_word(value)}, expected an object with tests: {_KNOWN}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _column(data: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = _loaded(data.get(name))
    if value is None:
        return ()
    return value if _is_list(value) else (value,)


def _cases(value: Any, name: str) -> Iterable[Any]:
    if isinstance(value, str) and value.strip() and value.lstrip()[:1] not in "[{":
        value = unpacked(value)
    value = _loaded(value)
    if value is None or value == "":
        return ()
    if not _is_list(value):
        raise DataError(f"{name}: got {json_word(value)}, expected a list of test cases")
    return list(value)


def _lines(value: Any) -> str:
    """Return a text. A list holds its lines."""
    return "\n".join(map(str, value)) if _is_list(value) else str(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    """Return the arguments of a list, or of a text with one JSON value per line."""
    if isinstance(value, str):
        # str.splitlines would also split inside strings, at U+2028 and similar characters.
        lines = re.split(r"\r?\n", value)
        return tuple(_value(line) for line in lines if line.strip())
    return tuple(value) if _is_list(value) else (value,)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if _is_list(value) else str(value or "")


MAX_BYTES = 256 << 20
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT"}


def unpacked(text: str, max_bytes: int = MAX_BYTES) -> str:
    """Unpack the string in ``text``.

    Args:
        max_bytes: Largest unpacked size.

    Raises:
        DataError: The text is damaged, too large, or a pickle of anything but one string.
    """
    try:
        packed = base64.b64decode(text, validate=True)
        engine = zlib.decompressobj()
        data = engine.decompress(packed, max_bytes)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise DataError(
            f"packed tests: neither base64 nor zlib ({error}); expected LiveCodeBench's layout"
        ) from None
    if not engine.eof:
        reason = "is cut off" if len(data) < max_bytes else f"holds more than {max_bytes} bytes"
        raise DataError(f"packed tests: the compressed data {reason}")
    return pickled_string(data)


def pickled_string(data: bytes) -> str:
    """Return the one string in a pickle.

    Raises:
        DataError: The pickle holds or does anything else.
    """
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _STRINGS:
                texts.append(str(argument))
            elif opcode.name == "STOP":
                break
            elif opcode.name not in _HARMLESS:
                raise DataError(
                    f"packed tests: the pickle has opcode {opcode.name}, expected one string and no more"
                )
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise DataError(f"packed tests: not a pickle ({error})") from None
    if len(texts) != 1:
        raise DataError(f"packed tests: the pickle has {len(texts)} strings, expected one")
    return texts[0]


class PrivateTests:
    """Rows of LiveCodeBench's JSONL files by ``question_id``. Memory holds only their positions.

    Rows for training and evaluation often hold only the sample tests. The files are those of the owner, those that
    `afm data livecodebench` makes, or prepared tasks.

    Args:
        path: A file, or a folder of ``*.jsonl`` files. If several files have a problem, the last one counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._places: dict[str, tuple[Path, int, int]] | None = None
        """File, byte position and line (from 1) by ``question_id``."""

    def __contains__(self, question_id: str) -> bool:
        return question_id in self._found()

    def row(self, question_id: str) -> dict[str, Any] | None:
        """Return the row of a problem, or ``None`` if the files lack it. It reads a file, so call it in a thread.

        Raises:
            DataError: The files do not exist, or the row is damaged.
        """
        place = self._found().get(question_id)
        if place is None:
            return None
        path, position, line = place
        with path.open("rb") as file:
            file.seek(position)
            try:
                row = json.loads(file.readline())
            except ValueError as error:
                message = f"problem {question_id!r}: damaged row ({error})"
                raise DataError(message, path=str(path), line=line) from None
        if not isinstance(row, dict):
            raise DataError(f"problem {question_id!r}: expected an object", path=str(path), line=line)
        tests = row.get("ground_truth", row)
        return tests if isinstance(tests, dict) else row

    def _found(self) -> dict[str, tuple[Path, int, int]]:
        with self._lock:
            if self._places is None:
                self._places = self._scanned()
            return self._places

    def _scanned(self) -> dict[str, tuple[Path, int, int]]:
        files = sorted(self._path.glob("*.jsonl")) if self._path.is_dir() else [self._path]
        if not files or not files[0].is_file():
            raise DataError(f"no LiveCodeBench files; {_next_step(self._path)}", path=str(self._path))
        places: dict[str, tuple[Path, int, int]] = {}
        for path in files:
            position = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if match := _ID.search(line):
                        places[match[1].decode()] = (path, position, number)
                    position += len(line)
        return places


def _next_step(path: Path) -> str:
    fetch = (
        "afm data download benchmarks --output-dir downloads/benchmarks --only livecodebench_v5, then "
        "afm data livecodebench downloads/benchmarks/livecodebench_v5 --output-dir FOLDER"
    )
    if path.is_dir() and any(path.glob("*.pkl")):
        return (
            "got AFM's .pkl files, which are not read, because loading a pickle runs its code. Make a folder of the "
            f"published rows instead: {fetch}"
        )
    return f"expected a .jsonl file or a folder of them: {fetch}"


def without_complete_tests(ground_truths: Iterable[Any], path: Path | None) -> int:
    """Count the problems that only sample tests would judge: neither the row nor ``path`` has private tests.

    Raises:
        DataError: ``path`` holds no files of LiveCodeBench.
    """
    store = PrivateTests(path) if path is not None else None
    return sum(not _is_complete(truth, store) for truth in ground_truths)


def _is_complete(truth: Any, store: PrivateTests | None) -> bool:
    if isinstance(truth, Mapping) and truth.get("private_test_cases"):
        return True
    name = question_id(truth)
    return store is not None and name is not None and name in store
