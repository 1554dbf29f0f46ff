"""Readers of programming problems with tests that the reward can read, and LiveCodeBench's complete tests.

The complete tests are a folder made from the owner's files. LIVECODEBENCH_DATA_PATH names it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from afm.datasets.readers.row import (
    Row,
    abbreviate,
    accepted_answers,
    as_list,
    gold_answer,
    last_question,
    object_field,
    optional_fields,
    text_field,
)
from afm.datasets.row_files import published_rows
from afm.datasets.schema import Task
from afm.errors import DataError
from afm.rewards.code_tests.problem import TEST_KEYS, read_problem
from afm.runs.atomic import replacing
from afm.runs.folder import write_manifest
from afm.trajectory.chat import row_id


def checked_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tests`` after a check that the reward can read them."""
    try:
        read_problem(tests)
    except DataError as error:
        raise DataError(f"tests: {error.message}") from None
    return dict(tests)


def count_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> int:
    """Count the tests of a program: pairs of input and output, calls, and asserts of a test program.

    Raises:
        DataError: The tests are missing or damaged.
    """
    problem = read_problem(ground_truth, extra_info)
    pairs = len(problem.printing) + len(problem.calling)
    try:
        return pairs + sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(problem.tests)))
    except (SyntaxError, ValueError, RecursionError):
        return pairs


def with_starter_code(question: str, starter: str) -> str:
    """Return the question with the code that the program must begin with."""
    if not starter.strip():
        return f"{question}\n\nThe program reads standard input and writes its answer to standard output."
    return f"{question}\n\nComplete this code:\n```py\n{starter.rstrip()}\n```"


def sections(*parts: tuple[str, Any]) -> str:
    """Join the non-empty parts, each under its title except the first."""
    texts = []
    for title, body in parts:
        if isinstance(body, str) and body.strip():
            texts.append(f"{title}\n{body.strip()}" if title else body.strip())
    return "\n\n".join(texts)


_TESTS = ("public_test_cases", "private_test_cases", "metadata")


def read_livecodebench(row: Row, default: str) -> Task:
    """Read LiveCodeBench: the rows of livecodebench/code_generation_lite (``test.jsonl``, ``test2.jsonl`` ..).

    Public tests are JSON in a string. Private tests stay packed. They are unpacked here once to check them, and again by
    the reward. ``question_id`` is kept to find the complete tests under LIVECODEBENCH_DATA_PATH.
    """
    name = text_field(row, "question_id")
    tests = checked_tests({**optional_fields(row, *_TESTS), "question_id": name})
    starter = row.get("starter_code") or ""
    return Task(
        id=name,
        question=with_starter_code(text_field(row, "question_content"), starter),
        ground_truth=tests,
        extra_info={"starter_code": starter}
        | optional_fields(row, "question_title", "platform", "contest_id", "contest_date", "difficulty"),
    )


_CODECONTESTS_TESTS = ("public_tests", "private_tests", "generated_tests")


def read_codecontests(row: Row, default: str) -> Task:
    """Read CodeContests, deepmind/code_contests: ``{name, description, public_tests, private_tests, generated_tests, ..}``.

    Each ``*_tests`` holds two lists, ``input`` and ``output``. Problems that read or write a named file are refused.
    """
    for key in ("input_file", "output_file"):
        if row.get(key):
            raise DataError(f"`{key}` is {row[key]!r}: the problem does not use standard input and output")
    tests = checked_tests(optional_fields(row, *_CODECONTESTS_TESTS))
    return Task(
        id=text_field(row, "name"),
        question=with_starter_code(text_field(row, "description"), ""),
        ground_truth=tests,
        extra_info=_limits(row) | optional_fields(row, "source", "difficulty", "cf_rating"),
    )


