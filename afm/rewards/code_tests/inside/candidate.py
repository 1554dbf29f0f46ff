"""Run a program on many inputs, each in a fresh process. Runs inside the sandbox, without the expected answers.

Standard input holds the length of a JSON object in 16 digits, the object (the program, the limits, the sizes of the
cases), then the cases as JSON. A case is either a text for standard input, optionally with files and arguments, or a
session: calls of the program's functions and of methods of the returned values. For each case, one JSON line, the answer
and the notes go to standard output, on a descriptor that the program never has.

Cases are isolated from each other: this process never reads them, keeps their answers in memory that its forks do not
have, and removes their files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from typing import Any

from afm.rewards.code_tests.inside.serve import NOTE_BYTES, PROGRAM, described, serve

_CHUNK = 1 << 16
_DIGITS = 16
_STDIN, _INPUT = "/dev/stdin", "/tmp/stdin"  # the first is empty
_WRITABLE = ("/tmp", "/dev/shm")
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _FILTER = 22, 36, 2
_SIGACTION = {"x86_64": 13, "aarch64": 134}


def main() -> None:
    """Run the cases of standard input."""
    start = _DIGITS + int(_part(0, _DIGITS))
    task = json.loads(_part(_DIGITS, start - _DIGITS))
    try:
        code = compile(task["program"].replace(_STDIN, _INPUT), PROGRAM, "exec", dont_inherit=True)
    except BaseException as error:  # noqa: BLE001 - whatever a hostile source does to the compiler
        _send(json.dumps({"broken": described(error)}).encode() + b"\n")
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _keep_children()
    _import_shared(task["shared"], task["prelude"])
    kept = _swept()
    stores = {1: _Store(task["output_bytes"]), 2: _Store(NOTE_BYTES), 3: _Store(task["output_bytes"])}
    gc.freeze()  # the cases' collectors need not touch, and copy, what they share
    ends = time.monotonic() + task["total_s"]
    for number, size in enumerate(task["sizes"]):
        if time.monotonic() > ends:
            return
        case = _Case(code, (start, size), task, stores)
        result = case.run(min(task["wall_s"], ends - time.monotonic()))
        _report({"case": number, **result}, stores[3 if task["session"] else 1], stores[2])
        if (task["stop_early"] and result["end"] != "ok") or _swept() - kept:
            return
        start += size


def _part(start: int, size: int) -> bytes:
    """Read ``size`` bytes of the standard input."""
    data = b""
    while chunk := os.pread(0, size - len(data), start + len(data)):
        data += chunk
    return data


def _send(data: Any) -> None:
    while data:
        data = data[os.write(1, data) :]


def _report(frame: dict[str, Any], answer: _Store, notes: _Store) -> None:
    """Write the line of a case and its texts. The end marks are drawn after the program is gone."""
    mark = os.urandom(16).hex()
    _send(json.dumps({**frame, "mark": mark}).encode() + b"\n")
    for store in (answer, notes):
        _send(store.content())
        _send(mark.encode())
    _send(b"\n")


def _keep_children() -> None:
    """Prevent programs from ignoring SIGCHLD, because the kernel drops the CPU time of children without a wait."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    number = _SIGACTION.get(os.uname().machine)
    if number is None:
        return
    rules = (
        *((0x20, 0, 0, 0), (0x15, 0, 3, number)),  # load the call's number, go on if it is sigaction,
        *((0x20, 0, 0, 16), (0x15, 0, 1, signal.SIGCHLD)),  # load its first argument, go on if it is SIGCHLD,
        *((0x06, 0, 0, 0x00050000), (0x06, 0, 0, 0x7FFF0000)),  # say that it is done; allow everything else
    )
    data = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    filters = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(data)))
    ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _FILTER, filters, 0, 0)


def _swept() -> set[str]:
    """Remove all files and return those that remain."""
    for folder in _WRITABLE:
        if not os.listdir(folder):  # noqa: PTH208 - pathlib is slow to import
            continue
        folders = [folder]
        for path in folders:  # grows
            with contextlib.suppress(OSError):
                if path not in _WRITABLE:
                    os.chmod(path, 0o700)  # noqa: PTH101 - as above
                inside = list(os.scandir(path))
                folders += [entry.path for entry in inside if entry.is_dir(follow_symlinks=False)]
                for entry in inside:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)  # noqa: PTH108 - as above
        for path in reversed(folders[1:]):
            with contextlib.suppress(OSError):
                os.rmdir(path)  # noqa: PTH106 - as above
    return {f"{folder}/{name}" for folder in _WRITABLE for name in os.listdir(folder)}  # noqa: PTH208 - as above


