"""The argument of the code tool: a program in a ``py`` fence, perhaps with an ``sh`` fence for its input.

The layout is that of the published Chain-of-Agents system.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from afm.errors import BadArgumentError

CODE_TOOL = "code"
"""Name of the tool that runs programs."""
_PROGRAM = re.compile(r"py(?:thon)?[\d.]*")
_STDIN = ("sh", "bash", "shell")
_HOW_TO = "Write the program between a line ```py and a line ```."
_NAMED, _NAME_CHARS = 3, 20


@dataclass(frozen=True, slots=True)
class Program:
    """What the agent asked to run."""

    code: str
    stdin: str = ""


def parse_program(argument: str) -> Program:
    """The program and its input in a tool argument.

    Raises:
        BadArgumentError: No program fence, two of them, or one that is never closed.
    """
    programs: list[str] = []
    inputs: list[str] = []
    others: list[str] = []
    for language, text in _fences(argument):
        if _PROGRAM.fullmatch(language):
            programs.append(text)
        elif language in _STDIN:
            inputs.append(text)
        else:
            others.append(repr(language[:_NAME_CHARS]) if language else "no language")
    if len(programs) != 1:
        found = f"{len(programs)} programs" if programs else f"no program{_but(others)}"
        raise BadArgumentError(f"Nothing was run: found {found}, expected one. {_HOW_TO}")
    return Program(programs[0], inputs[0] if inputs else "")


def program_argument(text: str) -> str:
    """A program as the code tool reads it: in a fence, unless it stands in one already.

    Text that a fence cannot hold, because a line of it would close the fence, stays as it is.

    Raises:
        BadArgumentError: That text is a program in which the tool would find another one, fenced in a string of it.
    """
    fenced = f"\n```py\n{text.strip(chr(10))}\n```\n"
    if not text.strip():
        return text
    if _reads(text) is not None:
        if _is_python(text):
            raise BadArgumentError(
                "a program holds a fenced program in one of its strings, and the code tool would run that one; leave the row out"
            )
        return text
    return fenced if _reads(fenced) == Program(f"{text.strip(chr(10))}\n") else text


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _reads(argument: str) -> Program | None:
    try:
        return parse_program(argument)
    except BadArgumentError:
        return None


def _but(languages: list[str]) -> str:
    if not languages:
        return ""
    blocks = "a block" if len(languages) == 1 else "blocks"
    return f" but {blocks} of {' and '.join(languages[:_NAMED])}"


def _fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    found: list[tuple[str, str]] = []
    lines = text.splitlines(keepends=True)
    position = 0
    while position < len(lines):
        language = _opening(lines[position])
        position += 1
        if language is None:
            continue
        end, content = _fence_end(lines, position)
        if end is None:
            raise BadArgumentError(f"Nothing was run: the ``` block is never closed. {_HOW_TO}")
        found.append((language, content))
        position = end + 1
    return found


def _opening(line: str) -> str | None:
    """The language of the block that the line opens, if it does; words behind it say nothing."""
    if not (text := line.strip()).startswith("```") or "`" in (words := text.removeprefix("```")):
        return None
    return next(iter(words.lower().split()), "")


def _fence_end(lines: list[str], start: int) -> tuple[int | None, str]:
    """Line that closes the block, and the content before it; a closing at a line's end counts too."""
    for number in range(start, len(lines)):
        if lines[number].strip() == "```":
            return number, "".join(lines[start:number])
    for number in range(start, len(lines)):
        if lines[number].rstrip().endswith("```"):
            last = lines[number].rstrip().removesuffix("```")
            return number, "".join([*lines[start:number], last])
    return None, ""
