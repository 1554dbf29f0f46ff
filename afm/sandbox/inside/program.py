"""Runs the user's program in a process forked from the zygote, as ``python main.py`` would."""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import gc
import os
import resource
import signal
import sys
import types
from typing import Any

from afm.sandbox.inside.ending import Ending
from afm.sandbox.inside.harden import Refusal


def become_program(path: str, limits: dict[str, tuple[int, int]], imports: list[str], own: set[str]) -> None:
    """Set the limits and make the interpreter look as if it had just been started with ``path``.

    Args:
        path: File of the program.
        limits: Soft and hard value by name, without ``RLIMIT_``.
        imports: Import paths beside the standard library.
        own: Names of the zygote's own modules, which the program shall not import.
    """
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name, pair in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), pair)
    sys.stdin = sys.__stdin__ = _stream(0, "r", "<stdin>", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "<stdout>", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "<stderr>", "backslashreplace")  # type: ignore[misc]
    for word in ("exit", "quit"):
        setattr(builtins, word, _sitebuiltins.Quitter(word, "Ctrl-D"))
    builtins.help = _sitebuiltins._Helper()
    sys.path[0] = path.rpartition("/")[0]
    sys.path += imports
    sys.argv = [path]
    os.environ["PWD"] = sys.path[0]
    for name in own:
        sys.modules.pop(name, None)
    if "numpy.random" in sys.modules:  # the standard library's generator reseeds itself after a fork
        sys.modules["numpy"].random.seed()
    gc.enable()


def execute(path: str, refusal: Refusal) -> None:
    """Run the program as ``__main__`` and end the process as Python would. Never returns."""
    leave, anything, ending, note = (
        os._exit,
        BaseException,
        Ending(),
        refusal.note,
    )  # the program may overwrite whatever has a name
    module = types.ModuleType("__main__")
    scope = module.__dict__
    scope.update(__builtins__=builtins, __file__=path, __cached__=None)
    sys.modules["__main__"] = module
    status = 0
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
            source = file.read()
        exec(compile(source, path.rpartition("/")[2], "exec", dont_inherit=True), scope)
    except anything as error:
        trace = error.__traceback__
        note(error)
        status = _status_of(error.with_traceback(trace and trace.tb_next))
        del error, trace
    try:
        status = status if ending.finish(scope) else 120
    finally:
        leave(status & 0xFF)


def _stream(fd: int, mode: str, name: str, errors: str) -> Any:
    """A standard stream; what is written shows line by line, so that a stopped program keeps what it printed."""
    text: Any = open(  # noqa: SIM115 - the standard streams stay open
        fd, mode, encoding="utf-8", errors=errors, closefd=False, buffering=1 if mode == "w" else -1
    )
    text.buffer.raw.name = name
    text.mode = mode
    return text


def _status_of(error: BaseException, exiting: type = SystemExit, whole: type = int) -> int:
    """What Python does with an exception that nobody caught."""
    if type(error) is not exiting and exiting not in type(error).__mro__:
        _show(error)
        return 1
    code: Any = error.code  # type: ignore[attr-defined]
    if code is None:
        return 0
    if whole in type(code).__mro__:
        return whole(code)  # type: ignore[no-any-return]
    with contextlib.suppress(BaseException):
        print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # noqa: BLE001 - a hook of the program's own
        with contextlib.suppress(BaseException):
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(second), second, second.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(error), error, error.__traceback__)
