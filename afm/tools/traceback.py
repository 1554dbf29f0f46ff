"""Tracebacks reduced to what the author of the program can act on."""

from __future__ import annotations

import re

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]*)", line \d+')


def shortened(stderr: str) -> str:
    """``stderr`` without the frames of library files in its tracebacks.

    Library files are those with an absolute path; the program's own file is called by its name alone.
    Everything outside a traceback stays as it is.
    """
    kept: list[str] = []
    inside, dropping = False, False
    for line in stderr.split("\n"):
        if line == _HEADER:
            inside, dropping = True, False
        elif inside and (frame := _FRAME.match(line)):
            dropping = frame[1].startswith("/")
        elif inside and not line.startswith("    "):
            inside = line.startswith("  [Previous line repeated")
            dropping = inside and dropping
        if not dropping:
            kept.append(line)
    return "\n".join(kept)
