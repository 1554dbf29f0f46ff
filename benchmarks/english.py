"""Check spelling and style of texts: Markdown, docstrings, help texts and error messages.

Usage: python benchmarks/english.py [FILE ...]

Without files, counts the findings in the whole project, compares them with the walls in ``benchmarks/english.yaml``, and
exits with 1 if a wall is exceeded. With files or folders, prints each finding as ``file:line: what, suggestion``. The YAML
has the words to avoid, the limits and the walls. codespell, if installed, checks the spelling.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "benchmarks/english.yaml"
PACKAGES = ("afm", "llamafactory_patch", "verl_ext", "tool_servers")
_OPTIONS = ("Option", "Argument", "Typer", "command", "callback")
_SECTIONS = re.compile(
    r"^(Args|Arguments|Attributes|Raises|Returns|Yields|Usage|Note|Notes|Example|Examples|Source|Symptom|Cause|Upstream):\s*"
)
_ENTRY = re.compile(r"^(?:\*{0,2}[\w.]+(?: \([^)]*\))?|``[^`]+``|`[^`]+`|\*\*[^*]+\*\*):\s+")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z`*\[(\"0-9])")


@dataclass(frozen=True)
class Finding:
    """One finding. ``line`` counts from 1."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Block:
    """Lines that belong together: a paragraph, a list item, a table row, or a paragraph of a docstring.

    ``measured`` is whether the length of its lines is limited.
    """

    line: int
    lines: tuple[str, ...]
    measured: bool = True


@cache
def rules() -> dict[str, Any]:
    """Return the content of ``english.yaml`` with its words compiled."""
    loaded: dict[str, Any] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    loaded["words"] = [
        (re.compile(rf"(?<![\w-])(?:{p})(?![\w-])", re.IGNORECASE), s) for p, s in loaded["words"].items()
    ]
    return loaded


