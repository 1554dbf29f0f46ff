from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from afm.cli.validate import validate

app = typer.Typer()
app.command()(validate)

GOOD = "<plan>p</plan><think>t</think><answer>\\boxed{1}</answer>"
BAD = "<plan>p</plan><thnk>t</thnk><answer>1</answer>"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def alpaca(path: Path, *outputs: str) -> Path:
    rows = [json.dumps({"instruction": "q", "input": "", "output": output}) for output in outputs]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_valid_file_ends_with_status_zero(tmp_path: Path) -> None:
    result = run(str(alpaca(tmp_path / "my rows.jsonl", GOOD, GOOD)), "--agent", "math")
    assert (result.exit_code, result.stdout) == (0, "2 trajectories: 2 valid, 0 with faults\n")


def test_every_fault_is_printed_with_file_line_and_character(tmp_path: Path) -> None:
    path = alpaca(tmp_path / "rows.jsonl", GOOD, BAD)
    result = run(str(path), "--agent", "math")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{path}:2: <thnk> at character 14 (line 1 of the text) is no role of agent 'math'; did you mean 'think'?",
        f"{path}:2: <answer> at character 28 (line 1 of the text) has no <think> directly before it",
        f"{path}:2: <answer> at character 28 (line 1 of the text) holds no answer in the format 'boxed'",
        "2 trajectories: 1 valid, 1 with faults",
    ]


def test_json_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    path = alpaca(tmp_path / "rows.jsonl", "<plan>p</plan><answer>\x9b31m\u202eevil</answer><\u202e>")
    row = json.dumps(
        {"id": "\x9b31m\u202e", "instruction": "q", "input": "", "output": BAD}, ensure_ascii=False
    )
    path.write_text(path.read_text(encoding="utf-8") + row + "\n", encoding="utf-8")
    result = run(str(path), "--agent", "math", "--json")
    assert result.stdout.isascii()
    assert json.loads(result.stdout.splitlines()[-1])["id"] == "\x9b31m\u202e"


def test_json_is_one_object_a_row(tmp_path: Path) -> None:
    path = alpaca(tmp_path / "rows.jsonl", GOOD, BAD)
    with path.open("a", encoding="utf-8") as file:
        file.write("{oops\n")
    result = run(str(path), "--agent", "math", "--json")
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 1
    assert first == {"id": "1", "line": 1, "valid": True, "faults": []}
    assert (second["id"], second["valid"]) == ("2", False)
    assert [(fault["kind"], fault["character"]) for fault in second["faults"]] == [
        ("unknown_role", 14),
        ("thought", 28),
        ("answer_format", 28),
    ]
    assert (third["id"], third["line"], third["faults"][0]["kind"]) == (None, 3, "unreadable")


def test_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    assert run(str(tmp_path / "none.jsonl")).exit_code == 2
    assert run(str(tmp_path)).exit_code == 2
