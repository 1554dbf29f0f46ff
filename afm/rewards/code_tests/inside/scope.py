"""Whose the names are that tests use and do not define: the standard library's or the program's.

A helper that the tests forgot to define must not become the program's to write: it would be handed the expected
answer and asked whether it agrees.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from typing import Any

from afm.rewards.code_tests.inside.plain import ARRAYS

_MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys time typing"


_OF_CLASSES = ("isinstance", "issubclass", "assertRaises", "assertRaisesRegex", "raises", "suppress")


class Scope:
    """What the undefined names of the tests mean.

    Args:
        tests: The test program.
        entry: The function under test, if the row names it.
        prelude: A program whose names the tests may use without importing them.

    Attributes:
        own: Names of the program.
        defined: Global names of the tests.
        alone: Whether the tests call one of them only.
        unclear: What to say when they call several: nobody knows which one is under test, so none may be handed what
            another one returned.
        trouble: The same when that could happen at all, else ``""``.
    """

    def __init__(self, tests: str, entry: str | None, prelude: str) -> None:
        free, self.defined = _globals(tests)
        self._library: dict[str, Any] = {}
        self.own = {*re.findall(r"[A-Za-z_]\w*", entry), "Solution"} if entry else free
        if not entry or free - self.own:
            exec(prelude, self._library)
        if not entry:
            lent = free & set(self._library)
            # `assert gcd(8, 12) == 4` alone: nothing else could be under test.
            self.own = free - lent or (lent if len(lent) == 1 else set())
        tree = ast.parse(tests)
        kinds = _kinds(tree)
        called, apart = _use(tree, self.own, kinds)
        self.alone = bool(entry) or len(called) < 2
        self.unclear = (
            f"the tests use {' and '.join(map(repr, sorted(called)))}, and do not say which they test"
        )
        self.trouble = "" if self.alone or apart else self.unclear
        strange = (free - set(self._library)) | self.own
        if any(isinstance(node, ast.Name) and node.id in strange for node in kinds):
            self.trouble = "the tests use a class of the program in `except` or `isinstance`"

    def lent(self, name: str) -> Any:
        """What the standard library means by ``name``.

        Raises:
            KeyError: Nothing.
        """
        module = {"np": ARRAYS}.get(name, name)
        return __import__(module) if module in (*_MODULES.split(), ARRAYS) else self._library[name]


def _globals(tests: str) -> tuple[set[str], set[str]]:
    """Global names that the tests use and never assign, and those that they assign."""
    used: set[str] = set()
    assigned: set[str] = set()
    known = {*dir(builtins), *_MODULES.split(), ARRAYS, "np"}
    scopes = [symtable.symtable(tests, "tests", "exec")]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if scope.get_type() == "module" or symbol.is_global():
                defines = symbol.is_assigned() or symbol.is_imported()
                (assigned if defines else used).add(symbol.get_name())
    return {name for name in used - assigned - known if not name.startswith("__")}, assigned


def _kinds(tree: ast.Module) -> set[ast.AST]:
    """What the tests use as classes of errors and objects, in `except` and `isinstance`."""
    kinds: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds.update(ast.walk(node.type))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in _OF_CLASSES:
                first = 1 if name in ("isinstance", "issubclass") else 0
                kinds.update(
                    part
                    for argument in node.args[first : first + 1]
                    if not isinstance(argument, ast.Call)
                    for part in ast.walk(argument)
                )
    return kinds


def _use(tree: ast.Module, names: set[str], kinds: set[ast.AST]) -> tuple[set[str], bool]:
    """Those of ``names`` that the tests call, and whether they do so with literal arguments only.

    Args:
        kinds: What does not count.
    """
    literal: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            arguments = [part for argument in (*node.args, *node.keywords) for part in ast.walk(argument)]
            if not any(isinstance(part, ast.Name) for part in arguments):
                literal.add(node.func)
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    uses = [node for node in uses if node not in kinds]
    return {node.id for node in uses}, all(node in literal for node in uses)
