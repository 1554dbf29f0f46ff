"""Download files of repositories on the Hugging Face Hub, on the mirror that ``HF_ENDPOINT`` names, and on GitHub.

An interrupted download resumes. The result is compared with the repository's checksum. (``hf_hub_download`` restarts
after a kill and compares only sizes.)
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import quote

from afm.endpoints.pace import retry_after_s
from afm.errors import DataError, MissingExtraError

Progress = Callable[[str, int, int | None], None]
"""Receives the unit, the number done, and the total (``None`` if unknown)."""

GITHUB_ENDPOINT = "GITHUB_RAW_ENDPOINT"
"""Environment variable that names a mirror of GitHub's raw files with the same paths."""
_GITHUB = "https://raw.githubusercontent.com"
MIB = 1 << 20
_TRIES = 5
"""Attempts in a row that bring no byte."""
_LIST_TRIES = 3
"""Attempts to list a repository while its server responds with errors."""
_TOO_MANY = 429
_PAUSE_S = 2.0
_READ_BYTES = 4 * MIB
_SHOWN_CHARS = 300
_OFFLINE_ADVICE = "If this machine cannot reach {}, or run the same command on another machine and copy the folder here. HF_HUB_OFFLINE must not be 1"
_NO_HUB = _OFFLINE_ADVICE.format("the Hub, set HF_ENDPOINT to a mirror")
_NO_GITHUB = _OFFLINE_ADVICE.format(f"GitHub, set {GITHUB_ENDPOINT} to a mirror of its raw files")


class RepositoryKind(StrEnum):
    """The kind of a repository on the Hub, or GitHub."""

    DATASET = "dataset"
    MODEL = "model"
    GITHUB = "github"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at one commit of a repository.

    Attributes:
        name: Its path in the repository.
        checksum: SHA-256, or for small files SHA-1 of a git blob.
        revision: The repository's commit.
    """

    repository: str
    name: str
    size: int
    checksum: str
    revision: str
    kind: RepositoryKind = RepositoryKind.DATASET

    def partial(self, folder: Path) -> Path:
        """Return the path of the partial file. Its name holds the checksum, so another version never continues it."""
        return folder / f"{self.name}.{self.checksum[:12]}.partial"

    def arrived(self, folder: Path) -> int:
        """Return the number of bytes downloaded so far."""
        here = self.partial(folder)
        return here.stat().st_size if here.is_file() else 0


class Checksum:
    """The checksum of a file, computed piece by piece."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        if len(file.checksum) == hashlib.sha256().digest_size * 2:
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)

    def add(self, piece: bytes) -> None:
        """Add the next piece."""
        self._hash.update(piece)

    def check(self, path: Path) -> None:
        """Compare the checksum. A wrong file is removed and raises an error."""
        if not self.right:
            path.unlink(missing_ok=True)
            raise DataError(
                f"the file from {self._file.repository} has checksum {self._hash.hexdigest()}, expected "
                f"{self._file.checksum}. It was removed: run the same command again",
                path=str(path),
            )

    @property
    def right(self) -> bool:
        """Whether the bytes added so far are the file."""
        return self._hash.hexdigest() == self._file.checksum


def github_endpoint() -> str:
    """Return the base address of GitHub's raw files, without a final slash."""
    return (os.environ.get(GITHUB_ENDPOINT) or _GITHUB).rstrip("/")


def hub_files(
    repository: str, kind: RepositoryKind = RepositoryKind.DATASET, revision: str | None = None
) -> list[HubFile]:
    """List the files of a repository by name.

    Args:
        revision: Branch, tag or commit. By default the main branch.

    Raises:
        DataError: The repository or ``revision`` does not exist or cannot be reached.
        MissingExtraError: ``huggingface_hub`` is not installed.
    """
    info = _describe(repository, kind, revision)
    if info.sha is None or (is_commit(revision) and info.sha != revision):
        raise DataError(f"{kind} {repository}: asked for commit {revision}, the server describes {info.sha}")
    files = []
    for sibling in info.siblings or ():
        checksum = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if checksum is not None and sibling.size is not None:
            name = checked_name(repository, sibling.rfilename)
            files.append(HubFile(repository, name, sibling.size, checksum, info.sha, kind))
    return sorted(files, key=lambda file: file.name)


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a full commit hash, which never changes, unlike a branch or a tag."""
    return revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def is_whole(file: HubFile, path: Path, progress: Progress) -> bool:
    """Return whether ``path`` holds this file, by size and checksum."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return _checksum(file, path, progress).right


