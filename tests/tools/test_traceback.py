"""Which lines of a traceback an agent is shown."""

from __future__ import annotations

import pytest

from afm.tools.code import shortened

LIBRARY = '  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode\n    obj, end = self.scan_once(s, idx)\n               ^^^^^^^^^^^^^^^^^^^^^^\n'
OWN = '  File "main.py", line 2, in <module>\n    json.loads("{")\n'
HEADER = "Traceback (most recent call last):\n"


BEFORE = (
    HEADER + OWN + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
)
REPEATED = "  [Previous line repeated 995 more times]\n"
SYNTAX = '  File "main.py", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("", ""),
        ("a warning\n", "a warning\n"),
        (HEADER + OWN + LIBRARY + "ValueError: x\n", HEADER + OWN + "ValueError: x\n"),
        (HEADER + LIBRARY + OWN + LIBRARY + "ValueError\n", HEADER + OWN + "ValueError\n"),
        (BEFORE + HEADER + OWN + LIBRARY + "ValueError: y\n", BEFORE + HEADER + OWN + "ValueError: y\n"),
        (LIBRARY, LIBRARY),
        (HEADER + OWN + REPEATED + "RecursionError: x\n",) * 2,
        (HEADER + OWN + LIBRARY + REPEATED + "RecursionError: x\n", HEADER + OWN + "RecursionError: x\n"),
        (SYNTAX, SYNTAX),
    ],
)
def test_library_frames_are_dropped_and_nothing_else(stderr: str, expected: str) -> None:
    assert shortened(stderr) == expected


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "main.py", line 1, in <module>
  |     asyncio.run(main())
  |   File "/usr/lib/python3.11/asyncio/runners.py", line 190, in run
  |     return runner.run(main)
  |            ^^^^^^^^^^^^^^^^
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "<frozen importlib._bootstrap>", line 1176, in _find_and_load
    |   File "main.py", line 3, in work
    |     json.loads(text)
    |   File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode
    |     obj, end = self.scan_once(s, idx)
    | ValueError: x
    +------------------------------------
"""


def test_exception_groups_lose_their_library_frames_too() -> None:
    own = [line for line in GROUP.split("\n") if "/usr/lib" not in line and "frozen" not in line]
    library_code = ("return runner.run", "^^^^^^^^", "obj, end")
    assert shortened(GROUP).split("\n") == [
        line for line in own if not any(word in line for word in library_code)
    ]


def test_the_middle_of_a_deep_recursion_is_cut_and_counted() -> None:
    frames = [f'  File "main.py", line {number}, in f\n    g({number})\n' for number in range(1000)]
    kept = [*frames[:4], "  [... 988 frames cut ...]\n", *frames[-8:]]
    error = "RecursionError: deep\n"
    assert shortened("".join([HEADER, *frames, error])) == "".join([HEADER, *kept, error])
