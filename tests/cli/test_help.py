"""The help of every command in a terminal of 80 columns: nothing is cut off, every option says what it does."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afm.cli.commands import command
from afm.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80


def every_command(one: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, one
    for name, below in getattr(one, "commands", {}).items():
        yield from every_command(below, (*path, name))


TREE = dict(every_command(command(load=True)))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", WIDTH)

    def shown(*words: str) -> str:
        command()([*words], prog_name="afm", standalone_mode=False)
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_nothing_in_a_help_page_is_cut_off(path: tuple[str, ...], page: Any) -> None:
    text = page(*path, "--help")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    words = re.sub(r"[│\s]+", " ", text)
    for parameter in TREE[path].params:
        for word in re.findall(r"[^\s\\]+", getattr(parameter, "help", None) or ""):
            assert word in words, f"{word!r} is broken in two lines"


@pytest.mark.parametrize("path", [path for path in TREE if path], ids=" ".join)
def test_a_command_takes_one_line_in_the_list_of_its_group(path: tuple[str, ...], page: Any) -> None:
    *group, name = path
    rows = [line.strip("│ ") for line in page(*group, "--help").splitlines()]
    summary = TREE[path].help.partition("\n\n")[0].replace("\\[", "[")
    assert re.compile(rf"{name} +{re.escape(summary)}").fullmatch(
        next(row for row in rows if row.startswith(f"{name} "))
    )


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_every_option_has_a_text_and_every_value_a_default(path: tuple[str, ...]) -> None:
    for parameter in TREE[path].params:
        text = (getattr(parameter, "help", None) or "").replace("\\[", "[")
        assert re.match(r"[A-Z_a-z0-9`-].*[.]$", text), f"{parameter.name}: {text!r}"
        takes_a_value = parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
        if takes_a_value and not parameter.required and parameter.default in (None, "") and path:
            assert "[default: " in text or "may be repeated" in text, (
                f"{parameter.name}: no default in {text!r}"
            )


def test_types_are_words_that_are_not_pythons() -> None:
    types = {
        parameter.display_type_rich(ctx=None)
        for one in TREE.values()
        for parameter in one.params
        if parameter.name not in ("install_completion", "show_completion")
    }
    assert not {text for text in types if re.search(r"[<>]?(str|int|float|bool|list|Path)\b", text)}
    assert {"", "TEXT", "N", "N>=1", "0-65535", "PATH", "FILE", "DIR", "math|wiki"} <= types


def test_arguments_are_written_as_in_the_usage_of_other_programs(page: Any) -> None:
    assert "Usage: afm eval run [OPTIONS] CONFIG [KEY=VALUE]..." in page("eval", "run", "--help")
    assert "Usage: afm ask [OPTIONS] [QUESTION]" in page("ask", "--help")
    assert "Usage: afm data stats [OPTIONS] FILES..." in page("data", "stats", "--help")


def test_the_help_of_a_download_names_every_shipped_list_of_sets(page: Any) -> None:
    words = set(re.findall(r"\w+", page("data", "download", "--help")))
    assert {file.stem for file in (ROOT / "configs/data").glob("*.yaml")} <= words


def test_descriptions_of_recipes_end_outside_parentheses(page: Any) -> None:
    rows = json.loads(page("list", "recipes", "--json"))
    texts = [row["description"] for row in rows]
    assert [text for text in texts if not text or text.count("(") != text.count(")")] == []


def on_terminal(*words: str) -> list[str]:
    """Return what a command prints on a terminal of 80 columns."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "afm.cli.main", *words]
    with subprocess.Popen(command, stdout=its, env=os.environ | {"COLUMNS": str(WIDTH)}, cwd=ROOT) as running:
        os.close(its)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # the end on Linux
            os.close(ours)
    assert running.returncode == 0
    return said.decode().splitlines()


@pytest.mark.parametrize("name", ["agents", "recipes", "tools", "rewards", "benchmarks"])
def test_a_list_fits_a_terminal_and_has_a_line_for_each_row_elsewhere(page: Any, name: str) -> None:
    shown, rows = on_terminal("list", name), json.loads(page("list", name, "--json"))
    assert max(map(len, shown)) <= WIDTH
    lines = page("list", name).splitlines()
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        first = str(next(iter(row.values())))
        assert line.startswith(first)
        assert any(each.startswith(first.rpartition("/")[2]) for each in shown)
    assert all(line.strip() for line in shown[:3])
    assert any(re.fullmatch(r"(?:[A-Z]+ +)+[A-Z ]+", line) for line in shown[:2])


def test_the_recipes_for_a_laptop_come_first(page: Any) -> None:
    heads = [line for line in on_terminal("list", "recipes") if "configs/" in line and line.endswith("/FILE")]
    assert heads[0] == "On a laptop: afm sft configs/tiny/sft/FILE"
    assert [head.split(":")[0] for head in heads] == ["On a laptop"] * 2 + ["On GPUs"] * 2 + ["Data"] * 4


def test_lists_tell_equal_names_apart(page: Any) -> None:
    texts = [line for line in page("list", "tools").splitlines() if line.startswith("code ")]
    assert len({line.rpartition("  ")[2] for line in texts}) == len(texts) == 3
    assert ", gms8k (same as gsm8k)," in page("list", "rewards")
    assert "gms8k" in json.loads(page("list", "rewards", "--json"))[0]["data_sources"]


def test_list_alone_shows_its_help_and_says_which_words_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError) as error:
        command()(["list"], prog_name="afm", standalone_mode=False)
    assert "Usage: afm list" in capsys.readouterr().out
    words = "expected agents, recipes, tools, rewards or benchmarks; for example afm list recipes"
    assert error.value.described() == f"afm list: {words}"


def test_the_kinds_of_isolation_are_whole_words(page: Any) -> None:
    assert {"auto", "zygote", "bubblewrap", "nsjail"} <= set(
        re.findall(r"\w+", page("sandbox", "check", "--help"))
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("afm eval --", {"--help", "--dry-run", "--json", "--trust"}),
        ("afm eval ", {"run", "compare", "choose", "agree"}),
        ("afm convert --to ", {"coa", "atif", "sharegpt"}),
    ],
)
def test_the_tab_key_completes_what_the_usage_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, expected: set[str]
) -> None:
    monkeypatch.setenv("_AFM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        command()([], prog_name="afm")
    assert expected <= set(capsys.readouterr().out.split())
