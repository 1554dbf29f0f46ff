"""Which lines of a traceback an agent is shown."""

from __future__ import annotations

import pytest

from afm.tools.traceback import shortened

LIBRARY = '  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode\n    obj, end = self.scan_once(s, idx)\n               ^^^^^^^^^^^^^^^^^^^^^^\n'
OWN = '  File "main.py", line 2, in <module>\n    json.loads("{")\n'
HEADER = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("", ""),
        ("a warning\n", "a warning\n"),
        (HEADER + OWN + LIBRARY + "ValueError: x\n", HEADER + OWN + "ValueError: x\n"),
        (HEADER + LIBRARY + OWN + LIBRARY + "ValueError\n", HEADER + OWN + "ValueError\n"),
        (
            HEADER
            + OWN
            + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
            + HEADER
            + OWN
            + LIBRARY
            + "ValueError: y\n",
            HEADER
            + OWN
            + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
            + HEADER
            + OWN
            + "ValueError: y\n",
        ),
        (LIBRARY, LIBRARY),
        (
            HEADER + OWN + "  [Previous line repeated 995 more times]\nRecursionError: x\n",
            HEADER + OWN + "  [Previous line repeated 995 more times]\nRecursionError: x\n",
        ),
        (
            HEADER + OWN + LIBRARY + "  [Previous line repeated 9 more times]\nRecursionError: x\n",
            HEADER + OWN + "RecursionError: x\n",
        ),
        ('  File "main.py", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n',) * 2,
    ],
)
def test_library_frames_are_dropped_and_nothing_else(stderr: str, expected: str) -> None:
    assert shortened(stderr) == expected