def _import_shared(names: list[str], prelude: str) -> None:
    """Import well-known modules once instead of per case."""
    with contextlib.suppress(Exception):  # it will fail in the cases too
        exec(prelude, {})
    for name in names:
        try:
            __import__(name)
        except Exception:  # noqa: BLE001 - absent; the program will find out
            continue


class _Store:
    """The content of a stream of a case, in memory that no fork inherits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._map = mmap.mmap(-1, size + _CHUNK)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.used = 0

    @property
    def too_much(self) -> bool:
        return self.used > self._size

    def content(self) -> memoryview:
        return memoryview(self._map)[: self.used]

    def take(self, fd: int) -> bool:
        """Read the available bytes and return whether more may follow."""
        try:
            count = os.readv(fd, [memoryview(self._map)[self.used :]])
        except BlockingIOError:
            return False
        self.used += count
        return count > 0

    def keep_the_end(self) -> None:
        """Drop the excess at the beginning."""
        if self.too_much:
            self._map.move(0, self.used - self._size, self._size)
            self.used = self._size


class _Case:
    """One case: a child process with limits, its streams, and its end.

    Args:
        place: Position and size of the case in the standard input.
    """

    def __init__(
        self, code: types.CodeType, place: tuple[int, int], task: dict[str, Any], stores: dict[int, _Store]
    ) -> None:
        self._code, self._place, self._task, self._stores = code, place, task, stores
        self._status = 0

    def run(self, wall_s: float) -> dict[str, Any]:
        """Run the case and return how it ended. Its texts are in the stores."""
        for store in self._stores.values():
            store.used = 0
        try:
            pipes = {stream: os.pipe() for stream in self._stores}
            pid = os.fork()
        except OSError:  # no room for another process
            return {"end": "error", "status": 0, "session": False}
        if pid == 0:
            self._serve(pipes)
        for _, writing in pipes.values():
            os.close(writing)
        reading = {pipe[0]: stream for stream, pipe in pipes.items()}
        try:
            end = self._watch(pid, reading, wall_s)
        finally:
            for fd in reading:
                os.close(fd)
        return {"end": end, "status": self._status, "session": self._task["session"]}

    def _serve(self, pipes: dict[int, tuple[int, int]]) -> None:
        """In the child: read and run only this case. Never returns."""
        try:
            case = json.loads(_part(*self._place))
            source = self._input()
            with open(source, "wb", closefd=False) as file:
                file.write(case.get("stdin", "").encode("utf-8", "replace"))
            os.lseek(source, 0, os.SEEK_SET)
            self._become(source, pipes)
            for name, text in case.get("files", {}).items():
                with open(name, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - slow to import
                    file.write(text)
            session = case.get("session")
            serve(self._code, session, [PROGRAM, *case.get("files", {})], self._task["prelude"])
        finally:
            os._exit(1)

    def _input(self) -> int:
        """Return a file with the case's input, named if the program opens it by name."""
        if _STDIN not in self._task["program"]:
            return os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        return os.open(_INPUT, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _become(self, source: int, pipes: dict[int, tuple[int, int]]) -> None:
        """In the child: set up its own session, streams and limits, and nothing else."""
        os.setsid()
        fds = [source, *(pipes[stream][1] for stream in (1, 2, 3))]
        high = [os.dup(fd) for fd in fds]  # above every number they are to have
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.closerange(4, 4096)
        cpu_s = min(int(self._task["cpu_s"]) + 2, resource.getrlimit(resource.RLIMIT_CPU)[1])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        sys.stdin = sys.__stdin__ = _text(0, "r", "surrogateescape")  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = _text(1, "w", "replace")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _text(2, "w", "replace")  # type: ignore[misc]

    def _watch(self, pid: int, reading: dict[int, int], wall_s: float) -> str:
        """Collect the child's output until it ends or reaches a limit."""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        for fd in reading:
            poll.register(fd, select.POLLIN)
            os.set_blocking(fd, False)
        reason, begun, open_fds = "", time.monotonic(), set(reading)
        while not reason:
            wall_left = wall_s - (time.monotonic() - begun)
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
        if reason in ("", "wall") and cpu_s > self._task["cpu_s"]:
            reason = "cpu"  # of all its processes together
        return reason or ("ok" if status == 0 else "error")

    def _too_much(self) -> bool:
        return self._stores[1].too_much or self._stores[3].too_much

    def _take(self, fd: int, stream: int) -> bool:
        more = self._stores[stream].take(fd)
        self._stores[2].keep_the_end()
        return more


def _end(pid: int) -> tuple[int, float]:
    """End a case with all its processes. Returns the status of ``pid`` and the CPU seconds of all of them."""
    contained = os.getppid() <= 1  # in a PID namespace of our own; elsewhere -1 would be everybody
    with contextlib.suppress(OSError):  # no process is left
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
