import json
import re
import subprocess
import sys
from errno import EEXIST
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.configuration import read_file
from afm.datasets.schema import read_tasks
from afm.datasets.sft_files import write_sft
from afm.errors import ConfigError, DataError, described, no_such_file

ROOT = Path(__file__).parents[2]
TASK = {"id": "a", "question": "Tom has 57 coins. Tom finds 38 more. How many coins does Tom have?"}


@pytest.fixture
def last_line(afm):
    """Runs the command; its status and the last line of its error."""

    def run(*words):
        done = afm(*words, status=None)
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    return run


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("trian.csv", "train.csv"),
        ("Train.csv", "train.csv"),
        ("qestions/a.yaml", "questions/a.yaml"),
        ("b.yaml", None),  # only the ending is alike
        ("qestions/train.csv", None),  # the nearest folder has no such file
        ("train.csv/x", None),
        ("train.yaml", None),  # rows are not settings
    ],
)
def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path, typed, near):
    (tmp_path / "questions").mkdir()
    for name in ("train.csv", "rl.csv", "questions/a.yaml", "a.yaml"):
        (tmp_path / name).touch()
    hint = f" (did you mean {tmp_path / near}?)" if near else ""
    assert no_such_file(tmp_path / typed) == f"no such file{hint}"


def test_a_missing_file_of_the_folder_above_or_below_is_answered_with_the_way_there(tmp_path, monkeypatch):
    (tmp_path / "my task/runs").mkdir(parents=True)
    (tmp_path / "my task/sft.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert no_such_file("sft.yaml") == "no such file (my task/sft.yaml exists: cd 'my task')"
    assert no_such_file("runs", "folder") == "no such folder (my task/runs exists: cd 'my task')"
    monkeypatch.chdir(tmp_path / "my task/runs")
    assert no_such_file("sft.yaml") == "no such file (../sft.yaml exists: cd ..)"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/sft.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert no_such_file("sft.yaml") == "no such file"  # two folders have it
    assert no_such_file("runs/quickstart/rl", "folder") == "no such folder (./quickstart.sh makes it)"
    assert no_such_file("runs/quickstart-wiki") == "no such file (./quickstart.sh --world wiki makes it)"
    assert no_such_file("runs/quickstart/eval_foo") == "no such file"
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    assert no_such_file("runs/quickstart/rl") == "no such file"


def test_a_tab_in_a_yaml_is_answered_with_the_command_that_replaces_it(tmp_path):
    path = tmp_path / "my agent.yaml"
    path.write_text("name: a\nroles:\n\tthink: x\n", encoding="utf-8")
    with pytest.raises(ConfigError) as wrong:
        read_file(path)
    command = f"sed -i 's/\\t/  /g' '{path}'"
    text = "line 3, column 1: a tab, expected spaces; this replaces all tabs:"
    assert str(wrong.value) == f"{path}: cannot be read as YAML: {text} {command}; expected settings"
    assert subprocess.run(command, shell=True, check=True).returncode == 0
    assert read_file(path) == {"name": "a", "roles": {"think": "x"}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "a:\n    b: 1\n   c: 2",
            "line 3, column 4: the line is indented like no line above it; keys of one mapping begin",
        ),
        ("a: {x: one: two}", "line 1, column 11: '}' is missing, or quotes around a text with ': '"),
        (
            "a: [1, 2\nb: 3",
            "line 2, column 2: ']' is missing, or quotes around a text with ': ' or quotes in it (begun in line 1)",
        ),
        (
            "a: one: two",
            "line 1, column 7: a second ': ', or a wrong indentation; put a text with ': ' between quotes, in: a: one",
        ),
        ("a: 'it's'", "line 1, column 8: the quotes end before the text does; between ' write '' for '"),
        (
            'a: "b" c',
            "line 1, column 8: the quotes end before the text does; between ' write '' for ', and between \" w",
        ),
        ("a: [1]]", "line 1, column 7: a ']' too many"),
        (
            'a: "x\nb: 2',
            "line 2, column 5: quotes that are opened in the text are not closed (begun in line 1)",
        ),
        (
            "a: @x",
            "line 1, column 4: no text begins with @; put it between quotes, in: a: @x; expected settings",
        ),
        ("x: 1\nb\nc: 2", "line 3, column 1: a key lacks ': ' after it (begun in line 2)"),
    ],
)
def test_a_fault_in_a_yaml_is_told_in_plain_words_with_its_line(tmp_path, text, fault):
    path = tmp_path / "agent.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as wrong:
        read_file(path)
    assert str(wrong.value).startswith(f"{path}: cannot be read as YAML: {fault}")


