"""The Python that runs inside the sandbox, and the host paths it needs to see."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import SandboxUnavailableError
from afm.sandbox.options import host_paths
from afm.sandbox.packages import package_folders

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
    """The unprivileged user that the sandbox runs as; ``None`` keeps the caller's own ids.

    Host uid 0 never enters the sandbox: limits on processes do not hold for it, and it owns the host's files.
    """

    uid: int | None = None
    gid: int | None = None

    @classmethod
    def for_process(cls) -> Identity:
        """``nobody`` when this process is root, else the caller itself."""
        if os.geteuid() != 0:
            return cls()
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)

    def popen_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make ``subprocess.Popen`` start a program as this user."""
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python for the sandbox.

    Attributes:
        binary: The executable itself, symbolic links resolved.
        imports: Import paths beside the standard library (the packages installed for it).
        binds: Host paths it needs, none inside another.
        links: Symbolic links of the root directory that lead to them: (name, target).
        packages: Folders of further packages: (host path, path inside).
    """

    binary: str
    version: tuple[int, int]
    imports: tuple[str, ...]
    binds: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...] = ()

    def has(self, package: str) -> bool:
        """Whether a package is installed for it, besides the standard library."""
        folders = (*(path for path, _ in self.packages), *self.imports)
        return any(
            Path(folder, package).exists() or Path(folder, f"{package}.py").exists() for folder in folders
        )


def find_interpreter(
    python: str | None, identity: Identity, packages: Sequence[str] | None = None
) -> Interpreter:
    """Look up ``python`` (``/usr/bin/python3`` when ``None``) as the sandbox's user sees it.

    Args:
        packages: Folders of further packages; those of :func:`afm.sandbox.packages.install` when ``None``.

    Raises:
        SandboxUnavailableError: It or one of ``packages`` is not readable by that user, or it is too old.
        ConfigError: One of ``packages`` would show the host itself.
    """
    given = python or "/usr/bin/python3"
    path = shutil.which(given)
    if path is None:
        raise SandboxUnavailableError(
            f"the sandbox's Python {given!r} does not exist; install one that every user can read "
            "(apt-get install python3) or name one with the option `python`"
        )
    facts = _ask(path, identity)
    version = (int(facts["version"][0]), int(facts["version"][1]))
    if version < _OLDEST:
        raise SandboxUnavailableError(f"the sandbox's Python {given!r} is {version}, expected 3.9 or newer")
    binary, stdlib = str(facts["binary"]), str(facts["stdlib"])
    paths = [str(entry) for entry in facts["paths"]]
    libraries = _libraries([binary, *facts["dynamic"]])
    if packages is None:
        extra = [str(path) for path in package_folders(version) if _readable(str(path), identity)]
    else:
        check_readable("packages", packages, identity)
        extra = list(packages)
    folders = [os.path.realpath(folder) for folder in extra]
    installed = [entry for entry in paths if not _inside(entry, stdlib) and Path(entry).is_dir()]
    packages_at = tuple((folder, f"/packages/{number}") for number, folder in enumerate(folders))
    imports = (*(inside for _, inside in packages_at), *installed)
    wanted = {binary, stdlib, *paths, *libraries, *filter(os.path.exists, _EXTRA_FILES)}
    binds = tuple(sorted(p for p in wanted if not any(_inside(p, other) for other in wanted if other != p)))
    return Interpreter(binary, version, imports, binds, _links(), packages_at)


def check_readable(name: str, paths: Sequence[str], identity: Identity) -> None:
    """Refuse host paths of the option ``name`` that programs could not see.

    Raises:
        SandboxUnavailableError: One does not exist for the sandbox's user.
        ConfigError: One would show the host itself.
    """
    for path in host_paths(name, paths):
        if not _readable(path, identity):
            user = "nobody, the sandbox's user," if identity.uid is not None else "this user"
            raise SandboxUnavailableError(
                f"sandbox option {name}: {path} does not exist, or {user} cannot read it"
            )


def _readable(folder: str, identity: Identity) -> bool:
    """Whether the sandbox's user can read the file or enter the folder."""
    command = ["/usr/bin/env", "ls", "--", folder]
    done = subprocess.run(command, capture_output=True, check=False, cwd="/", **identity.popen_arguments())
    return done.returncode == 0


def _ask(path: str, identity: Identity) -> dict[str, Any]:
    """Run a fixed question (no user code) in the interpreter as the sandbox's user."""
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
            f"the sandbox's Python {path!r} does not start as {user}: {str(reason).strip()[-300:]}; "
            "a Python below a home directory is unreadable to others: name another with the option `python`"
        ) from None
    return answer


def _libraries(files: list[str]) -> set[str]:
    """Where the shared libraries of ``files`` are: the system's library folders, and single files elsewhere."""
    try:
        done = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(f"ldd cannot list the libraries of {files[0]}: {error}") from None
    named = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, flags=re.MULTILINE)
    found: set[str] = set()
    for name in named:
        for library in (name, os.path.realpath(name)):
            folder = os.path.realpath(os.path.dirname(library))  # noqa: PTH120 - a name, not a file
            found.add(folder if _SYSTEM_FOLDER.fullmatch(folder) else library)
    return found


def _links() -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, str(Path(name).readlink()))
        for name in ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
        if Path(name).is_symlink()
    )


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
