"""What is left of text that was meant for a terminal."""

from __future__ import annotations

import pytest

from afm.terminal import plain


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[1;31mred\x1b[0m \x1b[2J\x1b[Hhome", "red home"),
        ("\x1b]0;owned\x07title \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "title link"),
        ("\x1b]0;never closed\nnext", "\nnext"),
        ("\x9b31mred \x90dcs\x9cend", "red end"),
        ("\x1bcreset \x1b", "reset "),
        ("10%\r20%\r\n30%\r\r\n", "10%\n20%\n30%\n"),
        ("bell\x07 null\x00 back\x08", "bell\\x07 null\\x00 back\\x08"),
        ("abc\u202edef\u2066 \u2028x \ufeff", "abc\\u202edef\\u2066 \\u2028x \\ufeff"),
        ("\ud800 \u200d\u00e9 \U0001f600 \ufffd", "\\ud800 \u200d\u00e9 \U0001f600 \ufffd"),
    ],
)
def test_only_text_remains(text: str, left: str) -> None:
    assert plain(text) == left


def test_what_is_removed_cannot_join_to_a_new_escape() -> None:
    for text in ("\x1b\x1b[0m[31mx", "\x1b[\x1b[0m31mx", "\x1b]\x1b]0;a\x07b\x07", "\x9b\x9b\x9b"):
        assert not set(plain(text)) & {"\x1b", "\x9b", "\x07"}
        assert plain(plain(text)) == plain(text)
