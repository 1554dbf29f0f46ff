"""Entry point of the ``afm`` command. Expected errors end with one message and a documented exit status."""

from __future__ import annotations

import os
import sys

from afm.errors import AfmError, UsageError, described


def main() -> None:
    """Run the command line. The imports are inside, so that Ctrl-C also stops them cleanly."""
    try:
        from afm.cli.commands import run
        from afm.processes import follow_parent

        follow_parent()
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _discard_output()
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
    from afm.terminal import keyed

    print(f"error: {described(error, 'output_dir' if keyed() else '--output-dir')}", file=sys.stderr)
    _discard_output()
    sys.exit(status)


def _discard_output() -> None:
    """Discard what standard output does not take. Python would write it again at the end, fail, and exit with 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
