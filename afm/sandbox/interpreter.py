"""The Python inside the sandbox: the host paths it needs and the packages it has."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, SandboxError, SandboxUnavailableError
from afm.sandbox.base import SandboxSettings, host_path

WARM = (("numpy", "sympy"), ("scipy", "pandas"))
"""The packages that agents' programs import most, in groups. Each group also needs the groups before it."""

MODULES = {
    "numpy": ("numpy", "numpy.random", "numpy.linalg", "numpy.fft"),
    "scipy": ("scipy", "scipy.optimize", "scipy.stats", "scipy.special", "scipy.integrate", "scipy.linalg"),
}
"""The modules to load in advance for a package, if they are more than the package itself."""

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
"""Programs to run in advance for a package, because packages load and compute much only at first use."""

STANDARD = (
    *("random", "json", "re", "math", "itertools", "collections", "functools", "operator", "string"),
    *("fractions", "decimal", "statistics", "datetime", "heapq", "bisect", "typing", "dataclasses"),
    *("copy", "time", "traceback", "linecache", "textwrap", "io", "enum", "queue", "struct", "tempfile"),
)
"""The standard modules that every zygote loads in advance."""


_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '(\w+)'\s*\Z", re.MULTILINE)


def package_folders(version: tuple[int, int]) -> tuple[Path, ...]:
    """Return the folders of :func:`install` for a Python: the one for all users, then the one for this user."""
    name = f"python{version[0]}.{version[1]}"
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path("/var/lib/afm/sandbox") / name, home / "afm" / "sandbox" / name


def installation_hint(stderr: str) -> str | None:
    """Return advice on how to install the package that a program lacked, or ``None`` for any other end.

    Only packages in :data:`WARM` get advice, because a program can print any text.
    """
    match = _NO_MODULE.search(stderr)
    if match is None or match[1] not in {name for group in WARM for name in group}:
        return None
    return f"{match[1]} is not installed in the sandbox; `afm sandbox install {match[1]}` installs it"


def install(
    packages: Sequence[str], python: str, version: tuple[int, int], folder: Path | None = None
) -> Path:
    """Install ``packages`` for the sandbox's Python, as root for every user, and return their folder.

    Args:
        python: The sandbox's Python. It needs no pip, because the pip of this process is used.
        folder: The target, by default one of :func:`package_folders`.

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


_ASK = """
import glob, json, os, sys, sysconfig
binary = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
paths = [os.path.realpath(p) for p in sys.path if os.path.exists(p)]
dynamic = glob.glob(os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload", "*.so"))
print(json.dumps({"binary": binary, "version": sys.version_info[:2], "paths": paths,
                  "stdlib": os.path.realpath(sysconfig.get_path("stdlib")), "dynamic": dynamic}))
"""
_EXTRA_FILES = ("/usr/share/zoneinfo", "/etc/alternatives")
_SYSTEM_FOLDER = re.compile(r"(?:/usr)?/lib(?:32|64|/[a-z0-9_]+-linux-[a-z0-9]+)?")
_OLDEST = (3, 9)


@dataclass(frozen=True, slots=True)
class Identity:
    """The unprivileged user of the sandbox. ``None`` keeps the caller's ids.

    The host's uid 0 never enters the sandbox, because process limits do not apply to it and it owns the host's files.
    """

    uid: int | None = None
    gid: int | None = None

    @classmethod
    def for_process(cls) -> Identity:
        """Return ``nobody`` if this process is root, else the caller's own user."""
        if os.geteuid() != 0:
            return cls()
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)

    def popen_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which ``subprocess.Popen`` starts a program as this user."""
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python for the sandbox.

    Attributes:
        binary: Path of the executable, with symbolic links resolved.
        imports: Import paths of installed packages, in addition to the standard library.
        binds: Host paths that it needs. None is inside another.
        links: Symbolic links in the root directory that lead to them, as (name, target).
        packages: Folders of further packages, as (host path, path inside).
    """

    binary: str
    version: tuple[int, int]
    imports: tuple[str, ...]
    binds: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))} ({self.binary})"

    def has(self, package: str) -> bool:
        """Return whether a package outside the standard library is installed."""
        folders = (*(path for path, _ in self.packages), *self.imports)
        return any(
            Path(folder, package).exists() or Path(folder, f"{package}.py").exists() for folder in folders
        )


