"""Multi-page questions: by rule from a generated world, or by models from passages of a corpus or web pages.

With models, each group of passages, or each topic, is one attempt in an event log, which resumes it. The passages of a
group mention each other in a chain (depth) or are comparable (width).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from pydantic import Field

from afm.configuration import Settings, apply_overrides, read_extended, validated
from afm.datasets import Task, write_tasks
from afm.datasets.encyclopaedia import Encyclopaedia
from afm.datasets.encyclopaedia.growth import Growth
from afm.datasets.encyclopaedia.growth import expand as grow_questions
from afm.datasets.mini_world import WorldSplit
from afm.distill.event_log import EventKind, EventLog, final_attempts
from afm.distill.expand_team import ExpandSettings, ExpandTeam, GroupOutcome, SourcePassage
from afm.distill.model_team.settings import anchored
from afm.distill.run import EVENTS_FILE, MANIFEST_FILE, Progress, collect, settle
from afm.endpoints.budget import Spent
from afm.errors import ConfigError, DataError
from afm.runs.atomic import replace_text
from afm.runs.folder import RunFolder, write_manifest
from afm.tools import load_tools
from afm.trajectory.io import json_rows

TASKS_FILE, REJECTED_FILE = "tasks.jsonl", "rejected.jsonl"
_LONGEST_TITLE = 6
_MAX_MISSES = 2_000
_WORD = re.compile(r"\w+(?:[-'’.]\w+)*")


class WorldExpansion(Settings):
    """Questions by rule, each with a proof that it needs all its pages."""

    world: Path
    """Folder of ``afm data world --kind wiki``."""
    output_dir: Path
    split: WorldSplit = WorldSplit.TRAIN
    growth: Growth = Growth.DEPTH
    depths: tuple[int, ...] = (2, 3, 4)
    """Numbers of facts in a chain."""
    widths: tuple[int, ...] = (2, 3)
    """Numbers of chains in a question by width."""
    count: int = Field(default=1_000, ge=1)
    seed: int = 0


def read_expansion(path: Path, overrides: Sequence[str] = ()) -> WorldExpansion | ExpandSettings:
    """Read the settings of a YAML: by rule if it has the key ``world``, otherwise by models.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    data = read_extended(path, "an expansion", anchor=anchored)
    apply_overrides(data, overrides)
    if "world" in data:
        return validated(WorldExpansion, data, str(path), overrides=overrides)
    return validated(ExpandSettings, data, str(path), overrides=overrides)


def expand_world(settings: WorldExpansion) -> Path:
    """Write ``tasks.jsonl`` and ``manifest.json``. Returns the path of ``tasks.jsonl``.

    Raises:
        ConfigError: A number is too small, or the world has too few questions with a proof.
        DataError: The folder holds no encyclopaedia.
    """
    out = settings.output_dir / TASKS_FILE
    questions = grow_questions(
        _read_world(settings.world),
        settings.split,
        settings.count,
        seed=settings.seed,
        growth=settings.growth,
        depths=settings.depths,
        widths=settings.widths,
    )
    rows = write_tasks(questions, out)
    write_manifest(
        settings.output_dir / MANIFEST_FILE,
        counts={"questions": rows},
        inputs=[settings.world / MANIFEST_FILE],
        seed=settings.seed,
        split=settings.split.value,
        growth=settings.growth.value,
        depths=settings.depths,
        widths=settings.widths if settings.growth is Growth.WIDTH else [1],
    )
    return out


def _read_world(folder: Path) -> Encyclopaedia:
    file = folder / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        pages, seed = int(manifest["counts"]["pages"]), int(manifest["seed"])
        wordings, brief = int(manifest.get("wordings", 1)), bool(manifest.get("brief", False))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"describes no encyclopaedia: {type(error).__name__}; expected a folder of `afm data world --kind wiki`",
            path=str(file),
        ) from None
    return Encyclopaedia(pages, seed=seed, wordings=wordings, brief=brief)


