"""Python files of a user's own that a YAML names: imported from the YAML's folder, and only if the user wrote them.

The rule: a file is imported if this user owns it and its folder, and no folder above it holds the manifest of
``afm data download``. Everything else is refused until the command is repeated with ``--trust``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from afm.errors import ConfigError, OwnCodeError

DOWNLOAD_MANIFEST = "download.manifest.json"
"""What ``afm data download`` leaves in the folder that it fills."""
TRUST_VARIABLE = "AFM_TRUST"
"""Environment variable that ``--trust`` sets, so that worker processes know of it too."""

_FRAMEWORK = frozenset({"afm", "llamafactory_patch", "tool_servers", "verl_ext"})
"""Packages that always come from the installation, even if the YAML is in a checkout of them."""

_FOLDERS: set[str] = set()
"""Folders from which files were imported."""


def import_module_of(name: str, folder: Path | None, where: str) -> ModuleType:
    """Import the module of the class ``name``, for example ``my_tools`` of ``my_tools.Clock``.

    A file or package in ``folder`` wins over an installed one. It needs no PYTHONPATH, and its path is printed to
    standard error when it is imported.

    Args:
        folder: The folder of the YAML that names the class; ``None`` where the settings came without a file.
        where: File and key, for errors.

    Raises:
        ConfigError: There is no such module, it fails when it is imported, its name is taken, or it is not trusted.
    """
    module = name.rpartition(".")[0]
    top = module.partition(".")[0]
    try:
        if (file := _file_of(top, folder)) is not None:
            _import_file(top, file)
        return importlib.import_module(module)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name!r}: {error}") from None
    except ModuleNotFoundError as error:
        expected = (
            f"; expected {folder / top}.py or an installed package" if folder and error.name == top else ""
        )
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}{expected}") from error
    except Exception as error:  # whatever a module does when it is loaded
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {name!r} cannot be imported: {reason}") from error


def fault_of(error: Exception) -> str:
    """The error of a user's code in one line: file and line of the user's own code where it has any, type and message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if any(frame.filename.startswith(f"{folder}{os.sep}") for folder in _FOLDERS)
    ]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""
    text = " ".join(str(error).split())
    return f"{place}{type(error).__name__}{f': {text}' if text else ''}"


def own_code_error(error: Exception, what: str) -> OwnCodeError:
    """What the code of a user raised in ``what``, as an error that names the place and the next step."""
    return OwnCodeError(
        f"{what} failed: {fault_of(error)}; correct the file and run the command again. "
        "AFM_TRACEBACK=1 before the command shows the traceback"
    )


def _file_of(top: str, folder: Path | None) -> Path | None:
    """The file in ``folder`` that the module ``top`` is, if there is one."""
    if folder is None or not top or top in _FRAMEWORK:
        return None
    files = (folder / f"{top}.py", folder / top / "__init__.py")
    return next((file.resolve() for file in files if file.is_file()), None)


def _import_file(top: str, file: Path) -> None:
    """Import ``file`` as the module ``top``; it can then import files in its folder at any time."""
    if (loaded := sys.modules.get(top)) is not None:
        origin = getattr(loaded, "__file__", None)
        if origin is not None and Path(origin).resolve() == file:
            return
        raise ConfigError(f"the module name {top!r} is taken by {origin or 'Python'}; rename {file}")
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{top!r} is a module of Python; rename {file}")
    from afm.settings import load_settings  # costs each command 50 ms

    if (reason := distrust(file)) and not load_settings().afm_trust:
        raise ConfigError(
            f"{file} is Python code and was not imported, because {reason}. Read the file. To run it, repeat the command "
            f"with --trust (in Python: os.environ['{TRUST_VARIABLE}'] = '1')"
        )
    folder = str(file.parent.parent if file.name == "__init__.py" else file.parent)
    _FOLDERS.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(top, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    print(f"importing {file}", file=sys.stderr, flush=True)
    sys.modules[top] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[top]
        raise


def distrust(file: Path) -> str:
    """Why ``file`` must not be imported without ``--trust``; empty where the user wrote it."""
    for folder in file.resolve().parents:
        if (folder / DOWNLOAD_MANIFEST).is_file():
            return f"{folder} was filled by `afm data download`"
    user = os.geteuid()
    for path in (file, file.parent):
        if (owner := path.stat().st_uid) != user:
            return f"{path} belongs to another user (id {owner}, yours is {user})"
    return ""