def _limits(row: Row) -> dict[str, Any]:
    limit = row.get("time_limit")
    if not isinstance(limit, Mapping):
        return {}
    return {"time_limit_s": (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9}


def read_codeforces(row: Row, default: str) -> Task:
    """Read Codeforces: the rows of open-r1/codeforces, judged by the official tests and the checker, if any.

    Interactive problems, problems that read a file, and problems with truncated official tests
    (``official_tests_complete`` false) are refused. A wrong program could pass truncated tests.
    """
    _refuse(row)
    tests: dict[str, Any] = {"cases": as_list(row.get("official_tests"))}
    if row.get("generated_checker"):
        tests["checker"] = row["generated_checker"]
    question = sections(
        ("", text_field(row, "description")),
        ("Input", row.get("input_format")),
        ("Output", row.get("output_format")),
        ("Examples", _examples(row)),
        ("Note", row.get("note")),
    )
    return Task(
        id=text_field(row, "id"),
        question=with_starter_code(question, ""),
        ground_truth=checked_tests(tests),
        extra_info=optional_fields(
            row, "title", "rating", "time_limit", "memory_limit", "contest_start_year"
        ),
    )


def _refuse(row: Row) -> None:
    if row.get("interaction_format"):
        raise DataError(
            "the problem is interactive (`interaction_format`); programs are run with a fixed input"
        )
    if row.get("input_mode") not in (None, "", "stdio"):
        raise DataError(f"`input_mode` is {row['input_mode']!r}, expected 'stdio'")
    if row.get("official_tests_complete") is False:
        raise DataError("`official_tests_complete` is false: the tests are truncated")


def _examples(row: Row) -> str:
    pairs = [pair for pair in as_list(row.get("examples")) if isinstance(pair, Mapping)]
    return "\n\n".join(
        f"Input:\n{str(pair.get('input', '')).strip()}\nOutput:\n{str(pair.get('output', '')).strip()}"
        for pair in pairs
    )


_SUITES = ("leetcode", "taco")


def read_skywork(row: Row, default: str) -> Task:
    """Read Skywork-OR1-RL-Data: mathematics and programs in one layout, distinguished by ``ability`` and ``data_source``.

    Mathematics has a JSON list of answers. Programs have an object of tests: ``{inputs, outputs, fn_name}`` (TACO) or
    ``{entry_point, import_prefix, test_code}`` (LeetCode). The data source becomes the one that chooses our reward
    (``skywork_math``, ``skywork_livecodebench_*``). The published one stays in ``extra_info``.
    """
    source = text_field(row, "data_source")
    info = object_field(row.get("extra_info") or {}, "extra_info")
    extra: dict[str, Any] = {"published_source": source}
    if isinstance(info.get("model_difficulty"), Mapping):
        extra["model_difficulty"] = dict(info["model_difficulty"])
    is_code = "code" in source.split("-") or row.get("ability") == "code"
    gold = gold_answer(row)
    return Task(
        id=f"{source}-{row_id(info, 'index') or default}",
        question=last_question(row),
        ground_truth=_tests(gold) if is_code else _answers(gold, row),
        data_source=_code_source(source) if is_code else "skywork_math",
        extra_info=extra,
    )


def _code_source(source: str) -> str:
    return f"skywork_livecodebench_{next((name for name in _SUITES if name in source), 'other')}"


def _answers(gold: str, row: Row) -> list[str]:
    try:
        values = as_list(json.loads(gold))
    except ValueError:
        values = [gold]
    return accepted_answers(
        row, "reward_model", (value if isinstance(value, str) else str(value) for value in values)
    )


def _tests(gold: str) -> dict[str, Any]:
    try:
        tests = dict(object_field(json.loads(gold), "reward_model.ground_truth"))
    except ValueError:
        raise DataError(
            f"`reward_model.ground_truth`: expected JSON with tests, got {abbreviate(gold)}"
        ) from None
    if "test_code" in tests:
        tests["test"] = tests.pop("test_code")
    return checked_tests(tests)


TESTS_FILE = "livecodebench_tests.jsonl"
_SUFFIXES = (".jsonl", ".parquet")


def owners_files(places: Sequence[Path]) -> list[Path]:
    """Return the files of rows in ``places``, files or folders. At least one, sorted by name."""
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if file.suffix in _SUFFIXES
    ]
    if not files:
        raise DataError(
            "holds no file of LiveCodeBench; expected test.jsonl, test2.jsonl .. of livecodebench/code_generation_lite: "
            "afm data download benchmarks --output-dir downloads/benchmarks --only livecodebench_v5",
            path=", ".join(map(str, places)),
        )
    return files


def write_complete_tests(places: Sequence[Path], out: Path) -> int:
    """Write the tests of every problem into ``out``, one line each, after a check by the reward's reader. All or nothing.

    Private tests stay packed as published and are never unpickled. If several files have a problem, the last one counts.

    Returns:
        The number of problems.

    Raises:
        DataError: A row has no private tests, or damaged ones. The message has file and line.
    """
    files = owners_files(places)
    last = {name: (file, line) for file, line, name, _ in _problems(files)}
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / TESTS_FILE) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for file, line, name, tests in _problems(files):
            if last[name] == (file, line):
                checked = _check_in_place(tests, file, line)
                lines.write(json.dumps({"question_id": name, **checked}, ensure_ascii=False) + "\n")
    write_manifest(out / "manifest.json", counts={"problems": len(last)}, inputs=files)
    return len(last)


def _problems(files: Sequence[Path]) -> Iterator[tuple[Path, int, str, dict[str, Any]]]:
    for file in files:
        for line, row in published_rows(file):
            if isinstance(row, DataError):
                raise DataError(row.message, path=str(file), line=line)
            if (
                not isinstance(row, Mapping)
                or not row.get("question_id")
                or not row.get("private_test_cases")
            ):
                raise DataError(
                    "no `question_id` with `private_test_cases`; expected rows of livecodebench/code_generation_lite "
                    "(AFM's parquet files hold the sample tests only)",
                    path=str(file),
                    line=line,
                )
            yield file, line, str(row["question_id"]), {key: row[key] for key in TEST_KEYS if key in row}


def _check_in_place(tests: Mapping[str, Any], file: Path, line: int) -> dict[str, Any]:
    try:
        return checked_tests(tests)
    except DataError as error:
        raise DataError(error.message, path=str(file), line=line) from None
