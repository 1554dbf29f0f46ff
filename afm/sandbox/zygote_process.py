"""One zygote, a bubblewrap jail with a warm Python that forks every run, and a run in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from afm.errors import SandboxError
from afm.sandbox.base import DEVICES, INODES, kernel_limits
from afm.sandbox.interpreter import Interpreter
from afm.sandbox.jails import BubblewrapJail, namespace_options, shown_files
from afm.sandbox.run import JailRun, RunTask, memory_file

_START_S = 60.0
_GRACE_S = 2.0
_FOLDER = "/zygote"
_ROOT = "/jail"
_SCRIPT = f"{_FOLDER}/serve.py"
_RULES = f"{_FOLDER}/rules"
_SOURCES = ("harden.py", "kernel.py", "shutdown.py")


class ZygoteLostError(SandboxError):
    """The zygote died or hung before the end of the run, which says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """The preparation of a zygote before its first run.

    Attributes:
        modules: Modules to import.
        exercises: Pairs of a package and a program to run for it.
    """

    modules: tuple[str, ...]
    exercises: tuple[tuple[str, str], ...] = ()


def zygote_options(python: Interpreter, binds: Sequence[str], proc: Sequence[str]) -> tuple[str, ...]:
    """Return bubblewrap's arguments for the outer jail. A run sees its folder ``/jail`` as ``/``.

    Args:
        binds: Further host paths that programs may read.
        proc: The arguments that give the zygote, but never a run, its ``/proc``.
    """
    options = [*namespace_options(), *shown_files(python, ()), *shown_files(python, binds, _ROOT)]
    for folder in ("/tmp", "/dev/shm"):
        options += ("--dir", _ROOT + folder)
    return (*options, *proc)


