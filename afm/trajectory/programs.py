"""Tools that a program calls as functions, as smolagents' ``CodeAgent`` writes them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from afm.errors import DataError


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call in a program.

    Attributes:
        values: Positional arguments, then ``named`` ones; all of them literals.
    """

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
        DataError: The code is no Python, or an argument is computed, so that its value stands nowhere.
    """
    found = [node for node in ast.walk(_parsed(code)) if _name(node) in names]
    found.sort(key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]
    return tuple(_call(node) for node in found if isinstance(node, ast.Call))


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
        does not end with its only such call.

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
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(given) != 1 or isinstance(given[0], ast.Starred):
        return None
    if len(body) == 1 and (isinstance(given[0], ast.Name) or _is_literal(given[0])):
        return ""
    value = ast.get_source_segment(code, given[0]) or ast.unparse(given[0])
    return _until(code, last) + (f"({value})" if "\n" in value else value)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _until(code: str, node: ast.stmt) -> str:
    """The text before a statement; offsets of :mod:`ast` are bytes of UTF-8."""
    lines = code.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    return "".join(lines[: node.lineno - 1]) + line[: node.col_offset].decode()


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"a program is no Python: {error}") from None


def _targets(body: list[ast.stmt], name: str) -> Iterator[ast.Name]:
    for statement in body:
        if isinstance(statement, ast.Assign) and _name(statement.value) == name:
            yield from (target for target in statement.targets if isinstance(target, ast.Name))


def _is_result(node: ast.expr, name: str, variables: Collection[str]) -> bool:
    return _name(node) == name or (isinstance(node, ast.Name) and node.id in variables)


def _name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _call(node: ast.Call) -> FunctionCall:
    name = _name(node)
    try:
        values = tuple(ast.literal_eval(argument) for argument in node.args)
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError):
        raise DataError(f"an argument of {name} is computed by a program; its value stands nowhere") from None
    return FunctionCall(name, values, named)
