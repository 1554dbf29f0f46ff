import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afm.cli.convert import FormatName
from afm.errors import RepeatedErrors
from afm.trajectory import load_records
from afm.trajectory.convert import FORMATS

Command = Callable[..., Any]
CALL = {"id": "c", "function": {"name": "wiki_search", "arguments": '{"query": "mill"}'}}
GOOD = {
    "messages": [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "Built in 1702."},
        {"role": "assistant", "content": "<think>Found.</think><answer>1702</answer>"},
    ]
}
BAD = {"messages": [{"role": "robot", "content": "x"}]}


@pytest.fixture
def convert(afm: Command) -> Command:
    return partial(afm, "convert", status=None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in put.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps(BAD)}\n{{\n{json.dumps(GOOD | {'score': 1})}\n")
    return file


def test_bad_rows_are_told_with_their_line_and_nothing_is_written(
    convert: Command, rows: Path, tmp_path: Path
) -> None:
    done = convert(rows, "--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")

    assert done.returncode == 1
    assert (
        f"{rows}:2: messages[0]: role: got 'robot', expected system, user, assistant or tool" in done.stderr
    )
    assert f"{rows}:3: invalid JSON" in done.stderr
    assert "2 rows cannot be converted, so nothing was written" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_long_file_shows_how_many_rows_are_read(convert: Command, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    for count, shown in ((499, []), (500, ["      rows: 500"])):
        rows.write_text(f"{json.dumps(GOOD)}\n" * count)
        done = convert(rows, "--to", "coa", "--agent", "mhqa", "-o", out)
        assert done.stdout.splitlines() == [*shown, f"{out}: {count} rows, openai to coa"]


def test_bad_rows_can_be_dropped_and_what_is_lost_is_told(
    convert: Command, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    done = convert(
        rows, "--from", "openai", "--to", "coa", "--agent", "mhqa", "-o", out, "--on-bad-rows", "drop"
    )

    assert done.returncode == 0, done.stderr
    assert f"{rows}:2:" in done.stderr
    assert "warning: lost in 1 row: key 'score'" in done.stderr
    assert "2 rows, openai to coa" in done.stdout
    assert len(load_records(out)) == 2

    back = convert(out, "--to", "atif", "--bare", "--atif-version", "1.4", "-o", tmp_path / "atif.json")
    assert back.returncode == 0, back.stderr
    assert "warning: lost in 2 rows: gold answer, verdict and provenance" in back.stderr
    rows = json.loads((tmp_path / "atif.json").read_text())
    assert [row["schema_version"] for row in rows] == ["ATIF-v1.4"] * 2


def test_rows_without_an_id_get_one_from_their_content(convert: Command, tmp_path: Path) -> None:
    pairs = (("1?", "2"), ("1?", "3"), ("4?", "2"), ("1?", "2"))
    rows = [
        {"instruction": one, "output": f"<think>Easy.</think><answer>{two}</answer>"} for one, two in pairs
    ]
    rows.append(rows[0] | {"id": 0})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = convert(tmp_path / "in.jsonl", "--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")

    assert done.returncode == 0, done.stderr
    *ids, own = (record.id for record in load_records(tmp_path / "out.jsonl"))
    assert all(name.startswith("content-") for name in ids)
    assert ids[0] == ids[3]  # the same row twice
    assert len(set(ids)) == 3
    assert own == "0"


def test_validate_takes_any_format(afm: Command, tmp_path: Path) -> None:
    assert set(get_args(FormatName)) == set(FORMATS)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([GOOD, GOOD], indent=1))
    assert afm("validate", file, "--agent", "mhqa").stdout == "2 trajectories: 2 valid, 0 with faults\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "openai_agents"), "this format can only be read"),
        (("--to", "coa", "--atif-version", "2"), "expected 1.0 to 1.8"),
        (("--to", "coa", "--tool", "x"), "expected THEIRS=OURS"),
        (("--to", "coa", "--agent", "nobody"), "--agent nobody"),
    ],
)
def test_wrong_usage_is_exit_status_2(
    convert: Command, rows: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = convert(rows, *words, "-o", tmp_path / "out.jsonl")

    assert done.returncode == 2
    assert message in done.stderr


def test_a_tool_that_no_row_calls_is_named_with_those_that_rows_call(
    convert: Command, rows: Path, tmp_path: Path
) -> None:
    out = ("--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl", "--on-bad-rows", "drop")
    done = convert(rows, *out, "--tool", "nosuch=wiki_search", "--tool", "wiki_search=wiki_search")
    assert done.stderr.count("warning: --tool") == 1
    assert "warning: --tool nosuch: no row calls it; the rows call wiki_search" in done.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_another_format_is_named_with_the_option_that_reads_it(
    convert: Command, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(GOOD))
    out = ("--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")
    done = convert(file, "--from", name, *out)
    assert ("this is openai: give --from openai" in done.stderr) == (name != "openai")
    file.write_text('{"nothing": 1}')
    done = convert(file, "--from", name, *out)
    assert done.returncode == 1
    assert "--from" not in done.stderr


def test_every_reason_of_what_is_not_kept_is_counted(convert: Command, tmp_path: Path) -> None:
    asked, called, result, answered = GOOD["messages"]
    unanswered = {"messages": [asked, called, result]}
    wordless = {"messages": [asked, called | {"content": ""}, result, answered]}
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (unanswered, wordless, unanswered)))
    done = convert(file, "--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")

    assert "3 kept: false (2: format: " in done.stdout
    assert "; 1: format: <wiki_search> at character 0" in done.stdout


