"""Run test programs without the program under test. Runs inside the sandbox; no code of the model runs here.

The functions under test are proxies, which look a call up in a table of the program's answers. A call that the table
lacks is listed for the next round. Until then a placeholder that agrees with everything replaces it, so one round
usually finds all calls.

Standard input holds ``{"tests", "entry", "known", "prelude"}``. ``known`` is a list of pairs of a session and its
outcomes (see ``candidate.py``). The answer is one JSON line: ``{"checks", "wanted", "trouble"}``.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import re
import signal
import symtable
import sys
from typing import Any

from afm.rewards.code_tests.inside.plain import ARRAYS
from afm.rewards.code_tests.inside.proxies import (
    FailedError,
    Function,
    Hole,
    NayHole,
    UnsupportedError,
    in_place,
)

_SILENT = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)
_ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MOST_WANTED = 20_000
_SEED = 20_250_813
_IN_PLACE, _NUMBER = "__in_place__", "__number__"
_PATIENCE = 10_000
_DOUBT_S = 5.0
_MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys time typing"
_OF_CLASSES = ("isinstance", "issubclass", "assertRaises", "assertRaisesRegex", "raises", "suppress")


def main() -> None:
    """Run the tests of standard input with the known answers."""
    with open(0, "rb", closefd=False) as stream:
        task = json.loads(stream.read())
    answer = os.dup(1)
    silence = os.open("/dev/null", os.O_WRONLY)
    os.dup2(silence, 1)
    outcome = _Round(task, Hole).run()
    if outcome["wanted"] and not task["known"] and not any((outcome["trouble"], *outcome["checks"])):
        outcome["trouble"] = _doubts(task)
    data = json.dumps(outcome).encode() + b"\n"
    while data:
        data = data[os.write(answer, data) :]


def _doubts(task: dict[str, Any]) -> str:
    """Return why tests that pass with placeholders cannot be trusted, ``""`` if they can."""

    def stop(*_: Any) -> None:
        raise TimeoutError("the tests wait for an answer")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _DOUBT_S, 0.1)
    checks = _Round(task, NayHole).run()["checks"]
    signal.setitimer(signal.ITIMER_REAL, 0)
    return "" if any(checks) else "no wrong answer can fail them"


class _Names(dict):  # type: ignore[type-arg]
    """The global names of the tests, including those that they do not define."""

    table: _Round

    def __missing__(self, name: str) -> Any:
        if name in self.table.scope.own:
            return Function(self.table, name)
        if name in builtins.__dict__ or name.startswith("__"):
            raise KeyError(name)
        if name in self.table.scope.defined:  # by a statement that has failed
            raise KeyError(name)
        try:
            return self.table.scope.lent(name)
        except KeyError:
            raise self.table.refused(
                f"the tests do not define {name!r}, and it is not what they test"
            ) from None


class _Marks(ast.NodeTransformer):
    """Marks the calls whose value is unused, and the numbers that are compared."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        """Mark a call that is a whole statement."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value.func = _marked(_IN_PLACE, node.value.func)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Mark the operands that are compared with a number, because NaN is neither more nor less."""
        self.generic_visit(node)
        if any(isinstance(how, _ORDERING) for how in node.ops):
            node.left = _marked(_NUMBER, node.left)
            node.comparators = [_marked(_NUMBER, value) for value in node.comparators]
        return node


def _marked(mark: str, value: ast.expr) -> ast.expr:
    if isinstance(value, ast.Constant):
        return value
    return ast.Call(ast.Name(mark, ast.Load()), [value], [])