def find_interpreter(settings: SandboxSettings, identity: Identity) -> Interpreter:
    """Find the sandbox's Python, as its user sees it.

    Raises:
        SandboxUnavailableError: The Python is too old, or the user cannot read it or a path of ``packages`` or ``binds``.
        ConfigError: One of these paths would expose the host itself.
    """
    name = settings.python or "/usr/bin/python3"
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailableError(
            f"the sandbox's Python {name!r} {'is not a program' if Path(name).exists() else 'does not exist'}; install one "
            "that every user can read (apt-get install python3), or name another: --python, or `python` in a YAML"
        )
    facts = _ask(path, identity)
    version = (int(facts["version"][0]), int(facts["version"][1]))
    if version < _OLDEST:
        raise SandboxUnavailableError(
            f"the sandbox's Python {name!r} is version {version[0]}.{version[1]}, expected 3.9 or newer"
        )
    binary, stdlib = str(facts["binary"]), str(facts["stdlib"])
    paths = [str(entry) for entry in facts["paths"]]
    libraries = _libraries((binary, *facts["dynamic"]))
    extra = list(settings.packages or ())
    if settings.packages is None:
        extra = [str(path) for path in package_folders(version) if _readable(str(path), identity)]
    _check_readable("packages", settings.packages or (), identity)
    _check_readable("binds", settings.binds, identity)
    folders = [os.path.realpath(folder) for folder in extra]
    installed = [entry for entry in paths if not _inside(entry, stdlib) and Path(entry).is_dir()]
    packages_at = tuple((folder, f"/packages/{number}") for number, folder in enumerate(folders))
    imports = (*(inside for _, inside in packages_at), *installed)
    wanted = {binary, stdlib, *paths, *libraries, *filter(os.path.exists, _EXTRA_FILES)}
    binds = tuple(sorted(p for p in wanted if not any(_inside(p, other) for other in wanted if other != p)))
    return Interpreter(binary, version, imports, binds, _links(), packages_at)


def _check_readable(name: str, paths: Sequence[str], identity: Identity) -> None:
    """Refuse host paths of the option ``name`` that the user cannot read, or that now lead to the whole host."""
    for path in paths:
        try:
            host_path(path)
        except ValueError as error:
            raise ConfigError(f"sandbox option {name}: got {path!r}, expected {error}") from None
        if not _readable(path, identity):
            user = "nobody, the sandbox's user," if identity.uid is not None else "this user"
            raise SandboxUnavailableError(
                f"sandbox option {name}: {path} does not exist, or {user} cannot read it"
            )


def _readable(folder: str, identity: Identity) -> bool:
    """Return whether the sandbox's user can read the file or list the folder."""
    command = ["/usr/bin/env", "ls", "--", folder]
    done = subprocess.run(command, capture_output=True, check=False, cwd="/", **identity.popen_arguments())
    return done.returncode == 0


def _ask(path: str, identity: Identity) -> dict[str, Any]:
    """Run a fixed query, never user code, in the interpreter as the sandbox's user."""
    try:
        done = subprocess.run(
            [path, "-I", "-B", "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            check=True,
            env={"PATH": "/usr/bin:/bin"},
            **identity.popen_arguments(),
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        user = "nobody" if identity.uid is not None else "this user"
        reason = getattr(error, "stderr", None) or error
        raise SandboxUnavailableError(
            f"the sandbox's Python {path!r} does not start as {user}: {str(reason).strip()[-300:]}; name one "
            "that other users can read, which excludes home directories: --python, or `python` in a YAML"
        ) from None
    return answer


@cache
def _libraries(files: tuple[str, ...]) -> frozenset[str]:
    """Return the places of the shared libraries of ``files``: system library folders, and single files elsewhere.

    The result is cached because ldd takes most of the time that a sandbox needs to open.
    """
    try:
        done = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(f"ldd cannot list the libraries of {files[0]}: {error}") from None
    named = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, flags=re.MULTILINE)
    folders: set[str] = set()
    for name in named:
        for library in (name, os.path.realpath(name)):
            folder = os.path.realpath(os.path.dirname(library))  # noqa: PTH120 - a name, not a file
            folders.add(folder if _SYSTEM_FOLDER.fullmatch(folder) else library)
    return frozenset(folders)


def _links() -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, str(Path(name).readlink()))
        for name in ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
        if Path(name).is_symlink()
    )


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