@pytest.mark.parametrize(
    ("table", "row", "advice"),
    [
        ("csv", "frage,answer,data_source\na,b,c\n", "{file} --question-key frage --answer-key answer --out tasks.jsonl`"),
        ("csv", "question,the result\na,b\n", "{file} --question-key question --answer-key 'the result' --out"),
        ("csv", "nr,frage,antwort\n1,a,b\n", "{file} --question-key KEY --answer-key KEY --out"),
        ("json", '{"data": [{"question": "a"}]}', "if 'data' holds the rows, write them .*: jq .data {file} > rows.json"),
        ("json", '{"messages": [{"role": "user"}]}', "{file} --question-key KEY --answer-key KEY --out"),
    ],
)  # fmt: skip
def test_other_keys_are_answered_with_the_command_that_reads_them(tmp_path, table, row, advice):
    file = tmp_path / f"rows.{table}"
    file.write_text(row, encoding="utf-8")
    with pytest.raises(DataError, match=advice.format(file=file)):
        list(read_tasks(file))


def test_a_file_name_typed_wrong_is_corrected_by_every_reader(afm, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for name in ("train.csv", "agent.yaml", "eval.yaml"):
        (tmp_path / name).touch()
    for words, name in (
        ("data distill {T}/trian.csv --output-dir {T}/out", "train.csv"),
        ("eval {T}/evla.yaml", "eval.yaml"),
        ("validate {T}/rows.jsonl --agent {T}/agnet.yaml", "agent.yaml"),
    ):
        done = afm(*words.replace("{T}", str(tmp_path)).split(), status=None)
        assert f"(did you mean {tmp_path / name}?); expected" in done.stderr


def test_a_process_ends_with_the_status_of_its_error():
    words = [sys.executable, "-m", "afm.cli.main", "data", "world"]
    done = subprocess.run([*words, "--output-dir", "/dev/null/x"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (
        1,
        "error: /dev/null/x: a part of this path is a file; expected a folder, choose another --output-dir\n",
    )
    with Path("/dev/full").open("w") as full:
        asked = [*words[:-2], "list", "agents"]
        done = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "No space left on device; delete files there, or choose another disk" in done.stderr
    done = subprocess.run([*words, "--pages", "x"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2


INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["afm", "validate", "rows.jsonl"]
from afm.cli.main import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "afm.cli.convert", "afm.trajectory"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    words = [sys.executable, "-c", INTERRUPTED.format(module=module)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_list_of_commands_says_what_their_help_says():
    from afm.cli.commands import command

    summaries = {name: one.help for name, one in command().commands.items()}
    for name, one in command(load=True).commands.items():
        assert " ".join(one.help.split("\n\n")[0].split()) == summaries[name]


def test_help_keeps_its_brackets(capsys, monkeypatch):
    """Typer takes words in brackets for a style and leaves them out."""
    from afm.cli.commands import command

    def shown(path, one):
        below = getattr(one, "commands", {})
        for name, each in below.items():
            yield from shown([*path, name], each)
        wanted = [one.help or "", *(getattr(parameter, "help", None) or "" for parameter in one.params)]
        for text in wanted:
            for part in re.findall(r"\[[^\]]*\]", text.replace("\\[", "[")):
                yield path, part

    parts = list(shown([], command(load=True)))
    assert (["eval", "choose"], "[list,score]") in parts
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    for words in {tuple(path) for path, _ in parts}:
        command()([*words, "--help"], standalone_mode=False)
        help_text = capsys.readouterr().out
        for path, part in parts:
            assert path != list(words) or part in help_text, (words, part)


@pytest.mark.parametrize("words", [["validate"], ["reward"], ["data", "filter", "-o", "out.jsonl"]])
def test_nothing_to_do_is_not_success(last_line, tmp_path, words):
    (tmp_path / "empty.jsonl").touch()
    words = [str(tmp_path / word) if word == "out.jsonl" else word for word in words]
    status, said = last_line(*words, tmp_path / "empty.jsonl")
    assert status == 1
    assert said.startswith(f"error: {tmp_path}/empty.jsonl: holds no ")


def test_a_data_set_stays_in_its_folder(tmp_path):
    with pytest.raises(DataError, match="without a folder"):
        write_sft([], load_agent("math"), tmp_path / "s", name="../evil")
    assert not (tmp_path / "evil.json").exists()


def test_without_isolation_nothing_is_distilled(last_line, monkeypatch, tmp_path):
    """Even a program that could answer without its tool must not go on: its data would lack every tool call."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        json.dumps({**TASK, "answer": "95", "data_source": "mini_math"}) + "\n", encoding="utf-8"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    status, said = last_line("data", "distill", tasks, "--output-dir", tmp_path / "d")
    assert status == 1
    assert "bubblewrap is not installed" in said
    assert "apt-get install bubblewrap" in said


def test_a_path_that_is_named_like_the_placeholder_stays_as_it_is() -> None:
    error = FileExistsError(EEXIST, "File exists", "runs/OUTPUT")
    expected = "runs/OUTPUT: is a file; expected a folder, choose another output_dir"
    assert described(error, "output_dir") == expected