class _Round:
    """One run of the tests with the answers known so far.

    Args:
        task: The JSON object of standard input.
        hole: Placeholder for an unknown answer.
    """

    scope: Scope

    def __init__(self, task: dict[str, Any], hole: type[Hole]) -> None:
        self._tests, self._entry, self._prelude = task["tests"], task["entry"], task["prelude"]
        self.hole = hole
        self._known: dict[str, Any] = {}
        for session, outcomes in task["known"]:
            for end, outcome in enumerate(outcomes, 1):
                key = json.dumps(session[:end])
                if "failed" in self._known.get(key, {"failed": ""}):
                    self._known[key] = outcome if "failed" not in outcome else self._known.get(key, outcome)
        self.patience = _PATIENCE
        self.words: dict[str, set[bool]] = {}
        self.nan = "nan" in self._tests.lower()
        self._wanted: dict[str, list[Any]] = {}
        self._trouble = ""
        self._asked = False
        self._lost = ""

    def run(self) -> dict[str, Any]:
        """Return the checks of the tests, the calls that they still need, and why they cannot judge."""
        try:
            body = ast.parse(self._tests).body
            self.scope = Scope(self._tests, self._entry, self._prelude)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return {"checks": [], "wanted": [], "trouble": f"the tests are not valid Python: {error}"}
        if self.scope.trouble:
            return {"checks": [], "wanted": [], "trouble": self.scope.trouble}
        random.seed(_SEED)
        if ARRAYS in self._tests or "np." in self._tests:
            self._seed_arrays()
        names = _Names(
            {"__name__": "__main__", "__builtins__": builtins, _IN_PLACE: in_place, _NUMBER: self._number}
        )
        names.table = self
        if self._entry and self._entry.isidentifier():
            names["candidate"] = names[self._entry] = Function(self, self._entry)
        checks = self._checks(body, names)
        for name, answers in self.words.items():
            if len(answers) == 1 and checks and not self._wanted:
                checks[-1] = (
                    checks[-1] or f"only {name!r}, a method of the program's own return value, finds it right"
                )
        if not self._asked and not self._trouble:
            self._trouble = "the tests never call the program"
        prefixes = {
            json.dumps(session[:end]) for session in self._wanted.values() for end in range(1, len(session))
        }
        wanted = [session for key, session in self._wanted.items() if key not in prefixes]
        return {"checks": checks, "wanted": wanted, "trouble": self._trouble}

    def _seed_arrays(self) -> None:
        try:
            __import__(ARRAYS).random.seed(_SEED)
        except ImportError:
            return

    def _checks(self, body: list[ast.stmt], names: _Names) -> list[str]:
        """Return the fault of each check, ``""`` if it passes. Checks are the statements that can fail a program."""
        checks: list[str] = []
        broken = ""
        for statement in body:
            fault = broken or self._fault(statement, names)
            if isinstance(statement, _SILENT):
                broken = fault
                for name in _assigned(statement) if fault else ():
                    names.pop(name, None)  # a leftover of an earlier check must not pass this one
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                checks.append(fault)
                broken = ""
            if self._trouble:
                break
        if broken:
            checks.append(broken)
        return checks

    def _fault(self, statement: ast.stmt, names: _Names) -> str:
        text, self._lost = ast.unparse(statement)[:200], ""
        module = ast.fix_missing_locations(ast.Module([_Marks().visit(statement)], []))
        try:
            exec(compile(module, "tests", "exec", dont_inherit=True), names)
        except BaseException as error:  # noqa: BLE001 - a failed check
            fault = f"{type(error).__name__}: {error}"[:500]
        else:
            fault = self._lost  # the tests may have caught it
        return self._trouble or (f"{fault} in `{text}`" if fault else "")

    def refused(self, reason: str) -> UnsupportedError:
        """Return the error that ends the tests. Even if they catch it, they cannot judge."""
        self._trouble = self._trouble or reason
        return UnsupportedError(reason)

    def lost(self, reason: str) -> FailedError:
        """Return the error of a call that crashed or was stopped. Even if the tests catch it, they have failed."""
        self._lost = f"FailedError: {reason}"[:500]
        return FailedError(reason)

    def _number(self, value: Any) -> Any:
        if not self.nan and isinstance(value, float) and value != value:
            raise self.lost("not a number (NaN)")
        return value

    def ask_object(self) -> None:
        """Raise an error that ends the tests if they must not use an object of the program."""
        if not self.scope.alone:
            raise self.ended(self.scope.unclear)

    def ended(self, reason: str) -> BaseException:
        """Return one of the two errors above. A problem that appears only with answers is the program's fault."""
        return self.lost(reason) if self._known else self.refused(reason)

    def outcome(self, session: list[Any]) -> Any:
        """Return the program's answer to the last step of ``session``, or ``None`` if not asked yet."""
        self._asked = True
        key = json.dumps(session)
        if key in self._known:
            return self._known[key]
        if len(self._wanted) >= _MOST_WANTED:
            raise self.ended(f"the tests make more than {_MOST_WANTED} calls")
        self._wanted[key] = session
        self.patience = _PATIENCE
        return None


def _assigned(statement: ast.stmt) -> list[str]:
    targets = (
        statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    )
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


class Scope:
    """The owners of names that the tests use without defining them: the standard library or the program.

    The program must not supply a helper that the tests forgot to define. It would receive the expected answer and decide
    whether it agrees.

    Args:
        tests: The test program.
        entry: The function under test, if the row names it.
        prelude: A program whose names the tests may use without importing them.

    Attributes:
        own: Names of the program.
        defined: Global names of the tests.
        alone: Whether the tests call only one of the program's names.
        unclear: The message if they call several. It is then unknown which one is under test, so none may receive what
            another one returned.
        trouble: The same message if that could happen, else ``""``.
    """

    def __init__(self, tests: str, entry: str | None, prelude: str) -> None:
        free, self.defined = _globals(tests)
        self._library: dict[str, Any] = {}
        self.own = {*re.findall(r"[A-Za-z_]\w*", entry), "Solution"} if entry else free
        if not entry or free - self.own:
            exec(prelude, self._library)
        if not entry:
            lent = free & set(self._library)
            # Only `assert gcd(8, 12) == 4`: nothing else could be under test.
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
        """Return the standard library's object of that name.

        Raises:
            KeyError: There is no such object.
        """
        module = {"np": ARRAYS}.get(name, name)
        return __import__(module) if module in (*_MODULES.split(), ARRAYS) else self._library[name]


def _globals(tests: str) -> tuple[set[str], set[str]]:
    """Return the global names that the tests use and never assign, and those that they assign."""
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
    """Return the expressions that the tests use as classes, in `except` and `isinstance`."""
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
    """Return those of ``names`` that the tests call, and whether all their arguments are literals.

    Args:
        kinds: Expressions that do not count.
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


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
