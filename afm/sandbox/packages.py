"""Packages for the sandbox's Python, in a folder of their own that every user can read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from afm.errors import SandboxError

WARM = (("numpy", "sympy"), ("scipy", "pandas"))
"""What programs of agents import most, in groups: a program of the second group needs the first as well."""

MODULES = {
    "numpy": ("numpy", "numpy.random", "numpy.linalg", "numpy.fft"),
    "scipy": ("scipy", "scipy.optimize", "scipy.stats", "scipy.special", "scipy.integrate", "scipy.linalg"),
}
"""Modules that are loaded beforehand for a package, where that is more than the package itself."""

EXERCISES = {
    "numpy": """
import numpy as np
a = np.arange(6.0).reshape(2, 3); str(a); a @ a.T; np.linalg.inv(np.eye(2)); np.fft.fft(a); np.random.default_rng(0).random()
""",
    "sympy": """
import sympy as s
x, y = s.symbols("x y")
for value in (s.expand((x + 1) ** 2), s.factor(x**2 - 1), s.solve(x**2 - 2, x), s.solve([x + y - 1, x - y], [x, y]),
              s.simplify(s.sin(x) ** 2 + s.cos(x) ** 2), s.integrate(x**2 * s.sin(x), x), s.diff(x**2, x),
              s.limit(s.sin(x) / x, x, 0), s.summation(x, (x, 1, 10)), s.Matrix([[1, 2], [3, 4]]).inv(),
              s.N(s.pi, 20), s.factorint(360), s.nsimplify(0.5), s.Rational(1, 3), s.solveset(x**2 - 1, x),
              s.sympify("x + 1"), s.binomial(5, 2), s.isprime(7), s.nsolve(x**2 - 2, x, 1), s.series(s.exp(x), x, 0, 3)):
    str(value); s.latex(value)
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}); str(frame); frame.groupby("b").sum(); frame.merge(frame, on="b")
""",
}
"""What is run beforehand for a package: much of it is loaded and computed at first use only."""

STANDARD = (
    *("random", "json", "re", "math", "itertools", "collections", "functools", "operator", "string"),
    *("fractions", "decimal", "statistics", "datetime", "heapq", "bisect", "typing", "dataclasses"),
    *("copy", "time", "traceback", "linecache", "textwrap", "io", "enum", "queue", "struct", "tempfile"),
)
"""Standard modules that every zygote loads beforehand."""


_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '(\w+)'\s*\Z", re.MULTILINE)


def package_folders(version: tuple[int, int]) -> tuple[Path, ...]:
    """Where :func:`install` puts packages for a Python: for every user of the machine, and for this one."""
    name = f"python{version[0]}.{version[1]}"
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path("/var/lib/afm/sandbox") / name, home / "afm" / "sandbox" / name


def installation_hint(stderr: str) -> str | None:
    """The command that installs the package a program died without; ``None`` for any other end.

    Only packages of :data:`WARM` are named: a program can print whatever it likes.
    """
    match = _NO_MODULE.search(stderr)
    if match is None or match[1] not in {name for group in WARM for name in group}:
        return None
    return f"{match[1]} is not installed in the sandbox; `afm sandbox install {match[1]}` installs it"


def install(
    packages: Sequence[str], python: str, version: tuple[int, int], folder: Path | None = None
) -> Path:
    """Install ``packages`` for the sandbox's Python; started as root, for every user.

    Args:
        python: The sandbox's Python. It needs no pip: this process's own is used.
        folder: Another place than :func:`package_folders` names.

    Raises:
        SandboxError: pip failed.
    """
    target = folder or package_folders(version)[0 if os.geteuid() == 0 else 1]
    target.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--upgrade", "--target", str(target)),
        *("--python-version", f"{version[0]}.{version[1]}", *packages),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(
            f"pip could not install {' '.join(packages)} for {python}: {done.stderr.strip()[-500:]}"
        )
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return target