@dataclass(frozen=True, slots=True)
class ExpandSummary:
    """Result of an expansion by models: questions in ``path``, and rejected groups or topics by reason.

    Attributes:
        failed: Groups whose models failed. The next run tries them again.
        stopped: Why the run ended early (its budget is spent). Empty if it did not.
    """

    path: Path
    groups: int
    kept: int
    rejected: Mapping[str, int]
    failed: int
    stopped: str
    spent: Spent


async def expand(settings: ExpandSettings, progress: Progress | None = None) -> ExpandSummary:
    """Try to make a question from each of ``count`` groups of passages or topics. The same call resumes a run.

    Writes ``events.jsonl`` (every call), ``tasks.jsonl`` (kept questions), ``rejected.jsonl`` and ``manifest.json``.

    Raises:
        ConfigError: The folder holds a different expansion, the corpus has too few groups, or topics lack the scout or a
            tool.
        DataError: There is no passage or no topic.
        EngineError: Too many groups failed.
    """
    tools = load_tools(settings.tools) if settings.topics is not None and settings.tools is not None else {}
    output_dir = settings.output_dir
    async with AsyncExitStack() as opened:
        for tool in tools.values():
            opened.push_async_callback(tool.close)
        team = ExpandTeam(settings, tools)
        opened.push_async_callback(team.close)
        tasks = _tasks(settings)
        with EventLog(output_dir / EVENTS_FILE) as log:
            settle(RunFolder(output_dir), tasks, team, settings.seed, growth=settings.growth.value)
            collected = await collect(
                tasks, team, tools, log, max_parallel=settings.max_parallel, progress=progress
            )
    kept, rejected = _write(output_dir)
    write_manifest(
        output_dir / MANIFEST_FILE,
        counts={"groups": len(tasks), "kept": kept, "failed": collected.failed},
        inputs=[settings.source],
        seed=settings.seed,
        team=team.name,
        growth=settings.growth.value,
        size=settings.size,
        rejected=dict(rejected),
        cost={"usd": round(log.spent.usd, 6), "tokens": log.spent.tokens},
    )
    return ExpandSummary(
        output_dir / TASKS_FILE, len(tasks), kept, rejected, collected.failed, collected.stopped, log.spent
    )


def _tasks(settings: ExpandSettings) -> list[Task]:
    """Return one task per group of passages or topic. A digest in the id separates sets with equal numbers and seeds."""
    growth, size = settings.growth.value, settings.size
    if settings.topics is not None:
        kind = f"{settings.name}-web-{growth}-{size}"
        topics = read_topics(settings.topics)[: settings.count]
        parts = [([topic], topic, {"topic": topic, "size": size}) for topic in topics]
    else:
        kind = f"{settings.name}-{growth}-{size}-{settings.seed}"
        drawn = groups(read_passages(settings.source), settings.growth, size, settings.seed)
        parts = [
            (
                [text for passage in group for text in (passage.id, passage.title)],
                " / ".join(passage.title for passage in group),
                {"passages": [passage.model_dump() for passage in group]},
            )
            for group in islice(drawn, settings.count)
        ]
    return [
        Task(
            id=f"{kind}-{number:06d}-{blake2b(json.dumps(identity).encode(), digest_size=3).hexdigest()}",
            question=question,
            data_source=settings.data_source,
            extra_info={"growth": growth, **info},
        )
        for number, (identity, question, info) in enumerate(parts)
    ]