def texts() -> list[str]:
    """Return the paths of the files to check, relative to the project: those that git tracks, without what a user adds."""
    listing = subprocess.run(
        ["git", "ls-files", "*.md", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sorted(set(listing.stdout.splitlines()))
    return [path for path in paths if _is_read(path) and (ROOT / path).is_file()]


def _is_read(path: str) -> bool:
    generated = path in ("docs/reference/commands.md", "docs/reference/configs.md")
    return (path.endswith(".md") and not path.startswith("tests/") and not generated) or path.startswith(
        PACKAGES
    )


def check(path: str, text: str) -> list[Finding]:
    """Return all findings in a file, by line.

    Raises:
        SyntaxError: A ``.py`` file is not Python.
    """
    blocks = list(markdown_blocks(text)) if path.endswith(".md") else python_blocks(text)
    findings = [Finding(path, line, what) for block in blocks for line, what in _of_block(block)]
    # Spelling covers all of Markdown, including code, but only the texts of Python.
    spelled = [Block(1, tuple(text.splitlines()))] if path.endswith(".md") else blocks
    findings += [
        Finding(path, block.line + offset, what)
        for block in spelled
        for offset, line in enumerate(block.lines)
        for what in misspelled(line)
    ]
    return sorted(set(findings), key=lambda finding: finding.line)


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield paragraphs, list items, headings and table rows, without code and tables generated from docstrings."""
    lines = text.splitlines()
    block: list[str] = []
    fenced = generated = False
    for number, line in enumerate([*lines, ""], start=1):
        fence = line.lstrip().startswith("```")
        generated = generated or line.startswith("<!-- keys:")
        apart = (
            not line.strip()
            or fence
            or fenced
            or generated
            or line.startswith(("#", "|", "<"))
            or _ITEM.match(line)
        )
        if apart and block:
            yield Block(number - len(block), tuple(block))
            block = []
        fenced = fenced != fence
        if fence or fenced or generated:
            generated = generated and not line.startswith("<!-- end of keys")
        elif line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                yield Block(number, (cell,), measured=False)
        elif line.startswith("#"):
            yield Block(number, (line.lstrip("# "),), measured=False)
        elif line.strip() and not line.startswith("<"):
            block.append(_ITEM.sub("", line, count=1))


def python_blocks(text: str) -> list[Block]:
    """Return docstrings (also of fields), messages of raised errors, and help texts."""
    tree = ast.parse(text)
    blocks: list[Block] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            blocks += _docstring_blocks(node.value.value, node.lineno)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            blocks += [Block(node.lineno, (said,), measured=False) for said in _messages(node.exc)]
        elif isinstance(node, ast.Call) and _called(node) in _OPTIONS:
            said = [keyword.value for keyword in node.keywords if keyword.arg in ("help", "epilog")]
            blocks += [Block(value.lineno, (_literal(value),), measured=False) for value in said]
    return blocks


def _docstring_blocks(text: str, first: int) -> Iterator[Block]:
    block: list[str] = []
    fenced = False
    literal: int | None = None  # indent of a paragraph that ends in "::"; deeper lines are not prose
    for number, raw in enumerate([*text.splitlines(), ""], start=first):
        line = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if literal is not None and line and indent <= literal:
            literal = None
        if literal is not None and line:
            continue
        if line.endswith("::"):
            literal = indent
        fenced = fenced != line.startswith("```")
        new = not line or bool(_ITEM.match(raw)) or bool(_ENTRY.match(line)) or bool(_SECTIONS.match(line))
        if (new or fenced) and block:
            yield Block(number - len(block), tuple(block))
            block = []
        if line and not fenced and not line.startswith(("```", ">>>", "|")):
            block.append(_ENTRY.sub("", _SECTIONS.sub("", _ITEM.sub("", line))))


def _messages(call: ast.Call) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if text := _literal(argument):
            yield text


def _literal(node: ast.AST) -> str:
    """Return the text of a literal with ``X`` for inserted values; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return ""


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _of_block(block: Block) -> Iterator[tuple[int, str]]:
    limits = rules()
    plain = [_plain(line) for line in block.lines]
    for offset, line in enumerate(block.lines):
        length = len(_without_targets(line))
        if block.measured and length > int(str(limits["longest_line"])) and " " in line.strip():
            yield block.line + offset, f"line of {length} characters, break it at {limits['longest_line']}"
        for pattern, instead in limits["words"]:
            for match in pattern.finditer(plain[offset]):
                yield block.line + offset, f"{match[0]!r}, write: {instead}"
    start = 0
    joined = " ".join(plain)
    ends = [*(match.end() for match in _SENTENCE_END.finditer(joined)), len(joined)]
    for end in ends:
        sentence, position = joined[start:end], start
        start = end
        at = block.line + _line_of(plain, position)
        yield from ((at, what) for what in _of_sentence(sentence))


def _line_of(lines: list[str], position: int) -> int:
    """Return the index of the line with the character at ``position`` of the joined lines."""
    for index, line in enumerate(lines):
        position -= len(line) + 1
        if position < 0:
            return index
    return max(len(lines) - 1, 0)


def _of_sentence(sentence: str) -> Iterator[str]:
    limits = rules()
    words = len(re.findall(r"\S*\w\S*", sentence))
    if words > int(str(limits["longest_sentence"])):
        yield f"sentence of {words} words, make it two"
    for sign, name in ((";", "semicolons"), (":", "colons")):
        count = len(re.findall(rf"{sign}(?=\s|$)", sentence))
        if count > int(str(limits[name])):
            yield f"{count} {name} in a sentence, use full stops"


def _without_targets(line: str) -> str:
    return re.sub(r"https?://\S+", "URL", re.sub(r"\]\([^)]*\)", "]", line))


def _plain(line: str) -> str:
    """Return a line without code, addresses and emphasis marks."""
    line = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`", "CODE", line)
    return _without_targets(line).replace("**", "")


def misspelled(line: str) -> Iterator[str]:
    """Yield the words that codespell reports; nothing if codespell is not installed."""
    dictionary = _dictionary()
    for word in re.findall(r"[A-Za-z][A-Za-z']+", _without_targets(line)) if dictionary else ():
        if (better := dictionary.get(word.lower())) is not None:
            yield f"{word!r} is misspelled, write: {better}"


@cache
def _dictionary() -> dict[str, str]:
    try:
        import codespell_lib
    except ImportError:
        return {}
    file = Path(str(codespell_lib.__file__)).parent / "data/dictionary.txt"
    rows = (line.split("->", 1) for line in file.read_text(encoding="utf-8").splitlines() if "->" in line)
    ignored = set(rules()["spelling"])
    return {wrong: right.strip(", ") for wrong, right in rows if wrong not in ignored}


def wall_of(path: str, walls: dict[str, int]) -> str:
    """Return the entry of ``walls`` for a file: the longest path that contains it, or else ``.``."""
    fitting = [wall for wall in walls if path == wall or path.startswith(f"{wall}/")]
    return max(fitting, key=len, default=".")


def main(names: list[str]) -> int:
    """Print the findings of the named files and folders, or compare the whole project with the walls."""
    if names:
        wanted = [Path(name).resolve() for name in names]
        paths = [path for path in texts() if any((ROOT / path).is_relative_to(place) for place in wanted)]
        findings = [
            finding for path in paths for finding in check(path, (ROOT / path).read_text(encoding="utf-8"))
        ]
        print("".join(f"{finding}\n" for finding in findings), end="")
        return int(bool(findings))
    exceeded = [f"{wall}: {count} findings, {most} allowed" for wall, count, most in counts() if count > most]
    if exceeded:
        print("\n".join(exceeded), "`python benchmarks/english.py PATH` lists them.", sep="\n")
    if not _dictionary():
        print("codespell is not installed, spelling was not checked: pip install codespell==2.4.3")
    return int(bool(exceeded))


def counts() -> list[tuple[str, int, int]]:
    """Return each wall with the number of findings and the number allowed."""
    walls: dict[str, int] = rules()["walls"]
    counter = Counter(
        wall_of(path, walls)
        for path in texts()
        for _ in check(path, (ROOT / path).read_text(encoding="utf-8"))
    )
    return [(wall, counter[wall], most) for wall, most in walls.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
