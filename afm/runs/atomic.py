"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from glob import escape
from pathlib import Path

from afm.errors import DataError

_LEFT_S = 3_600
"""Age at which an abandoned temporary file is removed; its writer may run on another machine."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path next to ``path`` that takes its place when the block ends well, else is removed.

    A reader, a kill or a power failure sees the old content or the new, never half of it.
    """
    with _removed(path) as temporary:
        yield temporary
        _sync(temporary)  # before the rename: else the new name may outlive its content
        temporary.replace(path)
        _sync(path.parent)


@contextmanager
def replacing_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """As :func:`replacing`, for files that are only right together: a kill leaves all old ones, all new ones, or no first one.

    Without the first file no job starts from a mixture. A file that the block does not write is absent afterwards.
    """
    with ExitStack() as stack:
        temporaries = [stack.enter_context(_removed(path)) for path in paths]
        try:
            yield temporaries
        except DataError as error:
            names = {str(temporary): str(path) for temporary, path in zip(temporaries, paths, strict=True)}
            raise DataError(
                error.message, path=names.get(error.path or "", error.path), line=error.line
            ) from error
        complete = [pair for pair in zip(temporaries, paths, strict=True) if pair[0].exists()]
        for temporary, _ in complete:
            _sync(temporary)
        for path in paths:
            path.unlink(missing_ok=True)
        for temporary, path in reversed(complete):
            temporary.replace(path)
        for folder in {path.parent for path in paths}:
            _sync(folder)


@contextmanager
def _removed(path: Path) -> Iterator[Path]:
    """A temporary path next to ``path``, which is gone after the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        if _is_left(left):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    if path.is_dir():
        raise DataError("is a folder; expected the name of a file", path=str(path))
    try:
        yield temporary
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_left(temporary: Path) -> bool:
    """Whether a process that was killed left it: none of that number is here, and none elsewhere has written for long."""
    number = temporary.suffixes[-2].removeprefix(".")
    try:
        aged = time.time() - temporary.stat().st_mtime > _LEFT_S
        return number.isdigit() and aged and not Path("/proc", number).exists()
    except OSError:
        return False


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole of ``path``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
