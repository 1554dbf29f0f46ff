"""Prepare the files of a project from downloaded sets, as their YAML specifies."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import afm
from afm.agents import load_agent
from afm.datasets.hub_sets import LOCK_FILE, HubSet, Preparation, Product, Validation, read_lock, split_of
from afm.datasets.published import (
    PROMPTS_FOLDER,
    BadRows,
    OnRow,
    ReadCounts,
    listing_bad_rows,
    read_published,
)
from afm.datasets.readers.programs import count_tests
from afm.datasets.readers.row import AlpacaRow, Conversation, ReadRow
from afm.datasets.rl_files import HeldOut, RlPart, usual_gold, write_rl_parts
from afm.datasets.row_files import data_files
from afm.datasets.schema import Task, write_tasks
from afm.datasets.sft_files import write_alpaca, write_chat
from afm.errors import DataError
from afm.plugins import DOWNLOAD_MANIFEST as MANIFEST_FILE
from afm.runs.atomic import replacing_together
from afm.runs.folder import manifest_of, sha256_of, write_manifest

BAD_SUFFIX = ".bad_rows.jsonl"
_ENDINGS = {Product.TASKS: "jsonl", Product.RL: "parquet", Product.SFT: "json", Product.CHAT: "jsonl"}

_PROOF = re.compile(
    r"\b(?:dis)?prove\s+(?:that|the|this|it|or|each|your|for|if)\b|\bshow\s+that\b|\b(?:give|provide|write)\s+(?:a|the)\s+proof\b"
    r"|\bdemonstrate\s+that\b|证明",
    re.IGNORECASE,
)
_FIND = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|express|solve|what|which|how (?:many|much|long|far|old|often))\b|求",
    re.IGNORECASE,
)
KindT = TypeVar("KindT", bound=ReadRow)

OnNamedRow = Callable[[str, int], None]
"""Receives the name of the file to prepare and the number of rows read so far."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared file and the counts of its rows.

    Attributes:
        paths: The file, and the file of held-out rows if any.
        bad_rows: File that lists the refused rows. ``None`` without refused rows.
        published: Number of published rows, if known.
        made_now: False for a file of an earlier call.
        of_another: Whether another command made the file, so that it is left unchanged.
    """

    paths: tuple[Path, ...]
    counts: ReadCounts
    bad_rows: Path | None
    published: int | None = None
    made_now: bool = True
    of_another: bool = False

    @property
    def path(self) -> Path:
        """The file for training or evaluation."""
        return self.paths[0]


def prepare_set(
    name: str,
    hub_set: HubSet,
    data: Path,
    out: Path,
    *,
    strict: bool = False,
    new_counts: bool = False,
    on_row: OnNamedRow | None = None,
) -> Iterator[Prepared]:
    """Prepare the files of one set. A file that exists and was made from the same rows in the same way stays unchanged.

    Args:
        data: Folder of the download. The set is in ``data/name``, or in a folder with its repository's name, as AFM's
            download scripts write it.
        strict: Whether a bad row is an error. Otherwise ``NAME.bad_rows.jsonl`` lists it.
        new_counts: Whether to accept row counts that differ from the lock, and record them in it.

    Raises:
        DataError: A file is missing, a row is bad and ``strict``, the rows of a split differ in number from the lock of
            the download, or no row fits.
    """
    folder = set_folder(name, hub_set, data)
    for step in hub_set.prepare:
        source = SetFiles(
            name, input_files(folder, step, name), commit_of(data, name), data / LOCK_FILE, new_counts
        )
        yield _prepare(step.name or name, step, source, out, strict=strict, on_row=on_row)


def prepare_prompts(name: str, hub_set: HubSet, data: Path) -> Iterator[Path]:
    """Write the prompts that the YAML extracts from one set into ``data/prompts``."""
    for prompt in hub_set.prompts:
        yield prompt.write(set_folder(name, hub_set, data), data / PROMPTS_FOLDER)


def make(
    label: str,
    step: Preparation,
    files: list[Path],
    out: Path,
    *,
    strict: bool = False,
    on_row: OnNamedRow | None = None,
) -> Prepared:
    """Prepare one file from published files or saved folders of any origin. See :func:`prepare_set`."""
    names: dict[Path, str] = {}
    for file in files:
        names |= data_files(file) if file.is_dir() else {file: file.name}
    return _prepare(label, step, SetFiles(label, names), out, strict=strict, on_row=on_row)


def set_folder(name: str, hub_set: HubSet, data: Path) -> Path:
    """Return the folder of a set, under its own name or the repository's."""
    named = data / hub_set.repository.rpartition("/")[2]
    return named if named.is_dir() and not (data / name).is_dir() else data / name


