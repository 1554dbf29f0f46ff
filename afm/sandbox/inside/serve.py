"""The zygote: a warm Python that forks every run. Runs as process 1 of the outer jail.

The arguments are the descriptor of the control socket, one JSON object and the file of the seccomp rules. The object
has ``preload`` (modules to import), ``exercises`` (packages and their programs) and ``imports`` (import paths of
installed packages). Its ``root`` is the folder that becomes a run's ``/``, and ``devices`` names its device files.

On the control socket a request is one packet: JSON, and the descriptors of program, stdin, stdout, stderr and report.
The JSON has ``limits`` (soft and hard value of each ``RLIMIT_``), ``file_bytes`` and ``inodes`` (size of ``/tmp``, and
of ``/dev/shm``) and ``stdin_named`` (whether ``/dev/stdin`` is the standard input instead of empty). The answer is
``started`` with a pidfd of the run's process 1, or ``failed: REASON``. That process writes ``ready`` to the report when
the program is about to run, then ``STATUS PEAK_KIB CPU_SECONDS`` with the status from ``waitpid``. It adds ``memory``
if the program ended because memory was refused. Each ends with a newline. If isolation fails, it writes
``failed: REASON``.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import types
from typing import Any, NamedTuple

from afm.sandbox.inside import harden, kernel, shutdown

OWN_MODULES = {
    "afm",
    "afm.sandbox",
    "afm.sandbox.inside",
    *(own.__name__ for own in (harden, kernel, shutdown)),
}
PROGRAM = "/tmp/main.py"


class JailRoot(NamedTuple):
    """The settings that every run shares.

    Attributes:
        devices: Device files below ``root`` and their mount flags.
    """

    root: str
    imports: list[str]
    user: tuple[int, int, bool]
    rules: bytes
    devices: list[tuple[str, int]]


def warm_up(modules: list[str], imports: list[str]) -> list[str]:
    """Import ``modules`` and return the failures with their reasons."""
    folder, sys.path[0] = sys.path[0], "/nonexistent"
    sys.path += imports
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a package may fail in any way
            failed.append(f"{name}: {type(error).__name__}: {error}")
    del sys.path[len(sys.path) - len(imports) :]
    sys.path[0] = folder
    return failed


def exercise(programs: list[tuple[str, str]]) -> list[str]:
    """Run programs, each with its package, that trigger what packages load at first use. Return the failures."""
    failed = []
    for name, code in programs:
        try:
            exec(code, {})
        except Exception as error:  # noqa: BLE001 - a package may fail in any way
            failed.append(f"{name} in use: {type(error).__name__}: {error}")
    return failed


def serve(control: socket.socket, jail: JailRoot) -> harden.Refusal:
    """Fork a run per request. Like :func:`begin`, it returns only in the program's process."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 5)
        if not data:  # the owner is gone
            os._exit(0)
        try:
            pid, pidfd = kernel.clone_into_namespaces()
        except OSError as error:
            control.send(f"failed: {error}".encode())
            pid = -1
        if pid == 0:
            control.close()
            return begin(json.loads(data), fds, jail)
        if pid > 0:
            socket.send_fds(control, [b"started"], [pidfd])
            fds.append(pidfd)
        for fd in fds:
            os.close(fd)


def begin(request: dict[str, Any], fds: list[int], jail: JailRoot) -> harden.Refusal:
    """As process 1 of the run, isolate, fork the program and wait for it. Returns only in the program, with its report."""
    code, stdin, stdout, stderr, report = fds
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        isolate(request, code, stdin, jail)
        refusal = harden.Refusal()
        os.write(report, b"ready\n")
        child = os.fork()
    except BaseException as error:  # noqa: BLE001 - the host must learn of every error
        os.write(report, f"failed: {type(error).__name__}: {error}"[:4000].encode())
        os._exit(1)
    if child:
        attend(child, report, refusal)
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
    kernel.close_from(3)
    harden.answer_lock_queries()
    limits = {name: (soft, hard) for name, (soft, hard) in request["limits"].items()}
    become_program(PROGRAM, limits, jail.imports)
    return refusal


