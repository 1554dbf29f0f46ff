"""The entry of the ``afm`` command: expected errors end with one message and a documented exit status."""

from __future__ import annotations

import os
import sys

from afm.errors import AfmError, UsageError


def main() -> None:
    """Run the command line. Everything else is imported here, so that Ctrl-C stops even the imports cleanly."""
    try:
        from afm.cli.commands import run
        from afm.processes import follow_parent

        follow_parent()
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UsageError as error:
        _fail(error, 2)
    except (AfmError, OSError) as error:
        _fail(error, 1)


def _fail(error: AfmError | OSError, status: int) -> None:
    if os.environ.get("AFM_TRACEBACK", "0") not in ("", "0", "false"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(status)


def _message(error: AfmError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}{_NEXT_STEPS.get(type(error), '')}"
    return str(error)


_NEXT_STEPS: dict[type[OSError], str] = {
    FileExistsError: "; expected a folder, choose another --output-dir",
    NotADirectoryError: "; expected a folder, choose another --output-dir",
    FileNotFoundError: "; check the path",
    PermissionError: "; choose a place that you may read and write",
}


if __name__ == "__main__":
    main()