def input_files(folder: Path, step: Preparation, name: str) -> dict[Path, str]:
    """Return the files of a set that a step reads, at least one, each with its name on the Hub."""
    files = {
        path: hub_name
        for path, hub_name in data_files(folder).items()
        if any(fnmatchcase(hub_name, pattern) for pattern in step.files)
    }
    if not files:
        raise DataError(
            f"no file that matches {', '.join(step.files)}; `afm data download` fetches set {name!r}",
            path=str(folder),
        )
    return files


@dataclass(frozen=True, slots=True)
class SetFiles:
    """Source files of rows, each with its name on the Hub.

    Attributes:
        set: Name of the set, the prefix of ids for rows without ids.
        lock: Lock file with the row counts. ``None`` outside a download.
    """

    set: str
    files: dict[Path, str]
    commit: str | None = None
    lock: Path | None = None
    new_counts: bool = False

    def counted(self, made: Iterable[ReadRow], counts: ReadCounts) -> Iterator[ReadRow]:
        """Yield the rows. After the last one, compare their number with the lock, before the output takes its name."""
        yield from made
        if self.lock is None or (locked := read_lock(self.lock)).sets.get(self.set) is None:
            return
        rows: Counter[str] = Counter()
        for file, hub_name in self.files.items():
            rows[split_of(hub_name)] += counts.by_file[file]
        before = locked.sets[self.set]
        known = before.model_copy(update={"rows": {}}) if self.new_counts else before
        now = known.counted(self.set, rows, self.lock)
        if now != before:
            locked.model_copy(update={"sets": {**locked.sets, self.set: now}}).write(self.lock)

    def fingerprint(self, step: Preparation, digests: Mapping[Path, str]) -> str:
        """Return a digest that changes with the bytes of a file, the preparation, the agent, and this program."""
        files = [(hub_name, digests[file]) for file, hub_name in self.files.items()]
        agent = load_agent(step.agent).digest if step.into is Product.RL else ""
        content = json.dumps([files, step.model_dump(mode="json"), agent, self.set, afm.__version__])
        return hashlib.sha256(content.encode()).hexdigest()


def _prepare(
    label: str, step: Preparation, source: SetFiles, out: Path, *, strict: bool, on_row: OnNamedRow | None
) -> Prepared:
    counts, listing, manifest = ReadCounts(), out / f"{label}{BAD_SUFFIX}", out / f"{label}.manifest.json"
    path = manifest.with_name(f"{Path(label).name}.{_ENDINGS[step.into]}")
    digests = {file: sha256_of(file) for file in source.files}
    fingerprint = source.fingerprint(step, digests)
    before = None if source.new_counts else _made_before(manifest, fingerprint, listing)
    if before is not None and not (strict and before.counts.bad):
        return before
    if is_of_another_command(path):
        return Prepared((path,), counts, None, made_now=False, of_another=True)
    nothing: _NothingError | None = None
    with listing_bad_rows(listing, strict=strict) as bad:
        show = None if on_row is None else lambda rows: on_row(label, rows)
        made = read_wanted(step, list(source.files), bad, counts, label=source.set, on_row=show)
        try:
            paths = _write(_some(source.counted(made, counts), counts), path, step)
        except _NothingError as error:
            nothing = error
    if nothing is not None:
        where = ", ".join(map(str, source.files))
        listed = f". {listing} lists the rows" if counts.bad else ""
        command = "" if "--data-source NAME" in str(nothing) else _OTHER_ROWS.format(where)
        raise DataError(f"no row of {where} fits reader {step.reader!r}: {nothing}{listed}{command}")
    write_manifest(
        manifest,
        counts=counts.as_counts(),
        inputs=digests,
        made=paths[0].name,
        outputs={path.name: sha256_of(path) for path in paths},
        reader=step.reader,
        commit=source.commit,
        refused=dict(counts.refused),
        left_out=dict(counts.left_out),
        fingerprint=fingerprint,
    )
    return Prepared(tuple(paths), counts, listing if counts.bad else None, step.published)


_OTHER_ROWS = (
    ". `afm data prepare tasks {} --question-key KEY --answer-key KEY --data-source NAME --out TASKS.jsonl` reads other "
    "rows, and `--reader NAME` those of a published set"
)


class _NothingError(Exception):
    """No row fits. The file of an earlier call stays."""


def _some(made: Iterable[ReadRow], counts: ReadCounts) -> Iterator[ReadRow]:
    yield from made
    if not counts.made:
        raise _NothingError(counts.summary())


def is_of_another_command(path: Path) -> bool:
    """Return whether a manifest shows that another command made ``path``: a mix, a selection, own trajectories."""
    if not path.is_file():
        return False
    claims = [path.with_suffix(".manifest.json"), path.with_name(f"{path.name}.manifest.json")]
    others = [manifest for manifest in map(manifest_of, claims) if "fingerprint" not in manifest]
    outputs = [manifest.get("outputs", {}) for manifest in others]
    return any(digests[path.name] == sha256_of(path) for digests in outputs if path.name in digests)


