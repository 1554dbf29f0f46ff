"""The process of one case: run the program as a script, or call its functions."""

from __future__ import annotations

import atexit
import builtins
import json
import os
import sys
import types
from typing import Any

from afm.rewards.code_tests.inside.plain import NotPlainError, decode, encode
from afm.sandbox.inside.shutdown import Shutdown

NOTE_BYTES = 2000
PROGRAM = "program.py"
PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys, time
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
from operator import *
from builtins import *
"""


def described(error: BaseException) -> str:
    """Return ``ValueError: why (line 3)`` with the line of the program."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    text = _message(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{f' (line {line})' if line else ''}"


def _message(error: BaseException) -> str:
    try:
        return str(getattr(error, "msg", error))[:300]
    except BaseException:  # noqa: BLE001 - the program's own __str__
        return ""


def _raised(error: BaseException) -> dict[str, str]:
    text = error.args[0] if len(error.args) == 1 else None
    message = text[:300] if isinstance(text, str) else _message(error)
    known = next(
        kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind
    )
    return {"raised": type(error).__name__, "known": known, "message": message, "text": described(error)}


def serve(code: types.CodeType, session: Any, arguments: list[str], prelude: str) -> None:
    """Run the program as a script, or its functions as in ``session``, and end the process.

    Args:
        prelude: A program whose names the functions may use.
    """
    module = types.ModuleType("__main__" if session is None else "solution")
    module.__dict__["__file__"] = f"/tmp/{PROGRAM}"
    sys.modules[module.__name__] = module
    sys.argv = arguments
    atexit._clear()
    shutdown, status = Shutdown(), 0
    try:
        if session is not None:
            exec(prelude, module.__dict__)
            sys.setrecursionlimit(50_000)
        exec(code, module.__dict__)
        if session is not None:
            names = {**module.__dict__, "__code__": code}
            _answer(json.dumps(_session(names, session)))
    except SystemExit as end:
        status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            os.write(2, end.code.encode("utf-8", "replace")[:NOTE_BYTES])
    except BaseException as error:  # noqa: BLE001 - the border to the program
        status = 1
        os.write(2, b"\n" + described(error).encode("utf-8", "replace"))
    if session is None and not shutdown.finish(module.__dict__):
        status = 120
    os._exit(status)


def _answer(text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(3, data) :]


def _session(names: dict[str, Any], session: list[Any]) -> list[Any]:
    """Run steps ``[how, name, arguments, keywords, index]``. ``index`` is that of the earlier value that it belongs to."""
    values: list[Any] = []
    outcomes: list[Any] = []
    for how, name, arguments, keywords, index in session:
        positional = decode(arguments)
        try:
            target = _found(names, how, name, values[index] if index is not None else None)
            value = target if how == "get" else target(*positional, **decode(keywords))
        except BaseException as error:  # noqa: BLE001 - the program's error, reported to the tests
            values.append(None)
            outcomes.append(_raised(error))
            continue
        values.append(value)
        try:
            outcome = {"value": encode(value)}
        except NotPlainError as error:
            outcome = {"object": str(error)[:100]}
        except BaseException as error:  # noqa: BLE001 - nested too deeply, or an iterator that raises
            outcome = _raised(error)
        try:
            changed = encode(positional)
        except (NotPlainError, RecursionError):
            changed = arguments
        if changed != arguments:
            outcome["arguments"] = changed
        outcomes.append(outcome)
    return outcomes


def _found(names: dict[str, Any], how: str, name: str, owner: Any) -> Any:
    """Return the function of a step."""
    if how in ("method", "get"):
        return getattr(owner, name)
    if how == "entry" and "Solution" in names:
        return getattr(names["Solution"](), name)
    if name in names and name in names["__code__"].co_names:  # its own, not one of the prelude
        return names[name]
    raise NameError(f"name {name!r} is not defined")
