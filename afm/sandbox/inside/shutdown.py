"""The end of a Python program in a process that leaves with ``os._exit``: it prints what Python would still print.

Everything that forks programs inside the sandbox uses it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import Any

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


class Shutdown:
    """Ends the program that is about to start in this process. Create it before the program and use it afterwards."""

    def __init__(self) -> None:
        gc.freeze()  # the objects that exist now do not belong to the program
        self._streams = (sys.stdout, sys.stderr)
        self._outputs: set[tuple[int, int]] = {_identity(fd) for fd in (1, 2)}

    def finish(self, scope: dict[str, Any]) -> bool:
        """End like Python: wait for threads, call ``atexit``, flush, run destructors, flush again.

        Args:
            scope: Global names of the program, which are cleared.

        Returns:
            Whether the standard output could be flushed.
        """
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        flushed = _flushed()
        writers: list[Any] = []
        with contextlib.suppress(BaseException):
            writers = self._writers()
        for writer in writers:  # otherwise the collector may close the file below a buffer first
            with contextlib.suppress(BaseException):
                writer.flush()
        sys.modules.pop("__main__", None)
        for name in [*(n for n in scope if n[0:1] == "_" and n[1:2] != "_"), *scope]:
            if name != "__builtins__":
                scope[name] = None
        with contextlib.suppress(BaseException):
            gc.collect()
        flushed = _flushed() and flushed
        for writer in (*writers, *self._streams):  # again, after the destructors
            with contextlib.suppress(BaseException):
                next(kind for kind in _WRITERS if issubclass(type(writer), kind)).flush(writer)
        return flushed

    def _writers(self) -> list[Any]:
        """Return the live writers to standard output or error that the program made."""
        things = gc.get_objects()
        kinds = {id(kind): kind for kind in map(type, things)}  # by id: a type may refuse to be compared
        writing = {number for number, kind in kinds.items() if issubclass(kind, _WRITERS)}
        made = [thing for thing in things if id(type(thing)) in writing] if writing else []
        return [
            thing
            for thing in made
            if all(thing is not stream for stream in self._streams) and self._leads_out(thing)
        ]

    def _leads_out(self, writer: Any) -> bool:
        # Other writers do not matter after the end, and flushing one may block.
        try:
            return _identity(writer.fileno()) in self._outputs
        except BaseException:  # noqa: BLE001 - it is closed, or the program replaced the method
            return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _flushed() -> bool:
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001 - the program may have replaced it with anything
            good = good and stream is not sys.stdout
    return good
