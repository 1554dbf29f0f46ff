"""Starts the user's program. Runs inside the jail, as process 1, under the sandbox's own Python.

The host passes the text of ``inside/harden.py`` and of this file to ``python -c``. It imports nothing from the project
and little from the standard library, because every run pays for the imports. Process 1 only waits. The program runs in
a child, where signals work as usual and its end can be distinguished from the jail's.

The arguments are the descriptor for the report, the file of the program, the limits as ``NAME=SOFT=HARD,...``, and the
extra import paths and the devices, each joined by ``:``. Then come the seccomp filter in hexadecimal digits (empty if
the jail has one), the descriptor of the program (empty if its file exists) and the descriptor for its stderr (empty for
the jail's). The report is ``ready`` when the program is about to run, then ``STATUS PEAK_KIB`` with the status from
``waitpid``, and then ``memory`` if the program ended because memory was refused, each with a newline.
"""

import os
import sys

TYPE_CHECKING = False  # at run time, the text of inside/harden.py above defines these names
if TYPE_CHECKING:
    from afm.sandbox.inside.harden import Refusal, answer_lock_queries, filter_calls, harden, look_started  # noqa: TC004


def main() -> "Refusal":
    """Fork the program, wait for it and report its end. Returns only in the program, with its report."""
    import _signal  # type: ignore[import-not-found]  # `signal` would import enum

    report = int(sys.argv[1])
    take_files(sys.argv[2], *sys.argv[7:9])
    harden(sys.argv[5].split(":"))
    if sys.argv[6]:
        filter_calls(bytes.fromhex(sys.argv[6]))
    refusal = Refusal()
    os.write(report, b"ready\n")
    child = os.fork()
    if child == 0:
        return refusal
    # Process 1 is immune to all signals except those it handles, and Python handles SIGINT.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.closerange(0, 3)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == child:
            break
    summary = b"%d %d\n" % (status, usage.ru_maxrss)
    os.write(report, summary + b"memory\n" * refusal.ended(child))
    os._exit(0)


def take_files(path: str, code: str, stderr: str) -> None:
    """Take over the descriptors that the jail passes: the program, and the target of its errors."""
    if code:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        while data := os.read(int(code), 1 << 20):
            os.write(file, data)
        os.close(file)
        os.close(int(code))
    if stderr:
        os.dup2(int(stderr), 2)
        os.close(int(stderr))


def prepare() -> None:
    """Set the limits and make the interpreter look as if it ran the program's file. Runs in the child."""
    import resource

    _, _, path, limits, imports, *_ = sys.argv
    os.closerange(3, 65536)
    answer_lock_queries()
    for item in limits.split(","):
        name, soft, hard = item.split("=")
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(soft), int(hard)))
    look_started(path, [entry for entry in imports.split(":") if entry])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a stopped program keeps its output


def execute(refusal: "Refusal") -> None:
    """Run the program as ``__main__``. A traceback shows only its frames."""
    import sys  # the global names are deleted before the program runs

    path = sys.argv[0]
    scope = sys.modules["__main__"].__dict__
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
    scope["__doc__"] = None
    scope["__file__"] = path
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib is too slow to import
            source = file.read()
        exec(compile(source, path.rpartition("/")[2], "exec", dont_inherit=True), scope)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the border to the program
        trace = error.__traceback__
        refusal.note(error)
        error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        return
    raise SystemExit(1)


if __name__ == "__main__":
    refusal = main()
    prepare()
    execute(refusal)
