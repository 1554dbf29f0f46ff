"""Tutorials do what they say: files are written, plain command blocks run in order, the others name commands and options that exist."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from checkout import make_checkout

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PROOFS = {"own_agent", "own_task", "quickstart"}
"""Pages whose commands import the trainers one after the other."""
NOT_RUN = {"GPU", "minutes", "server", "network"}
BUILTINS = {"cd", "export", "source"}
PROGRAM = r"afm [a-z]|(?:python )?(?:tool_servers|train|evaluation|data)/[\w/]+\.(?:sh|py)"
HEADER_COMMAND = re.compile(
    rf"((?:[A-Z_]+=\S+ +)*(?:{PROGRAM})[^`\n]*?)(?:`|;| and | \(|[,.)]+(?: |$)|$)", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    """The words of each command, without comments and what follows an or."""
    lines = [
        shlex.split(line, comments=True) for line in text.replace("\\\n", "").replace("&&", "\n").splitlines()
    ]
    return [line[: line.index("||")] if "||" in line else line for line in lines if line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.proof] * (page.stem in PROOFS)) for page in PAGES],
)
def test_what_a_tutorial_shows_happens(page: Path, checkout: Path) -> None:
    script = ["set -eo pipefail"]
    expected: list[str] = []
    for block in blocks(page):
        if block.language in ("yaml", "python", "json"):
            assert block.title, f"{page.name}: a file without a name: {block.text[:60]}"
            (checkout / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            expected += block.text.splitlines()
        elif not block.title:
            script.append(block.text)
    assert len(script) > 1, f"{page.name} runs nothing"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("GRM_", "WEB_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script).replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")],
        cwd=checkout, env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for line in expected:
        assert line in done.stdout, (
            f"{page.name} shows a line that did not come: {line}\n{done.stdout[-3000:]}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_that_are_not_run_exist_with_their_options(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("bash", "yaml", "python", "json", "text"), block
        if block.language == "bash":
            assert block.title in NOT_RUN | {""}, f"{page.name}: title {block.title!r}"
            for words in commands(block.text):
                check(words, page.name)


def test_commands_in_headers_of_configurations_exist_with_their_options() -> None:
    checked = 0
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        header = "".join(takewhile(lambda line: line.startswith("#"), path.open(encoding="utf-8")))
        for text in HEADER_COMMAND.findall(header.replace("\\\n#", "").replace("=...", "=X")):
            check(text.split(), str(path.relative_to(ROOT)))
            checked += 1
    assert checked > 170


def test_a_wrong_command_or_option_would_be_found() -> None:
    options = ("afm eval x --dryrun", "python data/web_agent/download.py --dry")
    variable = "SISE=7b train/web_agent/rl/train_dapo_web_agent.sh"
    for wrong in ("afm evall x", "afm eval configs/eval/nope.yaml", "train/no.sh", variable, *options):
        with pytest.raises(AssertionError):
            check(shlex.split(wrong), "here")


def check(words: list[str], page: str) -> None:
    """Whether a command, its options, its variables and the files of the project that it names exist."""
    variables = []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        variables.append(words.pop(0).partition("=")[0])
    if not words or words[0] in BUILTINS:
        return
    program, *rest = words
    for word in rest:
        made = page.startswith("configs/") and re.match(r"data/.*(?<!\.py)(?<!\.sh)$", word)  # by its reader
        if word.startswith(("configs/", "train/", "evaluation/", "data/")) and "=" not in word and not made:
            assert (ROOT / word).exists(), f"{page}: {word} is not there"
    if program in ("afm", ".venv/bin/afm"):
        check_afm(rest, page)
    elif program == "python":
        if rest[0] not in ("-c", "-m"):
            if not (ROOT / rest[0]).is_file():  # written by the page, or by `afm init`
                written = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
                assert f'title="{rest[0]}"' in written or (ROOT / "afm/starter" / rest[0]).is_file()
                return
            text = (ROOT / rest[0]).read_text(encoding="utf-8")
            for word in rest[1:]:
                known = not word.startswith("-") or re.search(rf"{word.partition('=')[0]}(?![\w-])", text)
                assert known, f"{page}: {rest[0]} has no option {word}"
            return
        assert rest[0] == "-c" or importlib.util.find_spec(rest[1]), f"{page}: no module {rest[1]}"
    else:
        script = ROOT / program
        if not (script.is_file() and os.access(script, os.X_OK)):
            assert "/" not in program, f"{page}: {program} is not there"
            assert shutil.which(program), f"{page}: there is no program {program}"
            return
        text = script.read_text(encoding="utf-8")
        environment = (ROOT / "environment.sh").read_text("utf-8") if script.name == "servers.sh" else ""
        for name in variables:
            known = name in text + environment or name.startswith(("RAY_", "NNODES", "MASTER_"))
            assert known, f"{page}: {program} reads no {name}"


@cache
def command_line() -> Any:
    """Every command of ``afm``. To build them takes a tenth of a second."""
    from afm.cli.commands import command

    return command(load=True)


def check_afm(words: list[str], page: str) -> None:
    command = command_line()
    while getattr(command, "commands", None):
        inner = command.commands
        if words and words[0] in inner:
            command = inner[words.pop(0)]
        elif not words or words[0] in {option for one in command.params for option in one.opts}:
            break  # a group that is only named, or that has options of its own
        else:
            implied = "run" in inner and words[:1] and words[0].endswith(".yaml")
            assert implied, f"{page}: afm has no {words[:1]}"
            command = inner["run"]
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{page}: afm {command.name} has no option {word}"
