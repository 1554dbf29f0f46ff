"""Text from a program, made harmless and short to read: no terminal escapes, no library frames in tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor movements
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, device strings
    r"|\x1b[ -~]?"
)
_LINE_END = re.compile(r"\r+\n?")
# Control characters but tab and line feed, characters that turn the direction of writing, line and paragraph
# separators, the byte order mark, characters that no encoding can hold.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)


def plain(text: str) -> str:
    r"""``text`` without terminal escapes; other control characters are shown as ``\x07`` or ``\u202e``.

    Lines end with a line feed alone: a carriage return, with which progress bars overwrite their line, ends a
    line too.
    """
    return _INVISIBLE.sub(_render, _LINE_END.sub("\n", _ESCAPE.sub("", text)))


def _render(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


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