def test_a_list_of_items_and_a_line_that_ends_early_are_named(convert: Command, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    text = json.dumps(GOOD["messages"])
    file.write_text(f"{text}\n{text[:-30]}")
    done = convert(file, "--from", "openai_agents", "--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out")

    assert "this is messages: give --from messages" in done.stderr
    assert "in.jsonl:2: invalid JSON: Unterminated string" in done.stderr
    assert "; the file ends early, inside this line; expected" in done.stderr


def test_errors_that_differ_in_the_id_of_a_span_are_of_one_kind() -> None:
    kinds = {RepeatedErrors.kind_of(f"span span_{name}: no words") for name in ("a1f", "b22", "c3")}
    assert len(kinds) == 1


def test_the_help_lists_as_writable_what_can_be_written(convert: Command) -> None:
    help_text = " ".join(convert("--help").stdout.split())
    readable = " ".join(get_args(FormatName))
    assert "openai_agents" in readable
    assert help_text.count("openai_agents") == 1


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_the_command_that_an_error_advises_writes_rows_that_convert(
    convert: Command, tmp_path: Path, kind: str
) -> None:
    if kind == "json" and shutil.which("jq") is None:
        pytest.skip("the advice for nested rows needs jq")
    file, out = tmp_path / f"my rows.{kind}", ("--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")
    if kind == "json":
        file.write_text(json.dumps({"note": 1, "data": {"a train": [GOOD, GOOD]}}))
    else:
        pq.write_table(pa.Table.from_pylist([GOOD, GOOD]), file)
    advice = convert(file, *out).stderr.split("write them ")[1].split(": ", 1)[1]
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = advice.split(". Questions")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=os.environ | {"PATH": python})

    assert "out.jsonl: 2 rows, openai to coa" in convert(tmp_path / "ROWS.jsonl", *out).stdout


def test_a_run_without_messages_is_a_bad_row_and_a_mark_of_bytes_between_joined_files_is_none(
    convert: Command, tmp_path: Path
) -> None:
    file, out = tmp_path / "in.jsonl", ("--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")
    run = json.dumps(GOOD["messages"])
    file.write_text(f"[]\n\ufeff{run}\n\ufeff{run}\n", encoding="utf-8")
    assert "in.jsonl:1: got an empty list, expected a list of messages" in convert(file, *out).stderr
    assert "2 rows, messages to coa" in convert(file, *out, "--on-bad-rows", "drop").stdout


@pytest.mark.parametrize(
    ("messages", "advice"),
    [
        (
            GOOD["messages"][1:],
            "write the whole run: `state['messages']` of LangGraph, `result.to_input_list()`",
        ),
        (
            [GOOD["messages"][0], {"role": "tool-call", "content": "x"}],
            "write `agent.memory.get_full_steps()`",
        ),
    ],
)
def test_parts_of_a_run_are_refused_with_what_to_write(
    convert: Command, tmp_path: Path, messages: list[Any], advice: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(messages))
    done = convert(file, "--to", "coa", "--agent", "mhqa", "-o", tmp_path / "out.jsonl")
    assert advice in done.stderr
    assert "--on-bad-rows" not in done.stderr  # no row would be left
