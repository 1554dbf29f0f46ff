"""Code that comes with a YAML: the user's own Python files, and programs that the YAML starts.

The rule: code runs without ``--trust`` if this user owns its file and its folder, and it was not downloaded.
:func:`distrust` decides. :func:`import_module_of` applies the rule to Python files next to a YAML.
:func:`check_code_of` applies it to every YAML that starts a program, lets an engine load code, or names a server, which
would get the user's keys. ``afm export`` and ``afm rl`` apply it to checkpoints, which are pickles.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType, coroutine
from typing import Any

from afm.errors import ConfigError, OwnCodeError, suggestion, utf8_advice

DOWNLOAD_MANIFEST = "download.manifest.json"
"""Name of the manifest in a folder that ``afm data download`` fills."""
_HUB_NOTES = Path(".cache/huggingface/download")
"""Folder that ``hf download --local-dir`` makes in the folder it fills."""
_HUB_CACHES = ("models--", "datasets--", "spaces--")
"""Prefixes of the repositories' folders in the Hub's cache."""
_CODE_KEYS = {
    "command": "starts a program",
    "key_variable": "sends an environment variable to a server",
    "nsjail_path": "starts a program",
    "python": "starts a program",
    "trust_remote_code": "loads the code of a model's repository",
    "url": "names a server, which gets your requests and keys",
    "urls": "names servers, which get your requests and keys",
    "verl": "can name code that verl loads",
}
"""YAML keys, at any depth, that run code or send secrets, and what each of them does."""
TRUST_VARIABLE = "AFM_TRUST"
"""Environment variable that ``--trust`` sets, so that worker processes inherit it."""

_FRAMEWORK = frozenset({"afm", "llamafactory_patch", "tool_servers", "verl_ext"})
"""Packages that always come from the installation, even if the YAML is in a checkout of them."""

_INSTALLATION = Path(__file__).resolve().parents[1]
"""Where the framework is. Its owner runs code in this process anyway."""

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
    if not module:
        files = sorted(folder.glob("*.py")) if folder else []
        holders = [
            file.stem for file in files if re.search(rb"^class %s\b" % name.encode(), file.read_bytes(), re.M)
        ]
        example = f"did you mean {holders[0]}.{name}?" if holders else f"for example my_module.{name}"
        raise ConfigError(f"{where}: got {name!r}, expected MODULE.CLASS, {example}")
    top = module.partition(".")[0]
    try:
        if (file := _file_of(top, folder)) is not None:
            _import_file(top, file)
        return importlib.import_module(module)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name!r}: {error}") from None
    except ModuleNotFoundError as error:
        if folder is None or error.name != top:
            raise ConfigError(f"{where}: {name!r} cannot be imported: {_load_fault(error)}") from error
        close = get_close_matches(top, [file.stem for file in folder.glob("*.py")], n=1)
        near = f" (did you mean {close[0]}{name.removeprefix(top)}?)" if close else ""
        expected = f"{near}; expected {folder / top}.py or an installed package"
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}{expected}") from error
    except Exception as error:  # whatever a module does when it is loaded
        raise ConfigError(f"{where}: {name!r} cannot be imported: {_load_fault(error)}") from error


def import_class(name: str, folder: Path | None, where: str, methods: Sequence[str], expected: str) -> Any:
    """Import the class ``name``, which must have the async ``methods``.

    Raises:
        ConfigError: It cannot be imported, its module has no such class, or a method is missing.
    """
    module = import_module_of(name, folder, where)
    of_module, _, wanted = name.rpartition(".")
    fit = [
        key
        for key, kind in vars(module).items()
        if inspect.isclass(kind)
        and all(inspect.iscoroutinefunction(getattr(kind, each, None)) for each in methods)
    ]
    if wanted in fit:
        return getattr(module, wanted)
    if hasattr(module, wanted):
        raise ConfigError(f"{where}: {name!r}: expected a class with {expected}")
    own = [key for key in fit if getattr(module, key).__module__ == module.__name__]
    hint = suggestion(wanted, own) if own else f"expected a class with {expected}"
    raise ConfigError(f"{where}: {of_module} has no class {wanted!r}; {hint}")


def fault_of(error: Exception, *, message: bool = True) -> str:
    """Return an error of a user's code in one line: file and line in that code, if known, then type and ``message``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if any(frame.filename.startswith(f"{folder}{os.sep}") for folder in _FOLDERS)
    ]
    file, line = (own[-1].filename, own[-1].lineno) if own else (None, None)
    text = " ".join(str(error).split()) if message else ""
    if isinstance(error, SyntaxError) and error.filename:
        file, line, text = (
            error.filename,
            error.lineno,
            f"{error.msg}: {(error.text or '').strip()}".rstrip(": "),
        )
    place = f"{Path(file).name}:{line}: " if file else ""
    return f"{place}{type(error).__name__}{f': {text}' if text else ''}"


def _load_fault(error: Exception) -> str:
    """Return why a module cannot be loaded, with file and line in the user's code, and the next step."""
    place = fault_of(error).removeprefix("ModuleNotFoundError: ").removeprefix("ImportError: ")
    if isinstance(error, SyntaxError) and "codec can't decode" in str(error) and error.filename:
        return f"{Path(error.filename).name} is not UTF-8; save it as UTF-8: {utf8_advice(Path(error.filename))}; then rename it"
    if isinstance(error, ModuleNotFoundError):
        return f"{place}; install the package, or correct the name"
    return f"{place}; correct the file and run the command again"


