"""Programs that run inside the sandbox, as text: they import nothing of the project but each other.

Python 3.9 must understand them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from afm.sandbox.inside import ending

_DROPPED = re.compile(r"^from (?:__future__|afm\.\S+) import (?:\([^)]*\)|.*)\n", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
_WELL_KNOWN = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools json math "
    "networkx numpy operator pandas queue random re scipy sortedcontainers statistics string sympy threading types typing"
)


@cache
def program(*names: str) -> str:
    """One program made of the modules ``names`` of this folder, the last of which has the ``main``.

    ``ending`` is the sandbox's own.
    """
    texts = [_path(name).read_text(encoding="utf-8") for name in names]
    return "from __future__ import annotations\n" + "".join(_DROPPED.sub("", text) for text in texts)


def _path(name: str) -> Path:
    return Path(ending.__file__) if name == "ending" else Path(__file__).with_name(f"{name}.py")


def shared_modules(source: str) -> list[str]:
    """Well-known modules that ``source`` seems to import: worth importing once before many cases are forked."""
    return sorted(set(_IMPORT.findall(source)).intersection(_WELL_KNOWN.split()))


def mentioning(text: str, names: list[str]) -> str:
    """``text`` with a comment that names modules: a sandbox with warm interpreters picks one that has them."""
    return f"{text}# for {' '.join(names)}\n" if names else text
