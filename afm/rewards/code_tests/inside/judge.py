"""Runs test programs without the program they test. Runs inside the sandbox; no code of the model ever does here.

The functions under test are stand-ins: a call is looked up in the table of what the program answered elsewhere. A call
that the table lacks is written down for the next round; meanwhile a placeholder that agrees with everything takes
its place, so that one round usually finds all calls.

Standard input holds ``{"tests", "entry", "known"}``, ``known`` being pairs of a session and its outcomes (see
``candidate.py``). The answer is one JSON line: ``{"checks", "wanted", "trouble"}``.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import sys
from typing import Any

from afm.rewards.code_tests.inside.plain import ARRAYS
from afm.rewards.code_tests.inside.stand_ins import Function, UnsupportedError

_MODULES = {
    "bisect",
    "collections",
    "copy",
    "datetime",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
}
_MODULES |= {"random", "re", "string", "sys", "time", "typing", ARRAYS}
_SILENT = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)
_CLASS_WANTED = ("catching classes that do not inherit", "isinstance() arg 2 must be", "issubclass() arg")
_MOST_WANTED = 20_000
_SEED = 20_250_813


def main() -> None:
    """Run the tests of standard input once."""
    with open(0, "rb", closefd=False) as stream:
        task = json.loads(stream.read())
    answer = os.dup(1)
    silence = os.open("/dev/null", os.O_WRONLY)
    os.dup2(silence, 1)
    data = json.dumps(_Round(task).run()).encode() + b"\n"
    while data:
        data = data[os.write(answer, data) :]


class _Names(dict):  # type: ignore[type-arg]
    """The global names of the tests; a name that they do not define belongs to the program."""

    table: _Round

    def __missing__(self, name: str) -> Any:
        if name in builtins.__dict__:
            raise KeyError(name)
        module = {"np": ARRAYS}.get(name, name)
        if module in _MODULES:
            return __import__(module)
        return Function(self.table, name)


class _Round:
    """One run of the tests with what is known so far."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._tests, self._entry = task["tests"], task["entry"]
        self._known: dict[str, Any] = {}
        for session, outcomes in task["known"]:
            for end, outcome in enumerate(outcomes, 1):
                key = json.dumps(session[:end])
                if "failed" in self._known.get(key, {"failed": ""}):
                    self._known[key] = outcome if "failed" not in outcome else self._known.get(key, outcome)
        self._wanted: dict[str, list[Any]] = {}
        self._trouble = ""
        self._asked = False

    def run(self) -> dict[str, Any]:
        try:
            body = ast.parse(self._tests).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return {"checks": [], "wanted": [], "trouble": f"the tests are no Python: {error}"}
        random.seed(_SEED)
        if ARRAYS in self._tests or "np." in self._tests:
            self._seed_arrays()
        names = _Names(__name__="__main__", __builtins__=builtins)
        names.table = self
        if self._entry:
            names["candidate"] = names[self._entry] = Function(self, self._entry)
        checks = self._checks(body, names)
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
        """The fault of each check, ``""`` for those that pass: statements that can fail a program."""
        checks: list[str] = []
        broken = ""
        for statement in body:
            fault = broken or self._fault(statement, names)
            if isinstance(statement, _SILENT):
                broken = fault
                for name in _assigned(statement) if fault else ():
                    names.pop(name, None)  # what an earlier check left there must not pass this one
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                checks.append(fault)
                broken = ""
            if self._trouble:
                break
        if broken:
            checks.append(broken)
        return checks

    def _fault(self, statement: ast.stmt, names: _Names) -> str:
        module = ast.Module([statement], [])
        try:
            exec(compile(module, "tests", "exec", dont_inherit=True), names)
        except UnsupportedError as error:
            self._trouble = str(error)
            return str(error)
        except BaseException as error:  # noqa: BLE001 - a failed check
            if isinstance(error, TypeError) and any(words in str(error) for words in _CLASS_WANTED):
                self._trouble = "the tests use a class of the program in `except` or `isinstance`"
            return f"{type(error).__name__}: {error}"[:500] + f" in `{ast.unparse(statement)[:200]}`"
        return ""

    def outcome(self, session: list[Any]) -> Any:
        """What the program answered to the last step of ``session``; ``None`` when it was not asked yet."""
        self._asked = True
        key = json.dumps(session)
        if key in self._known:
            return self._known[key]
        if len(self._wanted) >= _MOST_WANTED:
            raise UnsupportedError(f"the tests make more than {_MOST_WANTED} calls")
        self._wanted[key] = session
        return None


def _assigned(statement: ast.stmt) -> list[str]:
    targets = (
        statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    )
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