def _made_before(manifest: Path, fingerprint: str, listing: Path) -> Prepared | None:
    """Return the result of an earlier call on the same rows, if its files are unchanged."""
    noted = manifest_of(manifest)
    if noted.get("fingerprint") != fingerprint:
        return None
    paths = {manifest.parent / name: digest for name, digest in noted["outputs"].items()}
    if any(not path.is_file() or sha256_of(path) != digest for path, digest in paths.items()):
        return None
    seen = noted["counts"]
    counts = ReadCounts(
        seen["read"], seen["made"], seen["repeated"], seen["renamed"], Counter(noted["refused"])
    )
    counts.left_out.update(noted["left_out"])
    return Prepared(tuple(paths), counts, listing if counts.bad else None, None, made_now=False)


def _write(made: Iterable[ReadRow], path: Path, step: Preparation) -> list[Path]:
    """Write the product into ``path``, and held-out rows into a second file."""
    match step.into:
        case Product.TASKS:
            return _write_tasks(_of(made, Task, step), path, step.validation)
        case Product.RL:
            spec = load_agent(step.agent)
            part, gold = (
                RlPart(_of(made, Task, step), spec, step.ability),
                step.ground_truth or usual_gold(spec),
            )
            return [*write_rl_parts([part], path, split=step.split, gold=gold, validation=step.validation)]
        case Product.SFT:
            write_alpaca(_of(made, AlpacaRow, step), path, path.stem)
        case Product.CHAT:
            write_chat(_of(made, Conversation, step), path, path.stem)
    return [path]


def _write_tasks(tasks: Iterator[Task], path: Path, validation: Validation | None) -> list[Path]:
    if validation is None:
        write_tasks(tasks, path)
        return [path]
    others = path.with_name(f"{validation.name}.jsonl")
    held = HeldOut(validation.rows, validation.seed, any_numbers=validation.any_numbers)
    with replacing_together([path, others]) as (first, second):
        write_tasks(held.split(tasks), first)
        write_tasks(held.tasks, second)
    return [path, others]


def _of(made: Iterable[ReadRow], kind: type[KindT], step: Preparation) -> Iterator[KindT]:
    for row in made:
        if not isinstance(row, kind):
            raise DataError(
                f"reader {step.reader!r} makes rows of kind {type(row).__name__}, which cannot become {step.into}"
            )
        yield row


def commit_of(data: Path, name: str) -> str | None:
    """Return the commit of a downloaded set, from the download's manifest."""
    sets = manifest_of(data / MANIFEST_FILE).get("sets", {})
    return str(sets[name]["commit"]) if name in sets else None


def read_wanted(
    step: Preparation,
    files: list[Path],
    bad: BadRows,
    counts: ReadCounts,
    *,
    label: str,
    on_row: OnRow | None = None,
) -> Iterator[ReadRow]:
    """Stream the rows that a step accepts. Other good rows are counted in ``left_out`` by reason.

    With ``target`` the files are read twice. The draw depends only on seed and ids, not on the order of rows.

    Raises:
        DataError: As in :func:`afm.datasets.published.read_published`.
    """
    rows = _good(step, files, bad, counts, label, on_row)
    if step.target is None:
        yield from rows
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        again = _good(step, files, BadRows(nowhere), ReadCounts(), label, on_row)
        drawn = heapq.nsmallest(
            step.target, ((_draw(step.seed, row.id), row.id) for row in again if isinstance(row, Task))
        )
    chosen = {name for _, name in drawn}
    for row in rows:
        if isinstance(row, Task) and row.id in chosen:
            yield row
        else:
            counts.leave_out("not drawn")


def _good(
    step: Preparation, files: list[Path], bad: BadRows, counts: ReadCounts, label: str, on_row: OnRow | None
) -> Iterator[ReadRow]:
    made = read_published(
        files,
        step.row_reader(),
        bad,
        counts,
        label=label,
        data_source=step.data_source,
        on_row=on_row,
    )
    for row in made:
        if isinstance(row, Task) and (reason := _unwanted(row, step)):
            counts.leave_out(reason)
        else:
            yield row


def _unwanted(task: Task, step: Preparation) -> str:
    if step.no_proofs and asks_for_proof(task.question):
        return "asks for a proof"
    if step.max_steps is not None and not 1 <= task.extra_info.get("steps", 0) <= step.max_steps:
        return f"more than {step.max_steps} steps, or none"
    if step.min_tests is None:
        return ""
    try:
        tests = count_tests(task.ground_truth, task.extra_info)
    except DataError:
        return "no tests"
    return f"fewer than {step.min_tests} tests" if tests < step.min_tests else ""


def asks_for_proof(question: str) -> bool:
    """Return whether a problem asks only for a proof, by its words (English, Chinese)."""
    return _PROOF.search(question) is not None and _FIND.search(question) is None


def _draw(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
