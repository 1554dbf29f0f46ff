"""Mixes: one file with rows of several downloaded sets, for reinforcement learning or distillation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from afm.agents import PromptSource, load_agent
from afm.datasets.hub_sets import LOCK_FILE, HubSets, Mix, Preparation, Product
from afm.datasets.prepared import (
    BAD_SUFFIX,
    OnNamedRow,
    SetFiles,
    commit_of,
    input_files,
    read_wanted,
    set_folder,
)
from afm.datasets.published import BadRows, ReadCounts, listing_bad_rows
from afm.datasets.readers.row import ReadRow
from afm.datasets.rl_files import RlPart, write_rl_parts
from afm.datasets.schema import Task, read_tasks, write_tasks
from afm.errors import DataError
from afm.runs.folder import sha256_of, write_manifest
from afm.terminal import plural

_KEY_BYTES = 12
_NOTED = {"reader", "agent", "ability", "min_tests", "no_proofs", "target", "seed"}
Parts = dict[str, tuple[Preparation, SetFiles]]
"""Preparation and files of each part, by name."""
Prompts = dict[str, PromptSource]
"""Prompts of rows, by agent."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A prepared file, and the file of held-out rows if any. ``bad_rows`` is the list of refused rows, if any."""

    paths: tuple[Path, ...]
    rows: int
    parts: dict[str, ReadCounts]
    bad_rows: Path | None


def mix_sources(name: str, sets: HubSets, data: Path) -> Parts:
    """Return the input of each part of a mix.

    Args:
        data: Folder of the download.

    Raises:
        UsageError: There is no mix of that name.
        DataError: Sets are not downloaded. The message names all of them.
    """
    sources: Parts = {}
    missing: dict[str, str] = {}
    for part in sets.mix(name).parts:
        owner, step = sets.preparations[part]
        try:
            files = input_files(set_folder(owner, sets.sets[owner], data), step, owner)
            sources[part] = step, SetFiles(owner, files, commit_of(data, owner), data / LOCK_FILE)
        except DataError as error:
            missing[owner] = error.message
    if missing:
        reasons = "".join(f"\n  {owner}: {reason}" for owner, reason in missing.items())
        only = " ".join(f"--only {owner}" for owner in missing)
        raise DataError(
            f"mix {name!r} lacks {plural(len(missing), 'set')}; fetch them with `afm data download ... {only}`:{reasons}",
            path=str(data),
        )
    return sources


def prepare_mix(
    name: str,
    sets: HubSets,
    data: Path,
    out: Path,
    *,
    keep: Sequence[Path] = (),
    own_prompts: bool = False,
    strict: bool = False,
    on_row: OnNamedRow | None = None,
) -> Mixed:
    """Write one parquet file (``rl``) or JSONL (``tasks``), with a manifest of the counts of every part.

    A row that repeats an earlier question is left out. An id that repeats an earlier one gets its part's name as prefix.

    Args:
        keep: Files of tasks. Only their questions are kept.
        own_prompts: Whether rows use their agent's own prompt instead of the mix's.
        strict: Whether a bad row is an error. Otherwise ``NAME.bad_rows.jsonl`` lists it.

    Raises:
        UsageError: There is no mix of that name.
        DataError: Sets are not downloaded, a prompt is missing, a part gives no row, or a row is bad and ``strict``.
    """
    mix, parts = sets.mix(name), mix_sources(name, sets, data)
    target = out / (mix.name or name)
    prompts = {} if own_prompts else _prompts(mix, data)
    counts = {part: ReadCounts() for part in parts}
    listing = target.with_name(f"{target.name}{BAD_SUFFIX}")
    with listing_bad_rows(listing, strict=strict) as bad:
        streams = _streams(parts, _Unique(keep), bad, counts, on_row)
        paths = _write(mix, parts, streams, target, prompts)
    _note(mix, parts, counts, target, [*paths], keep, prompts)
    rows = sum(part_counts.made for part_counts in counts.values())
    return Mixed(tuple(paths), rows, counts, listing if listing.exists() else None)


