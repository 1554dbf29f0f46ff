"""The data sets and models that a project fetches from the Hub: a YAML that names them, and a lock that pins them.

The YAML says what is wanted, from which repository, and what is made of it afterwards. The lock, beside the files
or wherever it is asked for, notes commit, size and checksum of every file, so that another machine gets the same bytes
or an error.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.configuration import read_file, validated
from afm.datasets.atomic import replace_text
from afm.datasets.hub import HubFile, RepositoryKind, is_commit
from afm.datasets.sources import Preparation
from afm.errors import DataError, UsageError, suggestion

LOCK_FILE = "download.lock.json"


class HubSet(BaseModel):
    """One data set or model.

    Attributes:
        repository: ``owner/name`` on the Hub.
        kind: Data set or model.
        revision: Branch, tag or commit; by default the main branch.
        files: Shell patterns of the paths that are wanted; ``*`` also stands for folders.
        optional: Fetched only when it is named, for what is very large or not needed for the recipe.
        prepare: What is made of it, in order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    kind: RepositoryKind = RepositoryKind.DATASET
    revision: str | None = None
    files: tuple[str, ...] = ("*",)
    optional: bool = False
    prepare: tuple[Preparation, ...] = ()

    def wants(self, name: str) -> bool:
        """Whether a file of the repository is one of ``files``."""
        return any(fnmatchcase(name, pattern) for pattern in self.files)


class HubSets(BaseModel):
    """A YAML of them, by name; a name is also the folder of the set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sets: dict[str, HubSet] = Field(min_length=1)

    def chosen(self, names: list[str], *, everything: bool = False) -> dict[str, HubSet]:
        """The sets of these names; without names all that are not optional.

        Raises:
            UsageError: There is no set of a name, or every set is optional and none is named.
        """
        for name in names:
            if name not in self.sets:
                raise UsageError(f"--only {name}: no such set; {suggestion(name, self.sets)}")
        if names:
            return {name: self.sets[name] for name in self.sets if name in names}
        found = {name: one for name, one in self.sets.items() if everything or not one.optional}
        if not found:
            raise UsageError(f"choose sets with --only NAME, or --all: {', '.join(self.sets)}")
        return found


def read_hub_sets(path: Path) -> HubSets:
    """Read a YAML of sets.

    Raises:
        ConfigError: With file, key and what was expected.
    """
    return validated(HubSets, read_file(path, "data sets"), str(path))


class LockedFile(BaseModel):
    """A file as it must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size: int
    checksum: str


class LockedSet(BaseModel):
    """A set as it must be.

    Attributes:
        revision: What the YAML asked for.
        patterns: The YAML's ``files``.
        commit: What that was when it was pinned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: str
    kind: RepositoryKind
    revision: str | None
    patterns: tuple[str, ...]
    commit: str
    files: tuple[LockedFile, ...]

    @classmethod
    def of(cls, wanted: HubSet, files: tuple[HubFile, ...]) -> LockedSet:
        """Pins what a set is now."""
        return cls(
            repository=wanted.repository,
            kind=wanted.kind,
            revision=wanted.revision,
            patterns=wanted.files,
            commit=files[0].revision,
            files=tuple(LockedFile(name=file.name, size=file.size, checksum=file.checksum) for file in files),
        )

    def hub_files(self) -> tuple[HubFile, ...]:
        """The files, to be fetched at that commit."""
        return tuple(
            HubFile(self.repository, file.name, file.size, file.checksum, self.commit, self.kind)
            for file in self.files
        )

    def check(self, name: str, wanted: HubSet, lock: Path) -> None:
        """Compare with the YAML.

        Raises:
            DataError: The YAML asks for something else.
        """
        if is_commit(wanted.revision) and wanted.revision != self.commit:
            self._differs(name, "commit", self.commit, wanted.revision, lock)
        pairs = (
            ("repository", self.repository, wanted.repository),
            ("kind", self.kind.value, wanted.kind.value),
            ("revision", self.revision, wanted.revision),
            ("files", list(self.patterns), list(wanted.files)),
        )
        for key, locked, asked in pairs:
            if locked != asked:
                self._differs(name, key, locked, asked, lock)

    def _differs(self, name: str, key: str, locked: object, asked: object, lock: Path) -> None:
        raise DataError(
            f"set {name!r} is pinned to {key} {locked}, the YAML asks for {asked}; undo the change, or pin anew "
            "with --pin",
            path=str(lock),
        )


class Lock(BaseModel):
    """The pinned sets, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(default=1, ge=1, le=1)
    sets: dict[str, LockedSet] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        replace_text(path, text + "\n")


def read_lock(path: Path) -> Lock:
    """The lock in a file; an empty one when there is no file.

    Raises:
        DataError: The file is broken.
    """
    if not path.exists():
        return Lock()
    try:
        return Lock.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(
            f"no lock of downloads: {first['msg']}; remove it, or restore it", path=str(path)
        ) from None
