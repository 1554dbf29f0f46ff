"""Filtering files of trajectories: streamed, with any number of processes, resumable after ``kill -9``.

An SQLite file, which survives a kill, holds the progress of a run. Writes are not synced before the end, because data
that the operating system has received outlives the process. A power failure may lose some of it. A damaged index and
files that end too early are noticed when the run resumes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from afm.agents import AgentSpec
from afm.distill.filters.base import Funnel, draw_funnel, dropped, unreadable_row
from afm.distill.filters.near_duplicates import DuplicateIndex, Signer
from afm.distill.filters.registry import FilterPlan
from afm.distill.filters.rules import tokenizer_file
from afm.distill.filters.worker_pool import (
    Chunk,
    Decision,
    FilePosition,
    decided,
    read_chunks,
)
from afm.errors import ConfigError, DataError, no_such_file
from afm.runs.atomic import replace_text
from afm.runs.folder import SETTINGS_FILE, RunFolder, sha256_of, write_manifest
from afm.trajectory.io import line_of_record, record_of_line

KEPT_FILE, DROPPED_FILE, UNREADABLE_FILE = "kept.jsonl", "dropped.jsonl", "unreadable.jsonl"
FUNNEL_FILE, PICTURE_FILE, MANIFEST_FILE = "funnel.json", "funnel.png", "manifest.json"
STATE_FILE = "state.sqlite"
UNREADABLE = "unreadable"
"""Name of the stage for lines that are not records."""


@dataclass(frozen=True, slots=True)
class FilterSummary:
    """Result of a run. ``resumed`` is the number of rows that an earlier, interrupted call finished."""

    folder: Path
    funnel: Funnel
    resumed: int


def filter_files(
    paths: Sequence[Path],
    plan: FilterPlan,
    spec: AgentSpec,
    output_dir: Path,
    *,
    processes: int = 1,
    picture: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> FilterSummary:
    """Filter trajectory JSONL (or ``.gz``) into the folder ``output_dir``. After a kill, the same call resumes.

    Writes ``kept.jsonl``, ``dropped.jsonl`` (each row with its reason), ``unreadable.jsonl`` (lines that are not
    records), ``funnel.json``, ``funnel.png``, ``settings.json`` and finally ``manifest.json``. A kept row that no
    filter changed is identical to the line that was read. The files do not depend on ``processes`` or interruptions.

    Args:
        on_rows: Called with the number of finished rows after every chunk.

    Raises:
        ConfigError: ``output_dir`` holds a run with other settings or files, another run is writing there, or a stage
            does not suit the agent.
        DataError: A file cannot be read, or no file has a row.
        EngineError: A filter process died.
        MissingExtraError: A stage, or the picture, needs a package that is not installed.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    order = tuple(stage.name for stage in plan.stages)
    inputs = {path: _digest(path) for path in paths}
    settings = _settings([(path, inputs[path]) for path in paths], plan, spec)
    _forget_empty(output_dir, settings)
    if (output_dir / MANIFEST_FILE).exists():
        _settle(output_dir, settings)
        remove_state(output_dir / STATE_FILE)  # left by a run that was killed after it wrote its manifest
        funnel = Funnel.from_json(_funnel_of(output_dir), order)
        return FilterSummary(output_dir, funnel, funnel.seen)
    with _State(output_dir / STATE_FILE, order) as state:
        _settle(output_dir, settings)
        progress = state.progress()
        resumed = progress.rows
        with _Outputs(output_dir, progress.sizes) as outputs:
            index = _index(state, plan)
            for chunk, decisions in decided(read_chunks(paths, progress.place), plan, spec, processes):
                progress = _taken(chunk, decisions, progress, index, outputs)
                state.save(progress)
                if on_rows is not None:
                    on_rows(progress.rows)
            outputs.sync()
        if not progress.rows:
            raise DataError("holds no trajectories", path=", ".join(map(str, paths)))
        _finish(output_dir, progress.funnel, inputs, plan, spec, picture)
        state.remove()
    return FilterSummary(output_dir, progress.funnel, resumed)


def _index(state: _State, plan: FilterPlan) -> DuplicateIndex | None:
    settings = next((stage.near_duplicates for stage in plan.stages if stage.near_duplicates), None)
    return None if settings is None else DuplicateIndex(state.connection, settings)