def isolate(request: dict[str, Any], code: int, stdin: int, jail: JailRoot) -> None:
    """Separate this run from the host and from other runs."""
    root = jail.root
    kernel.map_user(*jail.user)
    kernel.prefer_as_victim()
    os.setsid()
    kernel.mount(None, "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount(root, root, None, kernel.BIND | kernel.RECURSIVE)
    for (
        device,
        had,
    ) in jail.devices:  # they stay writable, but nothing may change the times of the host's files
        kernel.mount(None, device, None, kernel.BIND | kernel.REMOUNT | kernel.READ_ONLY | had)
    size, stdin_size = request["file_bytes"], os.fstat(stdin).st_size * request["stdin_named"]
    flags = kernel.NO_SUID | kernel.NO_DEV
    for folder, extra in (("/tmp", stdin_size), ("/dev/shm", 0)):
        options = f"size={size + extra},nr_inodes={request['inodes']},mode=0755"
        kernel.mount("tmpfs", root + folder, "tmpfs", flags, options)
    copy(code, root + PROGRAM)
    if stdin_size:  # otherwise /dev/stdin is the empty file of the root folder
        kept = root + "/tmp/stdin"
        copy(stdin, kept)
        kernel.mount(kept, root + "/dev/stdin", None, kernel.BIND)
        kernel.mount(None, root + "/dev/stdin", None, kernel.BIND | kernel.REMOUNT | kernel.READ_ONLY | flags)
        os.unlink(kept)  # noqa: PTH108 - pathlib is not loaded here
    kernel.become_root_directory(root)
    os.chdir("/tmp")
    kernel.drop_capabilities()
    harden.filter_calls(jail.rules)


def copy(source: int, target: str) -> None:
    """Write the whole content of a descriptor to a read-only file."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    offset = 0
    while data := os.pread(source, 1 << 20, offset):
        offset += os.write(fd, data)
    os.close(fd)


def mounted(paths: list[str]) -> list[tuple[str, int]]:
    """Return the paths with the mount flags that a run cannot remove."""
    kept = kernel.NO_SUID | kernel.NO_DEV | kernel.NO_EXEC
    return [(path, os.statvfs(path).f_flag & kept) for path in paths]


def attend(child: int, report: int, refusal: harden.Refusal) -> None:
    """Reap every process of the run until the program ends, and report its end. Never returns."""
    kernel.close_from(report + 1)
    os.closerange(0, report)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == child:
            break
    own = resource.getrusage(resource.RUSAGE_SELF)
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    summary = b"%d %d %.4f\n" % (status, usage.ru_maxrss, cpu_s)
    os.write(report, summary + b"memory\n" * refusal.ended(child))
    os._exit(0)


def become_program(path: str, limits: dict[str, tuple[int, int]], imports: list[str]) -> None:
    """Set the limits and make the interpreter look as if it had just started with ``path``."""
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name, pair in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), pair)
    sys.stdin = sys.__stdin__ = _stream(0, "r", "<stdin>", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "<stdout>", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "<stderr>", "backslashreplace")  # type: ignore[misc]
    harden.look_started(path, imports)
    os.environ["PWD"] = sys.path[0]
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    if "numpy.random" in sys.modules:  # only the standard library's generator reseeds itself after a fork
        sys.modules["numpy"].random.seed()
    gc.enable()


def execute(path: str, refusal: harden.Refusal) -> None:
    """Run the program as ``__main__`` and end the process as Python would. Never returns."""
    # The program may overwrite every global name.
    leave, anything, end, note = os._exit, BaseException, shutdown.Shutdown(), refusal.note
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
        status = status if end.finish(scope) else 120
    finally:
        leave(status & 0xFF)


def _stream(fd: int, mode: str, name: str, errors: str) -> Any:
    """Open a standard stream. It is line-buffered, so that a stopped program keeps its output."""
    text: Any = open(  # noqa: SIM115 - the standard streams stay open
        fd, mode, encoding="utf-8", errors=errors, closefd=False, buffering=1 if mode == "w" else -1
    )
    text.buffer.raw.name = name
    text.mode = mode
    return text


def _status_of(error: BaseException, exiting: type = SystemExit, whole: type = int) -> int:
    """Handle an uncaught exception like Python and return the exit status."""
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
    except BaseException as second:  # noqa: BLE001 - the program may have set the hook
        with contextlib.suppress(BaseException):
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(second), second, second.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(error), error, error.__traceback__)


def main() -> harden.Refusal:
    """Warm up, report it and serve. Like :func:`begin`, it returns only in a program's process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    with open(sys.argv[3], "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
        rules = file.read()
    failed = warm_up(settings["preload"], settings["imports"])
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - as above
        raise SystemExit("a preloaded module started a thread, so forks are not safe; remove it from `warm`")
    failed += exercise(settings["exercises"])
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    harden.harden(settings["devices"])
    kernel.protect_from_peers()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.disable()
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"failed": failed}).encode())
    user = os.getuid(), os.getgid(), kernel.groups_are_fixed()  # a new user namespace cannot look them up
    devices = mounted([settings["root"] + device for device in settings["devices"]])
    return serve(control, JailRoot(settings["root"], settings["imports"], user, rules, devices))


if __name__ == "__main__":
    execute(PROGRAM, main())
