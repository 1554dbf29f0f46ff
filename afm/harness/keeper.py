"""Start the programs of a harness, and end each of them with every process that it started.

:class:`afm.harness.program.ProgramStarter` runs this file with a socket. For each program, the starter forks a
keeper, and the keeper forks the program. A process without a living parent becomes a child of the nearest ancestor that
asked for it (``PR_SET_CHILD_SUBREAPER``). So the keeper gets everything that its program leaves behind. It ends a
program when the other end of its lease is closed, which also happens if ``afm`` is killed.

With ``preload``, programs are Python scripts that run in the forked process, and the starter imports the packages that
the first ones imported. This file imports only the standard library, and may run in another Python than ``afm``, from
3.9 on.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

DESCRIPTORS = 6
"""Descriptors of an order: the order as JSON, standard input, output and error of the program, its lease, its report."""
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
"""Most seconds until killed processes have ended."""


def serve(control: socket.socket, packages: int | None) -> dict[str, Any] | None:
    """Start a keeper for each order, until the other end is closed. Then end them, and what they leave behind.

    Args:
        packages: File in which scripts leave the names of what they imported, ``None`` for other programs.

    Returns:
        ``None`` at the end. In the forked process of a script, its order.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a program may kill its keeper
    keepers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, DESCRIPTORS)
        if not message:
            end_children()
            return None
        if _was_killed(keepers):
            end_children(frozenset(keepers))
        if packages is not None and os.fstat(packages).st_size:
            import_packages(os.pread(packages, 1 << 24, 0))
            packages = None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        keeper = os.fork()
        if keeper == 0:
            control.close()
            return keep(descriptors)
        keepers.add(keeper)
        for descriptor in descriptors:
            os.close(descriptor)


def _was_killed(keepers: set[int]) -> bool:
    """Remove the keepers that have ended, and return whether one of them was killed."""
    ended = {keeper: os.waitpid(keeper, os.WNOHANG) for keeper in keepers}
    keepers -= {keeper for keeper, (process, _) in ended.items() if process}
    return any(status for _, status in ended.values())


def keep(descriptors: list[int]) -> dict[str, Any]:
    """Run one program, end what it leaves behind, and report. Returns only in the forked process of a script."""
    orders, stdin, stdout, stderr, lease, report = descriptors
    with os.fdopen(orders, encoding="utf-8") as file:
        order: dict[str, Any] = json.load(file)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    events = select.poll()
    events.register(lease, select.POLLIN)
    if events.poll(0):
        os._exit(0)  # the order came too late
    program = os.fork()
    if program == 0:
        os.close(lease)
        try:
            become(order, (stdin, stdout, stderr))
        except (OSError, ValueError) as error:
            os.write(report, json.dumps({"error": str(error)}).encode() + b"\n")
            os._exit(127)
        os.close(report)
        return order
    for stream in (stdin, stdout, stderr):
        os.close(stream)
    events.register(os.pidfd_open(program), select.POLLIN)
    events.poll()
    ended, status = os.waitpid(program, os.WNOHANG)
    left = end_children()
    survived = _has_children()
    known = ended and not survived
    result = {"status": os.waitstatus_to_exitcode(status) if known else None, "left_behind": left}
    with suppress(BrokenPipeError):  # nobody waits any more
        os.write(report, json.dumps(result).encode() + b"\n")
    os._exit(int(survived))


def become(order: dict[str, Any], streams: tuple[int, int, int]) -> None:
    """Take streams, folder and session of a program. Execute it, unless it is a script for this process.

    Raises:
        OSError: It cannot be executed.
    """
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(order["folder"])
    if not order["in_fork"]:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, for itself
            signal.signal(ignored, signal.SIG_DFL)
        os.execvpe(order["words"][0], order["words"], order["env"])
    os.environ.clear()
    os.environ.update(order["env"])


def run_script(words: list[str]) -> None:
    """Run a Python script as ``python SCRIPT ARGUMENTS`` does."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # `random` does so by itself after a fork
    script = words[1]
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__file__"] = script
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def end_children(spared: frozenset[int] = frozenset()) -> int:
    """Kill all descendants except these children and theirs, and return how many were alive.

    A killed process leaves its children to this one.
    """
    killed, deadline = 0, time.monotonic() + _KILL_S
    while _has_children() and (children := _children() - spared) and time.monotonic() < deadline:
        for child in children:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still the child's
        statuses = [os.waitpid(child, 0)[1] for child in children]
        killed += statuses.count(signal.SIGKILL)  # others had ended already
    return killed


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[int]:
    own = str(os.getpid())
    with suppress(OSError):  # not every kernel has this file
        return set(map(int, Path(f"/proc/self/task/{own}/children").read_text(encoding="ascii").split()))
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1] == own:
                children.add(int(stat.parent.name))
    return children


def import_packages(names: bytes) -> None:
    """Import what a script imported, as far as that works without the variables of a program."""
    for name in names.decode().split():
        with suppress(BaseException):
            importlib.import_module(name)
    if threads := [thread.name for thread in threading.enumerate()[1:]]:
        text = "a package started threads, which forks do not have; if programs hang, set preload: false"
        print(f"warning: harness.preload: {text}: {', '.join(threads)}", file=sys.stderr, flush=True)
    gc.freeze()  # so that a script that collects garbage does not copy the packages' memory


def imported_packages(script: str) -> bytes:
    """Return the names of the imported modules, without those that the script's folder has."""
    files = Path(script).resolve().parent.iterdir()
    own = {file.stem for file in files if file.suffix in (".py", ".so") or (file / "__init__.py").is_file()}
    return " ".join(name for name in sys.modules if name.partition(".")[0] not in own).encode()


def main() -> None:
    """Serve, and run a script in the process that was forked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it passes that on
    packages = os.memfd_create("packages") if sys.argv[2:] == ["preload"] else None
    order = serve(socket.socket(fileno=int(sys.argv[1])), packages)
    if order is not None and packages is not None:
        if not os.fstat(packages).st_size:
            atexit.register(lambda: os.pwrite(packages, imported_packages(order["words"][1]), 0))
        run_script(order["words"])


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    main()