def _checksum(file: HubFile, path: Path, progress: Progress) -> Checksum:
    checksum, done = Checksum(file), 0
    for piece in pieces(path):
        checksum.add(piece)
        done += len(piece)
        progress(f"MiB of {file.name} checked", done // MIB, -(-file.size // MIB))
    return checksum


def _describe(repository: str, kind: RepositoryKind, revision: str | None) -> Any:
    """Return the Hub's description of a repository, with retries if the server fails."""
    import httpx

    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        raise MissingExtraError("huggingface_hub", "dense") from None
    api = HfApi()
    for attempt in range(1, _LIST_TRIES + 1):
        try:
            return api.repo_info(repository, repo_type=kind.value, revision=revision, files_metadata=True)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if (status < 500 and status != _TOO_MANY) or attempt == _LIST_TRIES:
                raise DataError(_refusal(error, repository, kind, revision, str(api.endpoint))) from None
            time.sleep(max(attempt, retry_after_s(error.response.headers)))
        except (httpx.HTTPError, OfflineModeIsEnabled, OSError) as error:
            raise DataError(f"{kind} {repository} of {api.endpoint}: {_message(error)}. {_NO_HUB}") from None
        except HFValidationError as error:
            raise DataError(f"{kind} {repository}: {_message(error)}") from None
    raise AssertionError("the last attempt returns or raises")


def _refusal(error: Any, repository: str, kind: RepositoryKind, revision: str | None, endpoint: str) -> str:
    """Return why the Hub refused, and the next step."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = f"{kind} {repository} of {endpoint}"
    if isinstance(error, GatedRepoError):
        return (
            f"{name}: access is given on request: {_message(error)}. Request it on the repository's page, "
            "then set HF_TOKEN to a token of your account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"{name}: {_message(error)}. Check its name; if it is private, set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name}: there is no revision {revision!r}; expected a branch, a tag or a commit"
    return f"{name}: {_message(error)}"


def checked_name(repository: str, name: str) -> str:
    """Return ``name`` if it stays within the folder of the download, else raise an error."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise DataError(f"{repository} names a file {name!r}, which would be outside the folder")
    if not name.isprintable():
        raise DataError(f"{repository} names a file {name!r}, with invisible characters")
    return name


def fetch(file: HubFile, folder: Path, progress: Progress) -> Path:
    """Download a file into ``folder`` and verify it. An unavailable or wrong file is an error."""
    path = folder / file.name
    if is_whole(file, path, progress):
        return path
    partial = fetch_partial(file, folder, progress)
    _checksum(file, partial, progress).check(partial)
    partial.replace(path)
    return path


def fetch_partial(file: HubFile, folder: Path, progress: Progress) -> Path:
    """Download all bytes of a file to :meth:`HubFile.partial`, without verifying them."""
    partial = file.partial(folder)
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()  # an empty file needs no request
    tries = 0
    while True:
        arrived = file.arrived(folder)
        if arrived >= file.size:
            return partial
        try:
            with partial.open("ab") as sink:
                _get(file, _Counted(sink, file, progress), arrived)
        except _BrokenError as error:
            tries = 0 if file.arrived(folder) > arrived else tries + 1
            if tries >= _TRIES:
                raise DataError(f"{file.repository}, {file.name}: {error}") from None
            time.sleep(_PAUSE_S * tries)


def pieces(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces."""
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece


def format_size(count: int) -> str:
    """Format a number of bytes."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{max(1, round(count / MIB))} MiB" if count else "nothing"


class _BrokenError(Exception):
    """A transfer was interrupted and may resume."""


class _Counted:
    """A file that reports how much is in it."""

    def __init__(self, sink: IO[bytes], file: HubFile, progress: Progress) -> None:
        self._sink, self._file, self._progress = sink, file, progress

    def write(self, piece: bytes) -> int:
        count = self._sink.write(piece)
        self._progress(f"MiB of {self._file.name}", self._sink.tell() // MIB, -(-self._file.size // MIB))
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


def _get(file: HubFile, sink: Any, arrived: int) -> None:
    """Append the missing bytes. A :class:`_BrokenError` is worth a retry, a :class:`DataError` is not."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    url, headers = _address(file)
    try:
        http_get(url, sink, resume_size=arrived, headers=headers, expected_size=file.size)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _BrokenError(_message(error)) from None
        endpoint = github_endpoint() if file.kind is RepositoryKind.GITHUB else constants.ENDPOINT
        why = _refusal(error, file.repository, file.kind, file.revision, endpoint)
        raise DataError(f"{file.name}: {why}") from None
    except (httpx.ConnectError, OfflineModeIsEnabled) as error:
        if file.kind is RepositoryKind.GITHUB:
            raise DataError(f"{file.name} of {github_endpoint()}: {_message(error)}. {_NO_GITHUB}") from None
        raise _BrokenError(_message(error)) from None
    except httpx.TransportError as error:
        raise _BrokenError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
    except OSError as error:
        if error.errno is not None:  # the disk, not the transfer
            raise
        raise _BrokenError(_message(error)) from None
    except ValueError as error:
        raise DataError(f"{file.repository}, {file.name}: {_message(error)}") from None


def _address(file: HubFile) -> tuple[str, dict[str, str]]:
    """Return the address of a file and the headers of its request. A Hub token goes only to the Hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if file.kind is not RepositoryKind.GITHUB:
        url = hf_hub_url(file.repository, file.name, repo_type=file.kind.value, revision=file.revision)
        return url, build_hf_headers()
    url = f"{github_endpoint()}/{file.repository}/{file.revision}/{quote(file.name)}"
    return url, {"Accept-Encoding": "identity"}  # ranges count bytes of the file, not of a packed one


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN_CHARS] or type(error).__name__