class Zygote:
    """A running zygote, which serves one run at a time.

    Args:
        warm: Its preparation before the first run.
        moved: Called with the zygote's process id before it serves, for example to add it to a cgroup.

    Raises:
        SandboxError: The zygote did not start.
    """

    def __init__(self, jail: BubblewrapJail, warm: Warmth, moved: Callable[[int], None]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        messages = os.memfd_create("messages", os.MFD_CLOEXEC)
        self._ended = threading.Lock()
        self._killed = False
        self._pidfd = -1
        with contextlib.ExitStack() as files:
            files.callback(theirs.close)
            files.callback(os.close, messages)
            info, info_end = os.pipe()
            files.callback(os.close, info)
            close_info = files.enter_context(contextlib.ExitStack())
            close_info.callback(os.close, info_end)
            texts = {**_sources(), _RULES: jail.system_calls, f"{_ROOT}/dev/stdin": b""}
            inside = {path: memory_file(text, files) for path, text in texts.items()}
            command = _command(jail, warm, inside, info_end, theirs.fileno())
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    pass_fds=(*inside.values(), info_end, theirs.fileno()),
                    cwd="/",
                    env={},
                    start_new_session=True,
                    **jail.identity.popen_arguments(),
                )
            except OSError as error:
                self.control.close()
                raise SandboxError(f"{jail.path} could not be started: {error}") from error
            close_info.close()
            try:
                self.failed = self._greet(theirs, info, moved)
            except (OSError, ValueError, SandboxError) as error:
                self.end()
                message = os.pread(messages, 4000, 0).decode("utf-8", "replace").strip()
                raise SandboxError(f"the zygote did not start: {message or error}") from None

    def _greet(self, theirs: socket.socket, info: int, moved: Callable[[int], None]) -> tuple[str, ...]:
        """Wait until the zygote is warm and return the modules that it could not import."""
        theirs.close()
        reply = b""
        while b"child-pid" not in reply:
            if not (more := os.read(info, 4096)):
                raise SandboxError("bubblewrap ended before its jail began")
            reply += more
        match = re.search(rb'"child-pid": (\d+)', reply)
        if match is None:
            raise SandboxError(f"bubblewrap reported {reply!r}, expected a child-pid")
        pid = int(match[1])
        self._pidfd = os.pidfd_open(pid)
        moved(pid)
        self.control.settimeout(_START_S)
        greeting = self.control.recv(65536)
        self.control.setblocking(False)
        if not greeting:
            raise SandboxError("the zygote ended while it warmed up")
        return tuple(json.loads(greeting)["failed"])

    @property
    def alive(self) -> bool:
        """Whether the zygote can take a run."""
        # The kernel closes a dying zygote's end of the socket before it kills the processes that the zygote forked.
        if self._killed:
            return False
        try:
            return bool(self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the zygote and everything in it without waiting. :meth:`end` reaps it."""
        with self._ended:
            self._killed = True
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the zygote and wait until everything in it is gone."""
        self.kill()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._ended:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        self.control.close()


@cache
def _sources() -> dict[str, bytes]:
    folder = Path(__file__).with_name("inside")
    package = f"{_FOLDER}/{__package__.replace('.', '/')}/inside"
    return {f"{package}/{name}": (folder / name).read_bytes() for name in _SOURCES} | {
        _SCRIPT: (folder / "serve.py").read_bytes()
    }


def _command(jail: BubblewrapJail, warm: Warmth, files: dict[str, int], info: int, control: int) -> list[str]:
    settings = {
        "preload": warm.modules,
        "exercises": warm.exercises,
        "imports": jail.python.imports,
        "root": _ROOT,
        "devices": DEVICES,
    }
    written = [word for path, fd in files.items() for word in ("--perms", "0444", "--file", str(fd), path)]
    return [
        *(jail.path, *jail.options, *written),
        *("--chdir", "/", "--remount-ro", "/", "--info-fd", str(info)),
        *("--", jail.python.binary, "-s", "-S", "-B", "-X", "utf8", _SCRIPT),
        *(str(control), json.dumps(settings), _RULES),
    ]


class ZygoteRun(JailRun):
    """Starts a run in a zygote and follows it to its end, which is that of its process 1, the last one to end.

    Args:
        computed_s: Returns the CPU seconds of all runs in this zygote's place so far. ``None`` if nothing counts them.
        start_s: Seconds that the zygote may take to start the program.

    Raises:
        ZygoteLostError: The zygote takes no run or, from :meth:`wait`, died or hung.
    """

    def __init__(
        self, zygote: Zygote, task: RunTask, *, start_s: float, computed_s: Callable[[], float] | None = None
    ) -> None:
        super().__init__(task.limits)
        self._zygote = zygote
        self._computed_s = computed_s
        self._computed_before_s = computed_s() if computed_s is not None else 0.0
        request = {
            "limits": kernel_limits(task.limits),
            "file_bytes": task.limits.file_bytes,
            "inodes": INODES,
            "stdin_named": task.stdin_named,
        }
        with contextlib.ExitStack() as theirs:
            inputs = [memory_file(data, theirs) for data in (task.program, task.stdin)]
            outputs = self._open_pipes(theirs)
            try:
                socket.send_fds(zygote.control, [json.dumps(request).encode()], [*inputs, *outputs])
            except OSError as error:
                self._fds.close()
                raise ZygoteLostError(f"the zygote takes no run: {error}") from error
        self._loop.add_reader(zygote.control, self._read_answer)
        self._watch_pipes()
        self._after(start_s, self._lose, "the zygote does not answer")

    @property
    def abandoned(self) -> bool:
        """Whether the event loop was closed before the run ended."""
        return self._loop.is_closed() and not self._ended.done()

    def _read_answer(self) -> None:
        """Read the zygote's answer: the forked run, a failure, or the zygote's death."""
        try:
            data, fds, _, _ = socket.recv_fds(self._zygote.control, 4096, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the zygote's socket failed: {error}")
            return
        if not data or not fds:
            self._lose(data.decode("utf-8", "replace") or "the zygote died")
            return
        self._watch_process(fds[0])

    def _counted_s(self) -> float:
        """Return the CPU seconds of the run so far from its cgroup, 0 without one."""
        return self._computed_s() - self._computed_before_s if self._computed_s is not None else 0.0

    def _used_s(self) -> float:
        return self._counted_s() if self._computed_s is not None else super()._used_s()

    def _first_process(self) -> int | None:
        if self._pidfd is None:
            return None
        text = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text(encoding="ascii")
        match = re.search(r"^Pid:\s+(\d+)$", text, flags=re.MULTILINE)
        return int(match[1]) if match else None

    def _kill(self) -> None:
        assert self._pidfd is not None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._after(_GRACE_S, self._zygote.kill)

    def _lose(self, why: str) -> None:
        """Give up the zygote. The processes that it forked die with it."""
        self._zygote.kill()
        if self._ended.done():
            return
        if self._reason is not None and self._beginning.startswith("ready"):  # it was already being stopped
            self._conclude(self._beginning, self._counted_s())
        else:
            self._release()
            self._ended.set_exception(ZygoteLostError(why))

    def _finish(self) -> None:
        report = self._read_rest()
        if self._reason is None and report == "ready\n" and not self._zygote.alive:
            self._lose("the zygote died during the run")
        else:
            self._conclude(report, max(_reported_cpu_s(report), self._counted_s()))

    def _release(self) -> None:
        self._loop.remove_reader(self._zygote.control)
        super()._release()


def _reported_cpu_s(report: str) -> float:
    try:
        return float(report.split("\n")[1].split()[2])
    except (IndexError, ValueError):
        return 0.0
