"""Entry point of the ``afm`` command. Expected errors end with one message and a documented exit status."""

from __future__ import annotations

import os
import sys

from afm.errors import AfmError, UsageError


def main() -> None:
    """Run the command line. The imports are inside, so that Ctrl-C also stops them cleanly."""
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
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop from "):  # Python 3.11's error of Path.resolve
            raise
        _fail(UsageError(f"{error}; correct the link, or choose another path"), 1)


def _fail(error: AfmError | OSError, status: int) -> None:
    if os.environ.get("AFM_TRACEBACK", "0") not in ("", "0", "false"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(status)


def _message(error: AfmError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {_REASONS.get(type(error), error.strerror)}"
    return str(error)


_REASONS: dict[type[OSError], str] = {
    FileExistsError: "is a file; expected a folder, choose another --output-dir",
    NotADirectoryError: "a part of this path is a file; expected a folder, choose another --output-dir",
    FileNotFoundError: "no such file, and none can be written there; check the path, or choose another place",
    PermissionError: "permission denied; choose a place that you may read and write",
    IsADirectoryError: "is a folder; expected a file",
}
"""What failed and the next step, by the error of the system."""


if __name__ == "__main__":
    main()