def _taken(
    chunk: Chunk,
    decisions: Sequence[Decision],
    progress: _Progress,
    index: DuplicateIndex | None,
    outputs: _Outputs,
) -> _Progress:
    """Write the decisions about a chunk."""
    rows, funnel = progress.rows, progress.funnel
    for line, number, decision in zip(chunk.lines, chunk.numbers, decisions, strict=True):
        rows += 1
        if decision.error:
            funnel.add(kept=False, reason=UNREADABLE)
            row = unreadable_row(chunk.path, number, decision.error, line)
            outputs.write(UNREADABLE_FILE, json.dumps(row, ensure_ascii=False).encode() + b"\n")
            continue
        if decision.other:
            funnel.others[decision.other] += 1
        whole = decision.line or line.rstrip(b"\n") + b"\n"
        twin = index.twin(rows, decision.id, decision.signature) if index and decision.signature else None
        if twin is not None:
            reason = f"{Signer.name}: {twin.similarity:.2f} similar to {twin.named(decision.id)}"
            whole = line_of_record(dropped(record_of_line(whole), reason))
            decision = replace(decision, kept=False, reason=reason, copies=())
        funnel.add(
            kept=decision.kept,
            reason=decision.reason,
            copies=len(decision.copies),
            earlier=decision.earlier,
        )
        outputs.write(KEPT_FILE if decision.kept else DROPPED_FILE, whole, *decision.copies)
    return _Progress(chunk.end, rows, outputs.flushed(), funnel)


_OPENING = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = OFF",  # syncing takes 20 ms per chunk, longer than its rows
    "PRAGMA cache_size = -32768",  # KiB
    "CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, value TEXT)",
    "BEGIN IMMEDIATE",
)


@dataclass
class _Progress:
    """Saved progress of a run.

    Attributes:
        place: Position after the last finished line.
        rows: Number of finished lines, without blank ones.
        sizes: Size of each output file in bytes after these rows.
    """

    place: FilePosition = field(default_factory=FilePosition)
    rows: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    funnel: Funnel = field(default_factory=Funnel)

    def dumped(self) -> str:
        """Return the progress as text for :meth:`parsed`."""
        return json.dumps(vars(self) | {"place": asdict(self.place), "funnel": self.funnel.as_json()})

    @classmethod
    def parsed(cls, text: str, order: tuple[str, ...]) -> _Progress:
        """Read the result of :meth:`dumped`."""
        data = json.loads(text)
        funnel = Funnel.from_json(data["funnel"], order)
        return cls(FilePosition(**data["place"]), data["rows"], data["sizes"], funnel)


