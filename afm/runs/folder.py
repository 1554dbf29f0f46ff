"""The folder of a run: one process writes to it, it holds one set of settings, and a manifest lists its inputs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Protocol

import afm
from afm.errors import ConfigError
from afm.runs.atomic import replace_text

SETTINGS_FILE = "settings.json"

_LOCK_FILE = ".lock"
_SHOWN_CHARS = 60
_SHOWN_CHANGES = 5


class Declaration(Protocol):
    """An agent as a manifest records it."""

    @property
    def name(self) -> str:
        """The agent's name."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the agent's content."""
        ...


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The output folder of a long job that can be resumed.

    Attributes:
        option: The option that sets the folder, for error messages.
    """

    path: Path
    option: str = "output_dir"

    @contextmanager
    def locked(self, *, name: str | None = _LOCK_FILE, wait_s: float = 0.0) -> Iterator[int]:
        """Exclude a second process. The system releases the lock when the process ends, even after a kill.

        Args:
            name: The file to lock. ``None`` locks the folder itself and leaves no file in it.
            wait_s: Seconds to wait for another process.

        Yields:
            The descriptor of the lock. A child process that inherits it holds the lock too.

        Raises:
            ConfigError: Another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY if name is None else os.O_RDWR | os.O_CREAT
        descriptor = os.open(self.path if name is None else self.path / name, flags, 0o644)
        try:
            hold(descriptor, self.path, f"wait for it, or choose another {self.option}", wait_s=wait_s)
            yield descriptor
        finally:
            os.close(descriptor)

    def claim(
        self, settings: Mapping[str, Any], results: Iterable[Path], files: Mapping[str, str] | None = None
    ) -> None:
        """Record the settings of the run, or check that the folder holds a run with the same settings.

        A folder without results can be reused with other settings, for example after a run that was refused or died
        before its first result. Call this while holding the run's lock.

        Args:
            results: Files that are not empty once the run has a result.
            files: The file behind a setting that is a digest, to name in place of the digests.

        Raises:
            ConfigError: The folder holds results of other settings.
        """
        file = self.path / SETTINGS_FILE
        settings = json.loads(json.dumps(dict(settings)))
        if file.exists() and any(path.is_file() and path.stat().st_size for path in results):
            self.check(changes(json.loads(file.read_text(encoding="utf-8")), settings, files or {}))
            return
        replace_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def check(self, differences: list[str]) -> None:
        """Refuse a run whose settings differ.

        Raises:
            ConfigError: There are differences. The message lists them.
        """
        if differences:
            more = len(differences) - _SHOWN_CHANGES
            listed = ", ".join(differences[:_SHOWN_CHANGES]) + (f", and {more} more" if more > 0 else "")
            raise ConfigError(
                f"{self.path} holds a run with other settings ({listed}); choose another {self.option}, "
                "or delete the folder to start over"
            )


def hold(descriptor: int, path: Path, advice: str = "wait for it or stop it", *, wait_s: float = 0.0) -> None:
    """Lock an open file or folder until it is closed.

    Raises:
        ConfigError: Another process holds the lock and did not release it within ``wait_s`` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{path}: another run is writing here; {advice}") from None
        time.sleep(0.2)


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], files: Mapping[str, str] | None = None
) -> list[str]:
    """Return ``key: old -> new`` for every setting that differs, sorted by key, digests last. Nested keys have dots.

    A setting of ``files`` is a digest: the entry names the file behind it.
    """
    old, new, files = flatten(before), flatten(after), files or {}
    return [
        f"{files[key]} changed" if key in files else f"{key}: {_changed(old.get(key), new.get(key))}"
        for key in sorted({*old, *new}, key=lambda key: key.replace(".digest", ".~"))  # after the name
        if old.get(key) != new.get(key)
    ]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level of keys with dots."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _changed(old: Any, new: Any) -> str:
    """Return ``old -> new``. Long values are shown from a little before the place where they differ."""
    texts = repr(old), repr(new)
    same = len(commonprefix(texts)) - _SHOWN_CHARS // 3  # noqa: RUF071 - letter by letter is what is wanted
    begin = same if same > 0 and max(map(len, texts)) > _SHOWN_CHARS else 0
    shown = [f"{'...' if begin > 0 else ''}{text[begin:]}" for text in texts]
    return " -> ".join(
        text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..." for text in shown
    )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the content that :func:`write_manifest` wrote, empty without a valid file."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def write_manifest(
    path: Path,
    *,
    counts: dict[str, int],
    inputs: Iterable[Path] | Mapping[Path, str] = (),
    spec: Declaration | None = None,
    seed: int | None = None,
    **facts: Any,
) -> None:
    """Write a manifest atomically: counts, seed, agent and its digest, SHA-256 of the inputs, further facts.

    Args:
        inputs: Files, or a mapping of files to their SHA-256.
    """
    digests = inputs if isinstance(inputs, Mapping) else {file: sha256_of(file) for file in inputs}
    agent = None if spec is None else {"name": spec.name, "digest": spec.digest}
    content = {
        "afm_version": afm.__version__,
        "counts": counts,
        "seed": seed,
        "agent": agent,
        "inputs": {file.name: digest for file, digest in digests.items()},
        **facts,
    }
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
