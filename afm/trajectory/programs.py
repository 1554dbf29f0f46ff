"""Programs in tool calls: the fences of the code tool, function calls, and equality of calls."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from afm.errors import BadArgumentError, DataError

CODE_TOOL = "code"
"""The name of the tool that runs programs."""
_PROGRAM = re.compile(r"py(?:thon)?[\d.]*")
_STDIN = ("sh", "bash", "shell")
_HOW_TO = "Write the program between a line ```py and a line ```."
_NAMED, _NAME_CHARS = 3, 20
_PYTHON_LINE_END = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
"""Line ends of Python. ``str.splitlines`` would also end lines at form feeds and separators."""


@dataclass(frozen=True, slots=True)
class FencedProgram:
    """A program that the agent wants to run, and its input."""

    code: str
    stdin: str = ""


def parse_program(argument: str) -> FencedProgram:
    """Return the program and its input in a tool argument.

    Raises:
        BadArgumentError: There is no program fence, there are several, or one is never closed.
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
    """Return a program in the fence that the code tool reads, which may already be there.

    Text with a line that would close the fence stays unchanged.

    Raises:
        BadArgumentError: The text is a program with another fenced program in a string, which the tool would run.
    """
    fenced = f"\n```py\n{text.strip(chr(10))}\n```\n"
    if not text.strip():
        return text
    if _reads(text) is not None:
        if _is_python(text):
            raise BadArgumentError(
                "a program holds a fenced program in a string, and the code tool would run that one; remove the row"
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
    """Return (language, content) of each fenced block."""
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
    """Return the language of the block that a line opens, if any. Further words are ignored."""
    if not (text := line.strip()).startswith("```") or "`" in (words := text.removeprefix("```")):
        return None
    return next(iter(words.lower().split()), "")


def _fence_end(lines: list[str], start: int) -> tuple[int | None, str]:
    """Return the line that closes the block and the content before it. The fence may be at the end of a line."""
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
    """One call in a program, with literal positional and named arguments."""

    name: str
    values: tuple[Any, ...]
    named: dict[str, Any]

    def value(self, parameter: str | None) -> Any:
        """Return the value of a parameter by its name, or else the only argument.

        Raises:
            DataError: The value is ambiguous.
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
    """Return the calls of functions with one of ``names`` in the order of the text.

    Raises:
        DataError: The code is not valid Python, or an argument is computed, so that its value is unknown.
    """
    nodes = (node for node in ast.walk(_parsed(code)) if isinstance(node, ast.Call) and _name(node) in names)
    return tuple(
        _function_call(node) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    )


def unknown_functions(programs: Iterable[str]) -> set[str]:
    """Return the functions that programs of one run call and none of them defines or imports. Invalid ones are skipped."""
    known, called = set(dir(builtins)), set()
    for program in programs:
        try:
            nodes = list(ast.walk(_parsed(program)))
        except DataError:
            continue
        for node in nodes:
            match node:
                case ast.alias(name="*"):
                    return set()
                case ast.alias(name=name, asname=other):
                    known.add(other or name.partition(".")[0])
                case (
                    ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name))
                ):
                    known.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    known.add(name)
        called |= {name for name in map(_name, nodes) if name}
    return called - known


def shows_only(code: str, name: str) -> bool:
    """Return whether the only output of a program, or the value of its last line, is the result of calling ``name``."""
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
    """Replace ``name(value)`` at the end of a program by the value.

    Returns:
        The program, empty if it does nothing else because the value is a literal or a variable. ``None`` if the program
        does not end with its only call of ``name``.

    Raises:
        DataError: The code is not valid Python.
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
    """Return the text before a statement. The offsets of :mod:`ast` are bytes of UTF-8."""
    lines = _PYTHON_LINE_END.split(code)
    line = lines[node.lineno - 1].encode()
    return "".join(lines[: node.lineno - 1]) + line[: node.col_offset].decode()


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise DataError(f"a program is not valid Python: {str(error) or 'nested too deeply'}") from None


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
    """Return whether an argument is a program, in which indentation and case matter: of ``code``, or in a fence."""
    return tool == CODE_TOOL or "```" in argument


def call_form(tool: str, argument: str) -> str:
    """Return a text that is equal for calls of ``tool`` with the same meaning."""
    return exact_form(argument) if is_program(tool, argument) else " ".join(argument.split()).casefold()


def exact_form(argument: str) -> str:
    """Return ``argument`` without blanks at the end of its lines and without blank lines around it."""
    return "\n".join(line.rstrip() for line in argument.splitlines()).strip("\n")
