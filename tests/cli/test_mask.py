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
        return CliRunner().invoke(app, ["--agent", "math", "--tokenizer", str(qwen_folder), *arguments])

    return invoke


@pytest.fixture
def alpaca(tmp_path: Path) -> Callable[..., str]:
    def write(*outputs: str, **fields: str) -> str:
        rows = [{"instruction": "q", "input": "", "output": text, **fields} for text in outputs]
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return str(tmp_path / "rows.json")

    return write


@pytest.mark.slow
def test_json_counts_and_shows_what_is_trained_on(
    alpaca: Callable[..., str], run: Callable[..., Result]
) -> None:
    counts, rows = {}, {}
    for boundary in ("split", "mask", "keep"):
        result = run(alpaca(TEXT), "--json", "--boundary", boundary)
        (row,) = map(json.loads, result.stdout.splitlines())
        counts[boundary], rows[boundary] = (row["id"], row["tokens"], row["trained"]), row
    assert counts == {"split": ("1", 18, 12), "mask": ("1", 17, 11), "keep": ("1", 17, 12)}
    assert rows["split"]["trained_text"] == "<code>a</code><reflection>b</reflection>"
    assert rows["split"]["masked_text"] == "<observation>E</observation>\n"
    result = run(alpaca(TEXT), "--json", "--without-loss", "reflection")
    assert json.loads(result.stdout)["trained_text"] == "<code>a</code>"


@pytest.mark.slow
def test_preview_brackets_what_is_masked(alpaca: Callable[..., str], run: Callable[..., Result]) -> None:
    result = run(alpaca(TEXT))
    assert result.stdout == (
        "1: 18 tokens, 12 trained on\n<code>a</code>⟦<observation>E</observation>\n⟧<reflection>b</reflection>\n\n"
    )


@pytest.mark.slow
def test_faulty_rows_are_reported_and_the_status_says_so(
    alpaca: Callable[..., str], run: Callable[..., Result]
) -> None:
    path = alpaca(TEXT, "<think>never closed")
    result = run(path, "--json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{path}:1: <think> opened at character 0 (line 1 of the text) is never closed\n"


@pytest.mark.slow
def test_the_preview_shows_what_a_terminal_would_obey(
    alpaca: Callable[..., str], run: Callable[..., Result]
) -> None:
    path = alpaca("<answer>a\x1b[2J\r\nb\x9b1A</answer>", id="\x1b[1m")
    shown = run(path).stdout
    assert shown.startswith("␛[1m: ")
    assert shown.endswith("<answer>a␛[2J␍\nb\\x9b1A</answer>\n\n")
    assert run(path, "--json").stdout.isascii()


@pytest.mark.slow
def test_rows_around_one_that_is_no_text_are_shown(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = (json.dumps({"output": f"<answer>{text}</answer>"}) for text in ("a", "\ud83d"))
    path.write_text(f"{good}\n{bad}\n{good}\n", encoding="utf-8")
    result = run(str(path), "--json")
    assert result.exit_code == 1
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["1", "3"]
    assert "rows.jsonl:2: half a character" in result.stderr


@pytest.mark.slow
def test_wrong_usage_is_refused_and_a_role_that_no_row_has_as_by_a_training(
    alpaca: Callable[..., str], run: Callable[..., Result], tmp_path: Path
) -> None:
    path = alpaca(TEXT, "<plan>p</plan><answer>a</answer>")
    for words, told in (
        (["--without-loss", "nope", "--without-loss", "plan"], "--without-loss nope: no row has it outside"),
        (["--tokenizer", str(tmp_path)], "expected a folder that holds tokenizer.json"),
    ):
        refused = run(path, *words)
        assert isinstance(refused.exception, UsageError)
        assert told in str(refused.exception)
