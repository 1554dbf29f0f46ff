"""Text of strangers on a terminal."""

from __future__ import annotations

_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:x}" for code in range(0x7F, 0xA0)},
    **{code: f"\\u{code:x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    0x061C: "\\u061c",  # like those above it turns text around
}


def visible(text: str) -> str:
    """``text`` with what a terminal would obey, line breaks and tabs excepted, as what it shows."""
    return text.translate(_PICTURES)
