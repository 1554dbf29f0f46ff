"""Programs in tool calls: the fences of the code tool, calls of functions, and when two calls ask the same."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from afm.errors import BadArgumentError, DataError

CODE_TOOL = "code"
"""Name of the tool that runs programs."""
_PROGRAM = re.compile(r"py(?:thon)?[\d.]*")
_STDIN = ("sh", "bash", "shell")
_HOW_TO = "Write the program between a line ```py and a line ```."
_NAMED, _NAME_CHARS = 3, 20
_PYTHON_LINE_END = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
"""Of a program; ``str.splitlines`` ends lines at form feeds and separators too."""


@dataclass(frozen=True, slots=True)
class FencedProgram:
    """What the agent asked to run."""

    code: str
    stdin: str = ""


def parse_program(argument: str) -> FencedProgram:
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
        what = f"{len(programs)} programs" if programs else f"no program{_but(others)}"
        raise BadArgumentError(f"Nothing was run: found {what}, expected one. {_HOW_TO}")
    return FencedProgram(programs[0], inputs[0] if inputs else "")


def program_argument(text: str) -> str:
    """A program as the code tool reads it: in a fence, unless it is in one already.

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
    return fenced if _reads(fenced) == FencedProgram(f"{text.strip(chr(10))}\n") else text


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _reads(argument: str) -> FencedProgram | None:
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
    fences: list[tuple[str, str]] = []
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
        fences.append((language, content))
        position = end + 1
    return fences


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


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call in a program: positional and named arguments, all of them literals."""

    name: str
    values: tuple[Any, ...]
    named: dict[str, Any]

    def value(self, parameter: str | None) -> Any:
        """The value of a parameter: by its name, else the only argument that there is.

        Raises:
            DataError: That is not clear.
        """
        if parameter is not None and parameter in self.named:
            return self.named[parameter]
        everything = (*self.values, *self.named.values())
        if len(self.values) >= 1 and (parameter is not None or len(everything) == 1):
            return self.values[0]
        if len(everything) == 1 and parameter is None:
            return everything[0]
        raise DataError(f"{self.name}: {len(everything)} arguments, expected {parameter or 'one'}")


def calls_in(code: str, names: Collection[str]) -> tuple[FunctionCall, ...]:
    """The calls of functions with one of ``names``, in the order of the text.

    Raises:
        DataError: The code is no Python, or an argument is computed, so that its value is unknown.
    """
    nodes = (node for node in ast.walk(_parsed(code)) if isinstance(node, ast.Call) and _name(node) in names)
    return tuple(
        _function_call(node) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    )


def shows_only(code: str, name: str) -> bool:
    """Whether all that a program prints, or gives with its last line, is what its one call of ``name`` returned."""
    body = _parsed(code).body
    prints = [node for node in ast.walk(ast.Module(body, [])) if _name(node) == "print"]
    variables = {target.id for target in _targets(body, name)}
    if not prints:
        last = body[-1]
        return isinstance(last, ast.Expr) and _is_result(last.value, name, variables)
    only = prints[0]
    assert isinstance(only, ast.Call)
    return (
        len(prints) == 1
        and len(only.args) == 1
        and not only.keywords
        and _is_result(only.args[0], name, variables)
    )


def without_last_call(code: str, name: str) -> str | None:
    """A program that ends with ``name(value)``, with that value as its last line instead.

    Returns:
        Empty when the program does nothing else, that is when the value is a literal or a variable; ``None`` when the program
        does not end with its only call of it.

    Raises:
        DataError: The code is no Python.
    """
    body = _parsed(code).body
    called = [node for node in ast.walk(ast.Module(body, [])) if _name(node) == name]
    last = body[-1] if body else None
    if len(called) != 1 or not isinstance(last, ast.Expr) or last.value is not called[0]:
        return None
    call = last.value
    assert isinstance(call, ast.Call)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(arguments) != 1 or isinstance(arguments[0], ast.Starred):
        return None
    [argument] = arguments
    if len(body) == 1 and (isinstance(argument, ast.Name) or _is_literal(argument)):
        return ""
    value = ast.get_source_segment(code, argument) or ast.unparse(argument)
    return _until(code, last) + (f"({value})" if "\n" in value else value)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _until(code: str, node: ast.stmt) -> str:
    """The text before a statement; offsets of :mod:`ast` are bytes of UTF-8."""
    lines = _PYTHON_LINE_END.split(code)
    line = lines[node.lineno - 1].encode()
    return "".join(lines[: node.lineno - 1]) + line[: node.col_offset].decode()


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # the last when it is nested too deeply
        raise DataError(f"a program is no Python: {str(error) or 'nested too deeply'}") from None


def _targets(body: list[ast.stmt], name: str) -> Iterator[ast.Name]:
    for statement in body:
        if isinstance(statement, ast.Assign) and _name(statement.value) == name:
            yield from (target for target in statement.targets if isinstance(target, ast.Name))


def _is_result(node: ast.expr, name: str, variables: Collection[str]) -> bool:
    return _name(node) == name or (isinstance(node, ast.Name) and node.id in variables)


def _name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _function_call(node: ast.Call) -> FunctionCall:
    name = _name(node)
    try:
        values = tuple(ast.literal_eval(argument) for argument in node.args)
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError):
        raise DataError(f"an argument of {name} is computed by a program, so its value is unknown") from None
    return FunctionCall(name, values, named)


def is_program(tool: str, argument: str) -> bool:
    """Whether an argument is a program, in which indentation and case matter: of the tool ``code``, or in a fence."""
    return tool == CODE_TOOL or "```" in argument


def call_form(tool: str, argument: str) -> str:
    """The same text for calls of ``tool`` that ask the same."""
    return exact_form(argument) if is_program(tool, argument) else " ".join(argument.split()).casefold()


def exact_form(argument: str) -> str:
    """``argument`` without blanks at the end of its lines and without blank lines around it."""
    return "\n".join(line.rstrip() for line in argument.splitlines()).strip("\n")
