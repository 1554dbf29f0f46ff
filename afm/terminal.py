"""Terminal output: text from untrusted sources, counts, and progress."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:x}" for code in range(0x7F, 0xA0)},
    **{code: f"\\u{code:x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    0x061C: "\\u061c",  # like those above it reverses the direction of text
}


def visible(text: str) -> str:
    """Return ``text`` with visible symbols for control characters, except line breaks and tabs."""
    return text.translate(_PICTURES)


ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor movements
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, device strings
    r"|\x1b[ -~]?"
)
"""One complete escape sequence."""
_LINE_END = re.compile(r"\r+\n?")
# Control characters but tab and line feed, characters that turn the direction of writing, line and paragraph
# separators, the byte order mark, characters that no encoding can hold.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)


def plain(text: str) -> str:
    r"""Return ``text`` without terminal escapes. Other control characters become ``\x07`` or ``\u202e``.

    Lines end with a line feed. A carriage return, with which progress bars overwrite their line, also ends a line.
    """
    return _INVISIBLE.sub(_render, _LINE_END.sub("\n", ESCAPE.sub("", text)))


def _render(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: ``1 question``, ``2,000 questions``, with an irregular plural in ``several``."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def afm_command() -> str:
    """Return how to call this command line: ``afm``, or its path if it is not on the PATH."""
    if shutil.which("afm"):
        return "afm"
    script = Path(sys.executable).with_name("afm")
    return shlex.quote(str(script)) if script.is_file() else f"{shlex.quote(sys.executable)} -m afm.cli.main"


def keyed() -> bool:
    """Return whether the running command takes settings as ``key=VALUE``. The others have options."""
    return " ".join(sys.argv[1:3]).startswith(_KEYED)


_KEYED = ("eval", "sft", "rl", "doctor", "data queries", "data expand")


class ProgressView:
    """A counter that rewrites its line on a terminal and prints a line every 15 s elsewhere.

    Args:
        stream: Where to print; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._last = 0.0
        self._open = False

    def line(self, text: str) -> None:
        """Print a complete line."""
        self.clear()
        print(text, flush=True, file=self._stream)
        self._last = time.monotonic()

    def close(self) -> None:
        """End the line of the counter."""
        if self._open:
            print(file=self._stream)
            self._open = False

    def update(self, what: str, done: int, total: int | None, note: str = "") -> None:
        """Show the progress of a stage. ``note`` follows the count."""
        now = time.monotonic()
        if done != total and now - self._last < (0.1 if self._terminal else 15.0):
            return
        self._last = now
        self.show(f"      {what}: {done:,}" + (f" of {total:,}" if total else "") + note)

    def rows(self, what: str, done: int) -> None:
        """Show a count of rows without a known total. Short files, of fewer than 500 rows, show none."""
        if done % 500 == 0:
            self.update(what, done, None)

    def clear(self) -> None:
        """Remove the line that is rewritten."""
        if self._open:
            print("\r\x1b[K", end="", flush=True, file=self._stream)
            self._open = False

    def show(self, text: str) -> None:
        """Show what happens now: rewrite the line on a terminal, print one elsewhere."""
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", flush=True, file=self._stream)
            self._open = True
        else:
            print(text, flush=True, file=self._stream)
