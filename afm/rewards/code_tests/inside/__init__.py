"""Programs that run inside the sandbox, as text: they import nothing of the project but each other.

Python 3.9 must understand them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_OURS = "from afm."


@cache
def program(*names: str) -> str:
    """One program made of the modules ``names`` of this folder, the last of which has the ``main``."""
    texts = [Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in names]
    lines = [
        line
        for text in texts
        for line in text.splitlines()
        if not line.startswith((_OURS, "from __future__"))
    ]
    return "from __future__ import annotations\n" + "\n".join(lines) + "\n"