class _State:
    """The progress file, held by one process at a time.

    All changes between two calls of :meth:`save` are atomic, including those in other tables of :attr:`connection`.

    Raises:
        ConfigError: Another process holds the file, or it is damaged.
    """

    def __init__(self, path: Path, order: tuple[str, ...]) -> None:
        self.path = path
        self._order = order
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        try:
            for statement in _OPENING:
                self.connection.execute(statement)
        except sqlite3.DatabaseError as error:
            self.connection.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"{path.parent}: another run is writing here; wait for it or stop it"
                ) from None
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise self._damaged(str(error)) from None

    def __enter__(self) -> _State:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # unsaved changes are rolled back

    def progress(self) -> _Progress:
        """Return the last saved progress, or a fresh start.

        Raises:
            ConfigError: The file is damaged.
        """
        try:
            row = self.connection.execute("SELECT value FROM progress").fetchone()
            if row is None:
                return _Progress(funnel=Funnel(order=self._order))
            (result,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            result = str(error)
        if result != "ok":
            raise self._damaged(result)
        return _Progress.parsed(row[0], self._order)

    def save(self, progress: _Progress) -> None:
        """Commit all changes since the last call."""
        self.connection.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", (progress.dumped(),))
        self.connection.execute("COMMIT")
        self.connection.execute("BEGIN IMMEDIATE")

    def _damaged(self, how: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: damaged ({how.splitlines()[-1]}), perhaps by a power failure; remove the folder and start again"
        )

    def remove(self) -> None:
        """Delete the file of a complete run."""
        self.connection.close()
        remove_state(self.path)


def remove_state(path: Path) -> None:
    """Delete the progress file of a complete run, if it exists, with SQLite's files next to it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


class _Outputs:
    """The three files of rows. Anything that a killed run wrote after its last saved progress is cut off.

    Raises:
        ConfigError: A file has changed since the interrupted run.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._folder = folder
        self._sizes = {name: sizes.get(name, 0) for name in (KEPT_FILE, DROPPED_FILE, UNREADABLE_FILE)}
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Outputs:
        for name, size in self._sizes.items():
            file = self._stack.enter_context((self._folder / name).open("a+b"))
            length = file.seek(0, os.SEEK_END)
            if length < size:
                raise ConfigError(
                    f"{self._folder / name}: {length} bytes, expected at least {size} from the interrupted run; "
                    "remove the folder and start again"
                )
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                raise ConfigError(
                    f"{self._folder / name}: no line ends at byte {size}, where the interrupted run's last line ended, "
                    "perhaps because of a power failure; remove the folder and start again"
                )
            file.truncate(size)
            self._files[name] = file
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, name: str, *lines: bytes) -> None:
        """Append lines."""
        for line in lines:
            self._files[name].write(line)
            self._sizes[name] += len(line)

    def sync(self) -> None:
        """Wait until all data is on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def flushed(self) -> dict[str, int]:
        """Flush the files and return their sizes in bytes."""
        for file in self._files.values():
            file.flush()
        return dict(self._sizes)


def _settings(inputs: Sequence[tuple[Path, str]], plan: FilterPlan, spec: AgentSpec) -> dict[str, object]:
    """Return everything that the result depends on: the files in order with their checksums, and the settings."""
    tasks = [path for stage in plan.stages if stage.contamination for path in stage.contamination.tasks]
    rewards = [stage.quality.reward for stage in plan.stages if stage.quality and stage.quality.reward]
    tokenizers = [
        tokenizer_file(tokenizer)
        for stage in plan.stages
        if stage.length and (tokenizer := stage.length.tokenizer)
    ]
    return {
        "inputs": [{"path": str(path.resolve()), "sha256": digest} for path, digest in inputs],
        "agent": {"name": spec.name, "digest": spec.digest},
        "evaluation_sets": _digests(tasks),
        **({"rewards": _digests(rewards)} if rewards else {}),
        **({"tokenizers": _digests(tokenizers)} if tokenizers else {}),
        "plan": plan.model_dump(mode="json", exclude_none=True),
    }


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    return {str(path): sha256_of(path) for path in paths if path.is_file()}


def _digest(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{no_such_file(path)}; expected trajectory JSONL", path=str(path))
    return sha256_of(path)


def _funnel_of(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((out / FUNNEL_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the funnel of a finished run cannot be read ({error}); remove the folder and filter again",
            path=str(out / FUNNEL_FILE),
        ) from None


def _forget_empty(out: Path, settings: dict[str, object]) -> None:
    """Delete the files of a finished run that kept nothing, so that other settings can be tried in the same folder."""
    if not (out / MANIFEST_FILE).exists() or (out / KEPT_FILE).stat().st_size:
        return
    if json.loads((out / SETTINGS_FILE).read_text(encoding="utf-8")) != json.loads(json.dumps(settings)):
        for name in (MANIFEST_FILE, KEPT_FILE, DROPPED_FILE, UNREADABLE_FILE, FUNNEL_FILE, PICTURE_FILE):
            (out / name).unlink(missing_ok=True)


def _settle(out: Path, settings: dict[str, object]) -> None:
    """Record the settings of the run, and reject a folder of a different run."""
    results = [out / name for name in (KEPT_FILE, DROPPED_FILE, UNREADABLE_FILE, MANIFEST_FILE)]
    if not (out / SETTINGS_FILE).exists() and any(path.exists() for path in results):
        raise ConfigError(f"{out}: holds files of another program; choose another --output-dir")
    RunFolder(out, "--output-dir").claim(settings, results)


def _finish(
    out: Path,
    funnel: Funnel,
    inputs: Mapping[Path, str],
    plan: FilterPlan,
    spec: AgentSpec,
    picture: bool,
) -> None:
    replace_text(out / FUNNEL_FILE, json.dumps(funnel.as_json(), indent=2) + "\n")
    if picture:
        draw_funnel(funnel, out / PICTURE_FILE, f"{spec.name}: {funnel.seen:,} trajectories")
    if not (out / UNREADABLE_FILE).stat().st_size:
        (out / UNREADABLE_FILE).unlink()
    write_manifest(
        out / MANIFEST_FILE,
        counts={"seen": funnel.seen, "kept": funnel.kept, "copies": funnel.copies},
        inputs=inputs,
        spec=spec,
        seed=plan.seed,
        dropped=dict(funnel.dropped),
        stages=plan.model_dump(mode="json", exclude_none=True)["stages"],
    )