def _streams(
    parts: Parts, unique: _Unique, bad: BadRows, counts: dict[str, ReadCounts], on_row: OnNamedRow | None
) -> dict[str, Iterator[Task]]:
    """Return the rows of each part, to be read in this order."""
    streams = {}
    for part, (step, source) in parts.items():
        show = None if on_row is None else partial(on_row, part)
        made = read_wanted(step, list(source.files), bad, counts[part], label=part, on_row=show)
        streams[part] = unique.of(part, source.counted(made, counts[part]), counts[part])
    return streams


class _Unique:
    """Tasks of all parts with unique questions and ids, limited to the questions of the files in ``keep``, if any."""

    def __init__(self, keep: Sequence[Path]) -> None:
        self._wanted = {_key(task) for file in keep for task in read_tasks(file)} if keep else None
        self._questions: set[bytes] = set()
        self._ids: set[str] = set()

    def of(self, part: str, made: Iterable[ReadRow], counts: ReadCounts) -> Iterator[Task]:
        """Yield the tasks of one part, at least one."""
        for task in made:
            assert isinstance(task, Task)  # the validation of the list of sets ensures it
            key = _key(task)
            if self._wanted is not None and key not in self._wanted:
                counts.leave_out("not among the questions to keep")
                continue
            if key in self._questions:
                counts.leave_out("repeats a question of an earlier row")
                continue
            name = f"{part}-{task.id}" if task.id in self._ids else task.id
            self._questions.add(key)
            self._ids.add(name)
            yield task if name == task.id else task.model_copy(update={"id": name})
        if not counts.made:
            raise DataError(f"part {part!r} gives no row: {counts.summary()}")


def _key(task: Task) -> bytes:
    """Return a key that is equal for questions that differ only in whitespace."""
    text = " ".join(task.question.split()).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_KEY_BYTES).digest()


def _prompts(mix: Mix, data: Path) -> Prompts:
    """Load the prompts of a mix, by agent."""
    missing = [str(data / file) for file in mix.prompts.values() if not (data / file).is_file()]
    if missing:
        raise DataError(
            f"prompts of the mix are missing: {', '.join(missing)}; download the set `benchmarks` and run `afm data prepare "
            "published`, or use the agents' own prompts with --own-prompts"
        )
    return {agent: PromptSource.load(data / file) for agent, file in mix.prompts.items()}


def _write(
    mix: Mix, parts: Parts, streams: dict[str, Iterator[Task]], target: Path, prompts: Prompts
) -> list[Path]:
    if mix.into is Product.TASKS:
        path = target.with_name(f"{target.name}.jsonl")
        write_tasks(chain.from_iterable(streams.values()), path)
        return [path]
    path = target.with_name(f"{target.name}.parquet")
    rl_parts = [
        RlPart(streams[part], load_agent(step.agent), step.ability, prompts.get(step.agent))
        for part, (step, _) in parts.items()
    ]
    return [
        *write_rl_parts(rl_parts, path, split=mix.split, gold=mix.ground_truth, validation=mix.validation)
    ]


def _note(
    mix: Mix,
    parts: Parts,
    counts: dict[str, ReadCounts],
    target: Path,
    paths: list[Path],
    keep: Sequence[Path],
    prompts: Prompts,
) -> None:
    """Write the manifest of a mix."""
    totals = [total.as_counts() for total in counts.values()]
    write_manifest(
        target.with_name(f"{target.name}.manifest.json"),
        counts={key: sum(total.get(key, 0) for total in totals) for key in {**totals[0], "left_out": 0}},
        inputs=[file for _, source in parts.values() for file in source.files],
        made_into=mix.into,
        keep={file.name: sha256_of(file) for file in keep},
        prompts={agent: source.recorded for agent, source in prompts.items()},
        outputs={path.name: sha256_of(path) for path in paths},
        parts={
            part: {
                **step.model_dump(mode="json", exclude_defaults=True, include=_NOTED),
                "set": source.set,
                "commit": source.commit,
                "counts": counts[part].as_counts(),
                "refused": dict(counts[part].refused),
                "left_out": dict(counts[part].left_out),
            }
            for part, (step, source) in parts.items()
        },
    )