@coroutine
def awaiting_all(work: Coroutine[Any, Any, None], forgotten: list[str]) -> Generator[Any, Any, None]:
    """Run a user's coroutine. The places of coroutines that it makes and never awaits go to ``forgotten``."""
    step = partial(work.send, None)  # no other task can interrupt a step, so only this code is watched
    while True:
        depth = sys.get_coroutine_origin_tracking_depth()
        sys.set_coroutine_origin_tracking_depth(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
            try:
                waited = step()
            except StopIteration:
                return
            except Exception as error:
                forgotten += _close_unawaited(error)
                raise
            finally:
                sys.set_coroutine_origin_tracking_depth(depth)
                forgotten += [_origin_of(each.source) for each in caught if inspect.iscoroutine(each.source)]
        for each in caught:
            if not inspect.iscoroutine(each.source):
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)
        try:
            step = partial(work.send, (yield waited))
        except BaseException as error:  # noqa: BLE001 - a cancelled task, too; the coroutine must see it
            step = partial(work.throw, error)


def _close_unawaited(error: Exception) -> Iterator[str]:
    """Close the coroutines in the frames of ``error``, so that Python does not warn of them; yield their places."""
    held = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    for value in (
        *held,
        getattr(error, "obj", None),
    ):  # `obj` is what lacks the attribute of an AttributeError
        if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
            value.close()
            yield _origin_of(value)


def _origin_of(made: Any) -> str:
    file, line, _ = (made.cr_origin or (("", 0, ""),))[0]
    return f"{Path(file).name}:{line}: the call of {made.__qualname__} lacks `await`"


def own_code_error(
    error: Exception, what: str, then: str = "correct the file and run the command again"
) -> OwnCodeError:
    """Return ``error``, which a user's code raised in ``what``, as an error with its place and the next step."""
    return OwnCodeError(
        f"{what} failed: {fault_of(error)}; {then}. AFM_TRACEBACK=1 before the command shows the traceback"
    )


def _file_of(top: str, folder: Path | None) -> Path | None:
    """Return the file of the module ``top`` in ``folder``, or ``None``."""
    if folder is None or not top or top in _FRAMEWORK:
        return None
    files = (folder / f"{top}.py", folder / top / "__init__.py")
    return next((folder.resolve() / file.relative_to(folder) for file in files if file.is_file()), None)


def _import_file(top: str, file: Path) -> None:
    """Import ``file`` as the module ``top``; it can then import files in its folder at any time."""
    if (loaded := sys.modules.get(top)) is not None:
        origin = getattr(loaded, "__file__", None)
        if origin is not None and Path(origin).resolve() == file.resolve():
            return
        raise ConfigError(f"the module name {top!r} is taken by {origin or 'Python'}; rename {file}")
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{top!r} is a module of Python; rename {file}")
    require_trust(f"{file} is Python code and was not imported", distrust(file))
    folder = str(file.parent.parent if file.name == "__init__.py" else file.parent)
    _FOLDERS.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(top, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    print(f"running your code: {file}", file=sys.stderr, flush=True)
    sys.modules[top] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[top]
        raise


def check_code_of(file: Path, data: Mapping[str, Any]) -> None:
    """Refuse a YAML of another user or a download if it runs code or sends secrets. Also refuse downloaded programs.

    Raises:
        ConfigError: Names the file, the key and the reason.
    """
    for at, key, value in _code_in(data):
        words = value if isinstance(value, list) else [value]
        programs = [file.parent / word for word in words if isinstance(word, str) and word]
        reasons = [distrust(file), *map(_origin, filter(Path.is_file, programs))]
        require_trust(f"{file}: {at} {_CODE_KEYS[key]}", next(filter(None, reasons), ""))


def _code_in(data: Any, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the key path, key and value of each setting that runs code or sends secrets."""
    if isinstance(data, list):
        for number, item in enumerate(data):
            yield from _code_in(item, f"{at}[{number}]")
    elif isinstance(data, dict):
        for key, value in data.items():
            path = f"{at}.{key}" if at else str(key)
            if key not in _CODE_KEYS or (key == "python" and not isinstance(value, str)):
                yield from _code_in(value, path)
            elif value:
                yield path, key, value


def require_trust(refusal: str, reason: str) -> None:
    """Refuse to run code, unless there is no reason to or the user has given ``--trust``.

    Args:
        refusal: The file and what it does.
        reason: From :func:`distrust`.

    Raises:
        ConfigError: The command runs without ``--trust``.
    """
    if not reason:
        return
    from afm.settings import load_settings  # costs each command 50 ms

    if not load_settings().afm_trust:
        raise ConfigError(
            f"{refusal}: {reason}. Read the file. To run it, repeat the command with --trust (for commands without it, and "
            f"in Python: {TRUST_VARIABLE}=1 in the environment)"
        )


def distrust(file: Path) -> str:
    """Return why code in ``file`` must not run without ``--trust``; empty if it is the user's own."""
    if reason := _origin(file):
        return reason
    user = os.geteuid()
    for path in (file, file.parent, file.resolve().parent):
        if (owner := path.stat().st_uid) != user and not path.resolve().is_relative_to(_INSTALLATION):
            return f"{path} belongs to another user (id {owner}, yours is {user})"
    return ""


def _origin(file: Path) -> str:
    """Return that ``file`` was downloaded, with the sign of it; empty if there is no sign."""
    for name in {file.absolute(), file.resolve()}:
        for folder in name.parents:
            signs = [folder / DOWNLOAD_MANIFEST, folder / _HUB_NOTES]
            if folder.name.startswith(_HUB_CACHES):
                signs.append(folder / "snapshots")
            if sign := next((sign for sign in signs if sign.exists()), None):
                return f"{file} was downloaded ({sign})"
    return ""


def code_place(function: object, name: str) -> str:
    """Return ``FILE:LINE: CLASS.METHOD`` of a function in Python, and otherwise ``name``."""
    code = getattr(function, "__code__", None)
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}: " if code else ""
    return f"{place}{getattr(function, '__qualname__', name)}"
