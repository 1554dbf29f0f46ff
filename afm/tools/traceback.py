"""Tracebacks reduced to what the author of the program can act on."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEADERS = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_MARGIN = re.compile(r" *[|+] ")  # in front of each line that belongs to an exception group
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_FIRST, _LAST = 4, 8


def shortened(stderr: str) -> str:
    """``stderr`` without the frames of library files in its tracebacks, and without the middle of deep recursions.

    Library files are those with an absolute path and those frozen into the interpreter; the program's own
    file is called by its name alone. Everything outside a traceback stays as it is.
    """
    kept: list[str] = []
    frames: list[list[str]] | None = None
    dropping = False
    for line in stderr.split("\n"):
        content = _MARGIN.sub("", line, count=1) if _MARGIN.match(line) else line
        if content in _HEADERS:
            kept += [*_selected(frames or ()), line]
            frames, dropping = [], False
        elif frames is None:
            kept.append(line)
        elif frame := _FRAME.match(content):
            dropping = frame[1].startswith(("/", "<frozen "))
            if not dropping:
                frames.append([line])
        elif content.startswith(("    ", "  [Previous line repeated")):
            if not dropping:
                (frames[-1] if frames else kept).append(line)
        else:
            kept += [*_selected(frames), line]
            frames = None
    return "\n".join([*kept, *_selected(frames or ())])


def _selected(frames: Iterable[list[str]]) -> list[str]:
    """Lines of the outermost and the innermost frames, the ones between them counted."""
    frames = list(frames)
    missing = len(frames) - _FIRST - _LAST
    if missing > 0:
        frames[_FIRST:-_LAST] = [[f"  [... {missing} frames cut ...]"]]
    return [line for frame in frames for line in frame]
