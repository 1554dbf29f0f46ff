import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from afm.cli.convert import mask
from afm.errors import UsageError

Run = Callable[..., Result]
Write = Callable[..., str]
app = typer.Typer()
app.command()(mask)

TEXT = "<code>a</code><observation>E</observation>\n<reflection>b</reflection>"


def runs_with(tokenizer: Path) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["--agent", "math", "--tokenizer", str(tokenizer), *arguments])

    return invoke


@pytest.fixture
def run(talker_folder: Path) -> Run:
    """With a small tokenizer: Qwen's takes seconds to load, and only its ids need it."""
    return runs_with(talker_folder)


@pytest.fixture
def alpaca(tmp_path: Path) -> Write:
    def write(*outputs: str, **fields: str) -> str:
        rows = [{"instruction": "q", "input": "", "output": text, **fields} for text in outputs]
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return str(tmp_path / "rows.json")

    return write


@pytest.mark.slow
def test_json_counts_and_shows_what_is_trained_on(alpaca: Write, run: Run, qwen_folder: Path) -> None:
    qwen = runs_with(qwen_folder)
    row = json.loads(qwen(alpaca(TEXT), "--json").stdout)
    assert (row["id"], row["tokens"], row["trained"]) == ("1", 18, 12)
    assert row["trained_text"] == "<code>a</code><reflection>b</reflection>"
    assert row["masked_text"] == "<observation>E</observation>\n"
    kept = json.loads(qwen(alpaca(TEXT), "--json", "--boundary", "keep").stdout)
    assert (kept["tokens"], kept["trained"]) == (17, 12)
    result = run(alpaca(TEXT), "--json", "--without-loss", "reflection")
    assert json.loads(result.stdout)["trained_text"] == "<code>a</code>"


@pytest.mark.slow
def test_faulty_rows_are_reported_and_the_status_says_so(alpaca: Write, run: Run) -> None:
    path = alpaca(TEXT, "<think>never closed")
    result = run(path, "--json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{path}:1: <think> opened at character 0 (line 1 of the text) is never closed\n"


@pytest.mark.slow
def test_the_preview_brackets_what_is_masked_and_shows_what_a_terminal_would_obey(
    alpaca: Write, run: Run
) -> None:
    counts, text = run(alpaca(TEXT)).stdout.split("\n", maxsplit=1)
    assert re.fullmatch(r"1: \d+ tokens, \d+ trained on", counts)
    assert text == "<code>a</code>⟦<observation>E</observation>\n⟧<reflection>b</reflection>\n\n"
    path = alpaca("<answer>a\x1b[2J\r\nb\x9b1A</answer>", id="\x1b[1m")
    shown = run(path).stdout
    assert shown.startswith("␛[1m: ")
    assert shown.endswith("<answer>a␛[2J␍\nb\\x9b1A</answer>\n\n")
    assert run(path, "--json").stdout.isascii()


@pytest.mark.slow
def test_wrong_usage_is_refused_and_a_role_that_no_row_has_as_by_a_training(
    alpaca: Write, run: Run, tmp_path: Path
) -> None:
    path = alpaca(TEXT, "<plan>p</plan><answer>a</answer>")
    for words, message in (
        (["--without-loss", "nope", "--without-loss", "plan"], "--without-loss nope: no row has it outside"),
        (["--tokenizer", str(tmp_path)], "expected a folder that holds tokenizer.json"),
    ):
        refused = run(path, *words)
        assert isinstance(refused.exception, UsageError)
        assert message in str(refused.exception)
