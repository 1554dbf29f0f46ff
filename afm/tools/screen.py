"""Text from a program, made harmless to read: for a terminal, a log and a model alike."""

from __future__ import annotations

import re

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
    return _INVISIBLE.sub(_shown, _LINE_END.sub("\n", _ESCAPE.sub("", text)))


def _shown(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
