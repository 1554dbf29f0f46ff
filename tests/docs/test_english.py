"""The linter of what a person reads: what it finds, and that the project has no more of it than its walls allow."""

import importlib.util
import re
import subprocess
from pathlib import Path

import english
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def found(path: str, text: str) -> list[str]:
    return [str(finding) for finding in english.check(path, text)]


@pytest.mark.slow
def test_no_text_has_more_findings_than_its_wall_allows() -> None:
    exceeded = [f"{wall}: {count}, allowed {most}" for wall, count, most in english.counts() if count > most]
    assert exceeded == [], "`python benchmarks/english.py PATH` lists them"


def test_walls_only_fall() -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(english.ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    walls = yaml.safe_load(english.RULES.read_text("utf-8"))["walls"]
    for commit in git("log", "-n", "20", "--format=%H", "--", "benchmarks/english.yaml").split():
        before = yaml.safe_load(git("show", f"{commit}:benchmarks/english.yaml"))["walls"]
        raised = {wall: most for wall, most in walls.items() if most > before.get(wall, most)}
        assert raised == {}, f"these were lower in {commit[:8]}"
        assert set(before) - set(walls) == set(), f"these walls of {commit[:8]} are missing"


def test_each_wall_is_a_path_of_the_project() -> None:
    assert [wall for wall in english.rules()["walls"] if not (english.ROOT / wall).exists()] == []  # type: ignore[attr-defined]


def test_a_page_is_read_without_its_code() -> None:
    page = "# Runs\n\nThe run goes on\nanew.\n\n```bash\necho anew; exit\n```\n\n| `anew` | told |\n"
    assert found("docs/x.md", page) == [
        "docs/x.md:3: 'goes on', write: continue",
        "docs/x.md:4: 'anew', write: again",
        "docs/x.md:10: 'told', write: said, reported, passed, listed",
    ]


def test_long_lines_and_sentences_are_counted() -> None:
    assert found("docs/x.md", "word " * 30) == ["docs/x.md:1: line of 150 characters, break it at 120"]
    assert found("docs/x.md", f"[{'word ' * 20}](https://example.org/{'x' * 80})") == []
    assert found("docs/x.md", "Short.\n" + "Word " * 20 + "\n" + "word " * 20) == [
        "docs/x.md:2: sentence of 40 words, make it two"
    ]
    assert found("docs/x.md", "One; two; three.") == [
        "docs/x.md:1: 2 semicolons in a sentence, use full stops"
    ]
    assert found("docs/x.md", "One; two. Three; four `a; b; c;`.") == []


CODE_COLUMN = 97
"""Characters that fit in the code column of the site at 1,280 pixels, and of the README on GitHub. See docs/assets/site.css."""


def test_no_line_of_code_scrolls_on_a_desktop() -> None:
    """Output and rows of JSON are exempt: the site wraps them."""
    wide = []
    for page in (ROOT / "README.md", ROOT / "afm/starter/README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for indent, language, code in FENCE.findall(page.read_text(encoding="utf-8")):
            lines = [] if language in ("", "text", "json") else code.splitlines()
            wide += [f"{page.name}: {line}" for line in lines if len(line) - len(indent) > CODE_COLUMN]
    assert wide == []


def test_lines_of_the_starter_fit() -> None:
    files = sorted((ROOT / "afm/starter").glob("*.yaml"))
    lines = [(file.name, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 50
    assert [(name, line) for name, line in lines if len(line) > 120] == []


def test_a_literal_block_of_a_docstring_is_no_prose() -> None:
    assert found("afm/x.py", '"""In a file::\n\n    told: [a: b: c: d]\n\ntold\n"""') == [
        "afm/x.py:5: 'told', write: said, reported, passed, listed"
    ]


def test_docstrings_errors_and_help_texts_of_python_are_read() -> None:
    text = '''"""A module."""
class Settings:
    key: int = 1
    """The key.

    Args:
        name: a name that is told.
    """
def f(x=typer.Option(1, help="Begun anew.")):
    told = "told"
    raise ValueError(f"{x} was told", told)
'''
    assert [line.split(",")[0] for line in found("afm/x.py", text)] == [
        "afm/x.py:7: 'told'",
        "afm/x.py:9: 'anew'",
        "afm/x.py:11: 'told'",
    ]


@pytest.mark.skipif(importlib.util.find_spec("codespell_lib") is None, reason="codespell is not installed")
def test_a_misspelled_word_is_named_with_its_correction() -> None:
    assert found("docs/x.md", "It is teh tool.") == ["docs/x.md:1: 'teh' is misspelled, write: the"]
    assert found("docs/x.md", "TEMPALTE is a name.") == []
