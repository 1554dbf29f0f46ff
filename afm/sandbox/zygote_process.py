"""One zygote: a bubblewrap jail with a warm Python in it that forks every run."""

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
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from afm.errors import SandboxError
from afm.sandbox.capture import memory_file
from afm.sandbox.interpreter import Identity, Interpreter
from afm.sandbox.policy import DEVICES, ENVIRONMENT

_START_S = 60.0
_FOLDER = "/zygote"
_ROOT = "/jail"
_SCRIPT = f"{_FOLDER}/serve.py"
_RULES = f"{_FOLDER}/rules"
_SOURCES = ("ending.py", "harden.py", "kernel.py", "program.py")


@dataclass(frozen=True, slots=True)
class RunOrder:
    """What the host asks of a zygote for one run.

    Attributes:
        limits: Soft and hard value of each ``RLIMIT_``.
        file_bytes: Size of ``/tmp``, and of ``/dev/shm``.
        inodes: Files and folders that each of the two can hold.
        stdin_named: Whether ``/dev/stdin`` is the standard input, and not empty.
    """

    limits: dict[str, tuple[int, int]]
    file_bytes: int
    inodes: int
    stdin_named: bool

    def packet(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class ZygoteJail:
    """Everything about a zygote's jail that is the same for each of them.

    Attributes:
        options: Bubblewrap's arguments that depend on the machine only.
    """

    bubblewrap: str
    identity: Identity
    python: Interpreter
    options: tuple[str, ...]
    system_calls: bytes


@dataclass(frozen=True, slots=True)
class Warmth:
    """What a zygote does before its first run.

    Attributes:
        modules: What it imports.
        exercises: Programs that it runs, each with the package it is for.
    """

    modules: tuple[str, ...]
    exercises: tuple[tuple[str, str], ...] = ()


def jail_options(python: Interpreter, binds: Sequence[str], proc: Sequence[str]) -> tuple[str, ...]:
    """Bubblewrap's arguments for the outer jail, in which ``/jail`` is what a run will see as ``/``.

    Args:
        binds: Further host paths that programs may read.
        proc: How the zygote (never a run) gets its ``/proc``.
    """
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
    ]
    for name, value in ENVIRONMENT.items():
        options += ("--setenv", name, value)
    for root, paths in (("", python.binds), (_ROOT, (*python.binds, *binds))):
        for path in paths:
            options += ("--ro-bind", path, root + path)
        for path, inside in python.packages:
            options += ("--ro-bind", path, root + inside)
        for name, target in python.links:
            options += ("--symlink", target, root + name)
        for device in DEVICES:
            options += ("--dev-bind", device, root + device)
    for folder in ("/tmp", "/dev/shm"):
        options += ("--dir", _ROOT + folder)
    return (*options, *proc)


class Zygote:
    """A running zygote, one run at a time.

    Args:
        warm: What it does before the first run.
        moved: Called with the zygote's process id before it serves, e.g. to put it into a cgroup.

    Raises:
        SandboxError: It did not start.
    """

    def __init__(self, jail: ZygoteJail, warm: Warmth, moved: Callable[[int], None]) -> None:
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
            inside = {path: memory_file("file", text, files.callback) for path, text in _files(jail).items()}
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
                raise SandboxError(f"{jail.bubblewrap} could not be started: {error}") from error
            close_info.close()
            try:
                self.failed = self._greeted(theirs, info, moved)
            except (OSError, ValueError, SandboxError) as error:
                self.end()
                message = os.pread(messages, 4000, 0).decode("utf-8", "replace").strip()
                raise SandboxError(f"the zygote did not start: {message or error}") from None

    def _greeted(self, theirs: socket.socket, info: int, moved: Callable[[int], None]) -> tuple[str, ...]:
        """Wait until it is warm; the modules it could not import."""
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
            raise SandboxError("it ended while warming up")
        return tuple(json.loads(greeting)["failed"])

    @property
    def alive(self) -> bool:
        """Whether it can take a run."""
        # The kernel closes a dying zygote's end before it kills what the zygote has forked.
        if self._killed:
            return False
        try:
            return bool(self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it with everything in it, without waiting; :meth:`end` reaps it."""
        with self._ended:
            self._killed = True
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and wait until everything in it is gone."""
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


def _files(jail: ZygoteJail) -> dict[str, bytes]:
    """Files of the outer jail: path and content."""
    return {**_sources(), _RULES: jail.system_calls, f"{_ROOT}/dev/stdin": b""}


def _command(jail: ZygoteJail, warm: Warmth, files: dict[str, int], info: int, control: int) -> list[str]:
    settings = {
        "preload": warm.modules,
        "exercises": warm.exercises,
        "imports": jail.python.imports,
        "root": _ROOT,
        "devices": DEVICES,
    }
    written = [word for path, fd in files.items() for word in ("--perms", "0444", "--file", str(fd), path)]
    return [
        *(jail.bubblewrap, *jail.options, *written),
        *("--chdir", "/", "--remount-ro", "/", "--info-fd", str(info)),
        *("--", jail.python.binary, "-s", "-S", "-B", "-X", "utf8", _SCRIPT),
        *(str(control), json.dumps(settings), _RULES),
    ]
