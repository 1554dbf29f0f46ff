"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path

from afm.errors import NO_SPACE, DataError

_LEFT_S = 3_600
"""Age in seconds at which a temporary file of another machine or container is removed, where its writer may live."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path`` that replaces it if the block succeeds, and is removed otherwise.

    Readers see the old content or the new, never a part of it, even after a kill or a power failure.
    """
    with _removed(path) as temporary:
        yield temporary
        _sync(temporary)  # before the rename, or the new name may survive a crash without its content
        temporary.replace(path)
        _sync(path.parent)


@contextmanager
def replacing_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Replace several files that belong together, as :func:`replacing` does for one.

    A kill leaves all old files, all new files, or no first file. Without the first file, no job starts from a mixture.
    A file that the block does not write is absent afterwards.
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
    """Yield a temporary path next to ``path``, and remove it after the block.

    If the block fails, the folders that were created for it are removed, too.
    """
    if path.is_dir():
        raise DataError("is a folder; expected the name of a file", path=str(path))
    created = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        if _is_left(left):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{_process_space()}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    failed = True
    try:
        yield temporary
        failed = False
    except OSError as error:
        unnamed = error.filename is None and error.errno in NO_SPACE  # writing names no file
        if unnamed or str(error.filename) == str(temporary):
            error.filename = str(path)  # the user knows this name
        raise
    finally:
        temporary.unlink(missing_ok=True)
        if failed:
            with suppress(OSError):  # another process uses the folder
                for folder in created:
                    folder.rmdir()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _process_space() -> str:
    """Return a name for the process numbers that are seen here: those of this start of the machine, or of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        container = Path("/proc/self/ns/pid").readlink()
        return hashlib.sha256(f"{boot}{container}".encode()).hexdigest()[:8]
    except OSError:
        return "unknown"


def _is_left(temporary: Path) -> bool:
    """Return whether a killed process left the file: it is not running, and it ran here, or the file is old."""
    *_, space, number, _ = temporary.name.split(".")
    try:
        aged = time.time() - temporary.stat().st_mtime > _LEFT_S
        here = space == _process_space() != "unknown"
        if not number.isdigit() or not (aged or here):
            return False
        os.kill(int(number), 0)  # sends nothing; /proc may hide the processes of other users
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
