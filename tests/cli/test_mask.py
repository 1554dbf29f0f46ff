from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from afm.cli.convert import mask
from afm.errors import UsageError

app = typer.Typer()
app.command()(mask)

TEXT = "<code>a</code><observation>E</observation>\n<reflection>b</reflection>"


@pytest.fixture
def run(qwen_folder: Path) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--agent", "math", "--tokenizer", str(qwen_folder)])

    return invoke


def alpaca(path: Path, *outputs: str) -> Path:
    path.write_text(
        json.dumps([{"instruction": "q", "input": "", "output": text} for text in outputs]), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize(
    ("boundary", "tokens", "trained"), [("split", 18, 12), ("mask", 17, 11), ("keep", 17, 12)]
)
def test_json_counts_and_shows_what_is_trained_on(
    tmp_path: Path, run: Callable[..., Result], boundary: str, tokens: int, trained: int
) -> None:
    result = run(str(alpaca(tmp_path / "rows.json", TEXT)), "--json", "--boundary", boundary)
    (row,) = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 0
    assert (row["id"], row["tokens"], row["trained"]) == ("1", tokens, trained)
    if boundary == "split":
        assert row["trained_text"] == "<code>a</code><reflection>b</reflection>"
        assert row["masked_text"] == "<observation>E</observation>\n"


def test_preview_brackets_what_is_masked(tmp_path: Path, run: Callable[..., Result]) -> None:
    result = run(str(alpaca(tmp_path / "rows.json", TEXT)))
    assert result.stdout == (
        "1: 18 tokens, 12 trained on\n<code>a</code>⟦<observation>E</observation>\n⟧<reflection>b</reflection>\n\n"
    )


def test_faulty_rows_are_reported_and_the_status_says_so(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = alpaca(tmp_path / "rows.json", TEXT, "<think>never closed")
    result = run(str(path), "--json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{path}:1: <think> opened at character 0 (line 1 of the text) is never closed\n"


def test_folder_without_tokenizer_is_wrong_usage(tmp_path: Path) -> None:
    path = alpaca(tmp_path / "rows.json", TEXT)
    result = CliRunner().invoke(app, [str(path), "--tokenizer", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "expected a folder that holds tokenizer.json" in str(result.exception)


def test_a_role_without_loss_is_masked_too(tmp_path: Path, run: Callable[..., Result]) -> None:
    result = run(str(alpaca(tmp_path / "rows.json", TEXT)), "--json", "--without-loss", "reflection")
    assert json.loads(result.stdout)["trained_text"] == "<code>a</code>"


def test_the_preview_shows_what_a_terminal_would_obey(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = tmp_path / "rows.json"
    text = "<answer>a\x1b[2J\r\nb\x9b1A</answer>"
    path.write_text(json.dumps([{"id": "\x1b[1m", "instruction": "q", "input": "", "output": text}]))
    shown = run(str(path)).stdout
    assert shown.startswith("␛[1m: ")
    assert shown.endswith("<answer>a␛[2J␍\nb\\x9b1A</answer>\n\n")
    assert run(str(path), "--json").stdout.isascii()


def test_rows_around_one_that_is_no_text_are_shown(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = (json.dumps({"output": f"<answer>{text}</answer>"}) for text in ("a", "\ud83d"))
    path.write_text(f"{good}\n{bad}\n{good}\n", encoding="utf-8")
    result = run(str(path), "--json")
    assert (result.exit_code, [json.loads(line)["id"] for line in result.stdout.splitlines()]) == (
        1,
        ["1", "3"],
    )
    assert "rows.jsonl:2: half a character" in result.stderr


def test_a_role_that_no_row_has_is_refused_as_by_a_training(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    path = alpaca(tmp_path / "rows.json", TEXT, "<plan>p</plan><answer>a</answer>")
    refused = run(str(path), "--without-loss", "nope", "--without-loss", "plan")
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception).startswith("--without-loss nope: no row has it outside of other roles")