def read_topics(path: Path) -> list[str]:
    """Read one topic per line, without blank lines and repetitions.

    Raises:
        DataError: The file has no topic, or cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=str(path)) from None
    topics = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not topics:
        raise DataError("no topics; expected one per line", path=str(path))
    return topics


def read_passages(path: Path) -> list[SourcePassage]:
    """Read a corpus of ``{"id", "contents"}`` (contents: title, line feed, text) or ``{"id", "title", "text"}``.

    All passages are held in memory. A corpus of a million passages takes about a gigabyte.

    Raises:
        DataError: A row is not a passage. The error has file and line.
    """
    return [_passage(row, path, line) for line, row in json_rows(path)]


def groups(
    passages: Sequence[SourcePassage], growth: Growth, size: int, seed: int
) -> Iterator[tuple[SourcePassage, ...]]:
    """Yield distinct groups of ``size`` passages without end. The same arguments give the same groups.

    By depth, each passage mentions the title of the next one. By width, they are drawn at random.

    Raises:
        ConfigError: The corpus has no more of these groups, or a long search found none.
    """
    rng = random.Random(f"{growth}/{size}/{seed}")
    titles = {passage.title: passage for passage in passages} if growth is Growth.DEPTH else {}
    seen: set[tuple[str, ...]] = set()
    while True:
        for _ in range(_MAX_MISSES):
            if titles:
                group = _chain(rng, passages, titles, size)
            else:
                group = tuple(rng.sample(passages, size)) if len(passages) >= size else ()
            key = tuple(passage.id for passage in group)
            if len(group) == size and key not in seen:
                seen.add(key)
                yield group
                break
        else:
            raise ConfigError(
                f"the corpus gave {len(seen)} groups of {size} passages by {growth} and no more; ask for fewer or smaller ones"
            )


def _chain(
    rng: random.Random, passages: Sequence[SourcePassage], titles: Mapping[str, SourcePassage], size: int
) -> tuple[SourcePassage, ...]:
    chain = [rng.choice(passages)]
    while len(chain) < size:
        named = [titles[title] for title in _mentioned(chain[-1].text, titles)]
        free = [passage for passage in named if passage not in chain]
        if not free:
            break
        chain.append(rng.choice(free))
    return tuple(chain)


def _mentioned(text: str, titles: Mapping[str, SourcePassage]) -> list[str]:
    """Return the titles that occur word for word in a text, in their order."""
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    mentions: dict[str, None] = {}
    for place, (start, _) in enumerate(words):
        for _, end in words[place : place + _LONGEST_TITLE]:
            if text[start:end] in titles:
                mentions[text[start:end]] = None
    return list(mentions)


def _passage(row: object, path: Path, line: int) -> SourcePassage:
    if isinstance(row, dict) and isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        row = {"id": row.get("id"), "title": title.strip().strip('"'), "text": text.strip()}
    try:
        return SourcePassage.model_validate(row)
    except ValueError:
        shown = str(row)[:80]
        raise DataError(
            f'not a passage: {shown!r}; expected {{"id", "contents"}} or {{"id", "title", "text"}}',
            path=str(path),
            line=line,
        ) from None


def _write(out: Path) -> tuple[int, Counter[str]]:
    """Write the results of the log to files. Returns the number of kept questions, and rejected groups by reason."""
    kept: list[Task] = []
    rejected: list[str] = []
    reasons: Counter[str] = Counter()
    for events in final_attempts(out / EVENTS_FILE):
        if events[-1].kind is not EventKind.FINAL:
            continue
        task = Task.model_validate(events[0].meta["task"])
        outcome = GroupOutcome.model_validate_json(events[-1].content)
        if outcome.rejected:
            rejected.append(outcome.model_dump_json())
            reasons[_stage(task, outcome)] += 1
        else:
            kept.append(_made(task, outcome))
    write_tasks(kept, out / TASKS_FILE)
    replace_text(out / REJECTED_FILE, "".join(f"{line}\n" for line in rejected))
    return len(kept), reasons


def _stage(task: Task, outcome: GroupOutcome) -> str:
    """Return the stage that rejected a group."""
    if len(outcome.read) < task.extra_info.get("size", 0):
        return "pages"
    return "solver" if outcome.question else "proposal"


def _made(task: Task, outcome: GroupOutcome) -> Task:
    read = outcome.read or tuple(passage["id"] for passage in task.extra_info["passages"])
    return task.model_copy(
        update={
            "question": outcome.question,
            "ground_truth": outcome.answer,
            "extra_info": {
                "shape": task.extra_info["growth"],
                "hops": len(read),
                "path": [
                    {"passage": read[quote.passage - 1], "quote": quote.quote} for quote in outcome.evidence
                ],
                "proof": {"reads": len(read), "by": "solver without each passage"},
            },
        }
    )
