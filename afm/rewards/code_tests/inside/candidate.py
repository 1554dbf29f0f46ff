"""Runs a program on many inputs, each in a fresh process. Runs inside the sandbox; knows no expected answer.

Standard input holds one JSON object: the program, the cases and their limits. Each case is either a text for
standard input, perhaps with files and arguments, or a session: calls of the program's functions and of methods of
what they return. For each case one JSON line goes to standard output, a descriptor that the program never has.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

from afm.rewards.code_tests.inside.serve import NOTE_BYTES, PRELUDE, PROGRAM, described, serve

_CHUNK = 1 << 16
_STDIN, _INPUT = "/dev/stdin", "/tmp/stdin"  # the first may hold this program's input, not the case's
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the cases of standard input."""
    with open(0, "rb", closefd=False) as stream:
        task = json.loads(stream.read())
    try:
        code = compile(task["program"].replace(_STDIN, _INPUT), PROGRAM, "exec", dont_inherit=True)
    except BaseException as error:  # noqa: BLE001 - whatever a hostile source does to the compiler
        _send({"broken": described(error)})
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _import_shared(task["shared"], task["prelude"])
    gc.freeze()  # the cases' collectors need not touch, and copy, what they share
    ends = time.monotonic() + task["total_s"]
    for number, case in enumerate(task["cases"]):
        if time.monotonic() > ends:
            return
        result = _Case(code, case, task, min(task["wall_s"], ends - time.monotonic())).run()
        _send({"case": number, **result})
        if task["stop_early"] and result["end"] != "ok":
            return


def _send(frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _import_shared(names: list[str], prelude: bool) -> None:
    """Import well-known modules once, not once a case."""
    if prelude:
        exec(PRELUDE, {})
    for name in names:
        try:
            __import__(name)
        except Exception:  # noqa: BLE001 - absent; the program will find out
            continue


class _Case:
    """One case: a child of its own with limits, its streams, and its end."""

    def __init__(
        self, code: types.CodeType, case: dict[str, Any], task: dict[str, Any], wall_s: float
    ) -> None:
        self._code, self._case, self._task, self._wall_s = code, case, task, wall_s
        self._status = 0
        self._data = {1: bytearray(), 2: bytearray(), 3: bytearray()}

    def run(self) -> dict[str, Any]:
        try:
            given = self._input()
            with open(given, "wb", closefd=False) as file:
                file.write(self._case.get("stdin", "").encode("utf-8", "replace"))
            os.lseek(given, 0, os.SEEK_SET)
            pipes = {stream: os.pipe() for stream in self._data}
            pid = os.fork()
        except OSError as error:  # an earlier case filled the disk or the process table
            return {"end": "error", "note": f"no room for another process: {error}"}
        if pid == 0:
            try:
                self._become(given, pipes)
                for name, text in self._case.get("files", {}).items():
                    with open(name, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - slow to import
                        file.write(text)
                serve(self._code, self._case.get("session"), [PROGRAM, *self._case.get("files", {})])
            finally:
                os._exit(1)
        os.close(given)
        for _, writing in pipes.values():
            os.close(writing)
        reading = {pipe[0]: stream for stream, pipe in pipes.items()}
        try:
            end = self._watch(pid, reading)
        finally:
            for fd in reading:
                os.close(fd)
        result: dict[str, Any] = {
            "end": end,
            "note": self._data[2].decode("utf-8", "replace"),
            "status": self._status,
        }
        if self._case.get("session") is not None:
            return {**result, "values": self._values()}
        return {**result, "out": self._data[1].decode("utf-8", "replace")}

    def _input(self) -> int:
        """A file for the case's input, under a name where the program opens it by name."""
        if _STDIN not in self._task["program"]:
            return os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        if os.path.lexists(_INPUT):
            os.unlink(_INPUT)  # noqa: PTH108 - as above
        return os.open(_INPUT, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _values(self) -> Any:
        try:
            return json.loads(self._data[3])
        except (ValueError, RecursionError):
            return None

    def _become(self, given: int, pipes: dict[int, tuple[int, int]]) -> None:
        """In the child: its own session, streams and limits, and nothing else."""
        os.setsid()
        fds = [given, *(pipes[stream][1] for stream in (1, 2, 3))]
        high = [os.dup(fd) for fd in fds]  # above every number they are to have
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.closerange(4, 4096)
        cpu_s = min(int(self._task["cpu_s"]) + 2, resource.getrlimit(resource.RLIMIT_CPU)[1])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        sys.stdin = sys.__stdin__ = _text(0, "r", "surrogateescape")  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = _text(1, "w", "replace")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _text(2, "w", "replace")  # type: ignore[misc]

    def _watch(self, pid: int, reading: dict[int, int]) -> str:
        """Collect the child's output until it ends or has to be ended."""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        for fd in reading:
            poll.register(fd, select.POLLIN)
            os.set_blocking(fd, False)
        reason, begun, open_fds = "", time.monotonic(), set(reading)
        while not reason:
            wall_left = self._wall_s - (time.monotonic() - begun)
            cpu_left = self._task["cpu_s"] - _cpu_s(pid)
            if wall_left <= 0 or cpu_left <= 0:
                reason = "cpu" if cpu_left <= 0 else "wall"
                break
            ready = [fd for fd, _ in poll.poll(1 + 1000 * min(wall_left, cpu_left))]
            for fd in open_fds.intersection(ready):
                if not self._take(fd, reading[fd]):
                    poll.unregister(fd)
                    open_fds.discard(fd)
            if self._too_much():
                reason = "output"
            if ended in ready:
                break
        os.close(ended)
        status, cpu_s = _end(pid)
        self._status = os.waitstatus_to_exitcode(status)
        for fd in open_fds:
            while not self._too_much() and self._take(fd, reading[fd]):
                pass
        if not reason and self._too_much():
            reason = "output"
        if not reason and cpu_s > self._task["cpu_s"]:
            reason = "cpu"
        return reason or ("ok" if status == 0 else "error")

    def _too_much(self) -> bool:
        return bool(max(len(self._data[1]), len(self._data[3])) > self._task["output_bytes"])

    def _take(self, fd: int, stream: int) -> bool:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self._data[stream] += chunk
        if stream == 2:
            del self._data[2][:-NOTE_BYTES]
        return len(chunk) > 0


def _end(pid: int) -> tuple[int, float]:
    """End a case and whatever it has left behind: the status of ``pid``, and the CPU seconds of all together."""
    contained = os.getppid() <= 1  # in a PID namespace of our own; elsewhere -1 would be everybody
    with contextlib.suppress(OSError):  # nobody is left
        os.kill(-1 if contained else pid, signal.SIGKILL)
    status, cpu_s = 0, 0.0
    while True:
        try:
            ended, end, usage = os.wait4(-1 if contained else pid, 0)
        except ChildProcessError:
            return status, cpu_s
        cpu_s += usage.ru_utime + usage.ru_stime
        status = end if ended == pid else status


def _text(fd: int, mode: str, errors: str) -> Any:
    return open(fd, mode, encoding="utf-8", errors=errors, closefd=False)


def _cpu_s(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the process's CPU clock, see clock_getcpuclockid(3)
    except OSError:
        return 0.0


if __name__ == "__main__":
    main()
