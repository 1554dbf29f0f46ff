"""Download sets from the Hub: plan, check the disk space, resume after a kill, verify checksums."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afm.datasets.hub import MIB, HubFile, Progress, fetch, format_size, hub_files, is_whole
from afm.datasets.hub_sets import LOCK_FILE, HubSet, Lock, LockedSet, read_lock
from afm.errors import DataError
from afm.plugins import DOWNLOAD_MANIFEST as MANIFEST_FILE
from afm.runs.folder import RunFolder, manifest_of, write_manifest
from afm.terminal import plural

_SHOWN_NAMES = 5
_SPARE_BYTES = 64 * MIB
"""Bytes to leave free in addition to the files."""


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """A set whose files are known. ``pinned`` says whether they come from a lock."""

    name: str
    wanted: HubSet
    files: tuple[HubFile, ...]
    folder: Path
    pinned: bool

    @property
    def commit(self) -> str:
        """The commit of all files."""
        return self.files[0].revision

    @property
    def bytes_missing(self) -> int:
        """Bytes that are still missing, by file size."""
        return sum(file.size - _arrived(file, self.folder) for file in self.files)

    def summary(self) -> str:
        """Describe the set in one line."""
        pin = "pinned" if self.pinned else "not pinned yet"
        return (
            f"{self.name}: {self.wanted.repository} at {self.commit[:12]} ({pin}), {plural(len(self.files), 'file')}, "
            f"{format_size(sum(file.size for file in self.files))}, {format_size(self.bytes_missing)} to fetch"
        )


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The sets to download, and why others are unavailable, by name."""

    out: Path
    sets: tuple[PlannedSet, ...]
    refused: Mapping[str, str]

    @property
    def bytes_missing(self) -> int:
        """Bytes that are still missing, of all sets."""
        return sum(planned.bytes_missing for planned in self.sets)

    def check_space(self) -> None:
        """Raise an error if the download does not fit on the disk."""
        self.out.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.out).free, self.bytes_missing
        if needed and free < needed + _SPARE_BYTES:
            raise DataError(
                f"{format_size(free)} free, {format_size(needed)} to fetch; choose another disk with --output-dir, or fewer "
                "sets with --only",
                path=str(self.out),
            )


def plan(
    sets: Mapping[str, HubSet], out: Path, *, lock: Path | None = None, pin: bool = False
) -> DownloadPlan:
    """Plan a download. The files of a pinned set come from the lock, those of other sets from the Hub.

    An unavailable set is listed in :attr:`DownloadPlan.refused`, so the others can still be downloaded.

    Args:
        lock: The lock file. By default ``download.lock.json`` in ``out``.
        pin: Whether to ask the Hub about all sets, even pinned ones.

    Raises:
        DataError: The lock is broken, or differs from the requested sets.
    """
    where = lock or out / LOCK_FILE
    locked = Lock() if pin else read_lock(where)
    planned, refused = [], {}
    for name, wanted in sets.items():
        if (pinned := locked.sets.get(name)) is not None:
            pinned.check(name, wanted, where)
            planned.append(PlannedSet(name, wanted, pinned.hub_files(), out / name, True))
            continue
        try:
            files = _files_on_hub(name, wanted)
        except DataError as error:
            refused[name] = str(error)
            continue
        planned.append(PlannedSet(name, wanted, files, out / name, bool(wanted.pinned)))
    return DownloadPlan(out, tuple(planned), refused)


def _files_on_hub(name: str, wanted: HubSet) -> tuple[HubFile, ...]:
    """Return the files of a set on the Hub now."""
    there = wanted.pinned_files() or hub_files(wanted.repository, wanted.kind, wanted.revision)
    files = tuple(file for file in there if wanted.wants(file.name))
    if not files:
        names = ", ".join(file.name for file in there[:_SHOWN_NAMES]) or "nothing"
        more = " ..." if len(there) > _SHOWN_NAMES else ""
        raise DataError(
            f"{wanted.kind} {wanted.repository} holds no file that matches {', '.join(wanted.files)}; it holds "
            f"{names}{more}. Correct `files` of set {name!r}"
        )
    return files


def run(planned: DownloadPlan, progress: Progress, *, lock: Path | None = None) -> dict[str, str]:
    """Download everything. If interrupted, the same call resumes.

    A set enters the manifest and the lock when it is complete. Sets that the plan did not take from the lock are pinned in
    it. The lock's other sets stay.

    Args:
        lock: The lock file. By default ``download.lock.json`` in the plan's folder.

    Returns:
        The reason for each set that is not downloaded, by name, including those that the plan refused.

    Raises:
        ConfigError: Another download is writing into the folder.
        OSError: The disk failed.
    """
    failed, done = dict(planned.refused), list[PlannedSet]()
    with RunFolder(planned.out, "--output-dir").locked(name=None):
        _write_manifest(planned.out, done)  # from the first byte on, code in here needs --trust
        for planned_set in planned.sets:
            if reason := _fetch_set(planned_set, progress, lock or planned.out / LOCK_FILE):
                failed[planned_set.name] = reason
            else:
                done.append(planned_set)
        _write_manifest(planned.out, done)
    return failed


def _fetch_set(planned: PlannedSet, progress: Progress, path: Path) -> str:
    """Download all files of a set. Returns why that failed, or an empty string."""
    try:
        for file in planned.files:
            _fetch(file, planned, progress)
    except DataError as error:
        return str(error)
    lock = read_lock(path)
    before, now = lock.sets.get(planned.name), LockedSet.of(planned.wanted, planned.files)
    if before is not None:
        now = now.model_copy(update={"rows": before.rows})
    if now != before:
        lock.model_copy(update={"sets": {**lock.sets, planned.name: now}}).write(path)
    return ""


def _fetch(file: HubFile, planned: PlannedSet, progress: Progress) -> None:
    """Download one file. A pinned file that was changed is not overwritten."""
    path = planned.folder / file.name
    if planned.pinned and path.exists() and not is_whole(file, path, progress):
        raise DataError(
            f"differs from the pinned {file.checksum[:12]} of {file.repository} at {file.revision[:12]}; move it "
            "away and run the same command again, or pin what the Hub has now with --pin",
            path=str(path),
        )
    if not planned.pinned or not path.exists():
        fetch(file, planned.folder, progress)


def _write_manifest(out: Path, done: list[PlannedSet]) -> None:
    """Write the manifest of the complete sets. Sets of earlier calls stay."""
    path = out / MANIFEST_FILE
    sets = manifest_of(path).get("sets", {}) | {
        planned.name: LockedSet.of(planned.wanted, planned.files).model_dump(
            mode="json", exclude={"patterns"}
        )
        for planned in done
    }
    files = sum(len(planned["files"]) for planned in sets.values())
    write_manifest(path, counts={"sets": len(sets), "files": files}, sets=sets)


def _arrived(file: HubFile, folder: Path) -> int:
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        return file.size
    return min(file.arrived(folder), file.size)
