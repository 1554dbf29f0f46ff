"""Judges of finished episodes: requests that are never repeated, and the agreement of several judges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import Field

from afm.configuration import Settings
from afm.errors import ConfigError, DataError, EngineError, RewardError
from afm.evaluation.agents import Agents
from afm.evaluation.manifest import MANIFEST_FILE, read_manifest
from afm.evaluation.metrics import Metrics, task_of
from afm.evaluation.run import finished_metrics, keep_metrics, records_of
from afm.evaluation.statistics import Agreement, agreement
from afm.play import work_in_parallel
from afm.rewards import Sample
from afm.rewards.judge import JudgeSettings, ModelJudge, cache_key
from afm.rewards.judge_prompt import SCHEMA, Case
from afm.runs.folder import RunFolder
from afm.runs.journal import KeyedJournal
from afm.trajectory.record import Record, opened

OnProgress = Callable[[int, int], None]
"""Receives the number of verdicts, with those of earlier starts, and the total."""


@dataclass(frozen=True, slots=True)
class VerdictRequest:
    """A request for one verdict.

    Attributes:
        name: Name for the caller.
        key: Digest of everything that the verdict depends on.
        ask: Returns the row to keep, without its key. Raises ``RewardError`` without a verdict.
    """

    name: tuple[Any, ...]
    key: str
    ask: Callable[[], Awaitable[dict[str, Any]]]


Verdicts = Mapping[tuple[Any, ...], Mapping[str, Any] | None]
"""Rows of verdicts by name, ``None`` where the judge gave no verdict."""


async def ask_judge(
    log_file: Path,
    requests: Sequence[VerdictRequest],
    *,
    parallel: int,
    max_failed_share: float,
    on_progress: OnProgress | None = None,
) -> Verdicts:
    """Return the row of each request by name, ``None`` where the judge gave no verdict. ``log_file`` keeps the rows.

    Raises:
        EngineError: Too many requests failed. A repeated call asks only for verdicts that are missing.
    """
    rows: dict[tuple[Any, ...], Mapping[str, Any] | None] = {}
    failed = 0

    async def work(request: VerdictRequest) -> None:
        nonlocal failed
        try:
            rows[request.name] = await _verdict(request, log)
        except RewardError as error:
            rows[request.name] = None
            failed += 1
            if failed > max_failed_share * len(requests):
                raise EngineError(
                    f"{failed} of {len(requests)} requests to the judge have no verdict; at most "
                    f"{max_failed_share:.0%} may. The last one: {error}. Remove the cause and run again. Finished "
                    "verdicts are kept"
                ) from None
        if on_progress is not None:
            on_progress(len(rows), len(requests))

    with KeyedJournal(log_file) as log:
        await work_in_parallel(requests, work, parallel)
    return rows


async def _verdict(request: VerdictRequest, log: KeyedJournal) -> Mapping[str, Any]:
    known = log.find(request.key)
    if known is not None:
        return known
    row = {"key": request.key, **await request.ask()}
    log.add(row)
    return row


OPINIONS_FILE = "opinions.jsonl"
RECORDED = "recorded"
"""Name of the rater whose verdicts are in the episodes."""

_RIGHT = 1 - 1e-9


class AgreementSettings(Settings):
    """The judges that judge again, and how often."""

    judges: tuple[JudgeSettings, ...] = Field(default=(JudgeSettings(),), min_length=1)
    """Judges, with the keys of a reward file. The default is the judge at GRM_BASE_URL, which repeats that of the run."""
    repeats: int = Field(default=1, ge=1)
    """How often each of them judges. Verdicts of one judge are compared with each other too."""
    episodes: int | None = Field(default=None, ge=1)
    """Number of episodes to judge, chosen by ``seed`` from those that need a judge. ``null`` judges all."""
    seed: int = 0
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the verdicts that may fail before the run ends with an error."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An episode to judge again. No text of a ``sealed`` one may be written to disk."""

    id: str
    task: str
    sample: Sample
    case: Case
    recorded: bool
    sealed: bool


@dataclass(frozen=True, slots=True)
class _Rater:
    """One pass of one judge. ``identity`` is everything except the case that a verdict depends on."""

    name: str
    judge: ModelJudge
    identity: Mapping[str, Any]
    url: str


async def agree(
    output_dir: Path, settings: AgreementSettings, *, on_progress: OnProgress | None = None
) -> Metrics:
    """Replace ``agreement`` in ``metrics.json`` of a finished evaluation.

    Only episodes with a recorded verdict and an answer that needs a judge count. The rest would agree by construction.
    Each verdict is a line of ``opinions.jsonl``, so a killed or repeated run asks only for the rest.

    Raises:
        ConfigError: No judge is configured, or another process uses ``output_dir``.
        DataError: ``output_dir`` holds no finished evaluation, no episode needs a judge, or a line is invalid.
        EngineError: The judges failed too often.
    """
    raters = list(_raters(settings))
    try:
        with RunFolder(output_dir, "output_dir").locked():
            metrics = finished_metrics(output_dir)
            agents = read_manifest(output_dir / MANIFEST_FILE).agents
            items, settled = _items(records_of(output_dir), agents, raters[0].judge)
            if not items:
                raise DataError(
                    f"no episode needs a judge ({settled} have no answer or exactly a gold answer)",
                    path=str(output_dir),
                )
            chosen = _sampled(items, settings)
            rows = await ask_judge(
                output_dir / OPINIONS_FILE,
                [_request(rater, item) for rater in raters for item in chosen],
                parallel=max(judge.max_parallel for judge in settings.judges),
                max_failed_share=settings.max_failed_share,
                on_progress=on_progress,
            )
            pairs = tuple(_agreements(raters, chosen, rows, settled, settings.seed))
            metrics = metrics.model_copy(update={"agreement": pairs})
            keep_metrics(output_dir, metrics)
    finally:
        await asyncio.gather(*(rater.judge.close() for rater in raters))
    return metrics


def _raters(settings: AgreementSettings) -> Iterator[_Rater]:
    """Yield each judge once for each time that it judges. Judges of the same name are numbered."""
    places = [judge.place() for judge in settings.judges]
    models = [place.model for place in places]
    several = settings.repeats > 1 or len(set(models)) < len(models)
    for number, (judge, place) in enumerate(zip(settings.judges, places, strict=True)):
        if place.url is None:
            raise ConfigError("agreement needs a judge: set GRM_BASE_URL, or agreement.judges[..].url")
        for repeat in range(settings.repeats):
            times = models[:number].count(place.model) * settings.repeats + repeat + 1
            fresh = judge.model_copy(update={"cache": None})  # otherwise a repeat would come from the cache
            yield _Rater(
                f"{place.model} #{times}" if several else place.model,
                ModelJudge(fresh),
                _identity(judge, place.model, times if several else 1),
                place.url,
            )


def _identity(judge: JudgeSettings, model: str, time: int) -> dict[str, Any]:
    fields = judge.request_fields(model, SCHEMA)
    return {"request": fields, "control": judge.control, "time": time}


def _items(records: Iterable[Record], agents: Agents, judge: ModelJudge) -> tuple[list[_Item], int]:
    """Return the episodes that need a judge, and the number of episodes with a verdict that do not."""
    items: list[_Item] = []
    settled = 0
    for written in records:
        recorded = _recorded(written)
        if recorded is None:
            continue
        record = opened(written)
        sample = Sample.of(agents.declared(record), record, record.segments)
        case = judge.case_of(sample)
        if isinstance(case, Case):
            items.append(_Item(record.id, task_of(record), sample, case, recorded, record is not written))
        else:
            settled += 1
    return items, settled


def _recorded(record: Record) -> bool | None:
    """Whether the run found the answer right, whatever its format. ``None`` without a verdict."""
    if record.error or record.verdict is None or record.verdict.score is None:
        return None
    return record.verdict.parts.get("correct", record.verdict.score) >= _RIGHT


def _sampled(items: Sequence[_Item], settings: AgreementSettings) -> list[_Item]:
    """Return a sample of the wanted size. It does not depend on the order in the file."""
    ordered = sorted(items, key=lambda item: item.id)
    if settings.episodes is None or settings.episodes >= len(ordered):
        return ordered
    return random.Random(settings.seed).sample(ordered, settings.episodes)


def _request(rater: _Rater, item: _Item) -> VerdictRequest:
    case = [item.case.question, list(item.case.accepted), item.case.answer]

    async def ask() -> dict[str, Any]:
        part = await rater.judge.judge(item.sample)
        if part.score is None:
            raise RewardError(part.evidence)
        why = {} if item.sealed else {"evidence": part.evidence}
        return {"episode": item.id, "judge": rater.name, "correct": part.score >= _RIGHT, **why}

    key = cache_key(rater.url, {**rater.identity, "episode": item.id, "case": case})
    return VerdictRequest((rater.name, item.id), key, ask)


def _agreements(
    raters: Sequence[_Rater],
    items: Sequence[_Item],
    rows: Verdicts,
    settled: int,
    seed: int,
) -> Iterator[Agreement]:
    """Yield the agreement of every pair of raters, those with the recorded verdicts first."""
    verdicts: dict[str, dict[str, bool | None]] = {RECORDED: {item.id: item.recorded for item in items}}
    for rater in raters:
        said = {item.id: rows[rater.name, item.id] for item in items}
        verdicts[rater.name] = {
            name: None if row is None else bool(row["correct"]) for name, row in said.items()
        }
    for first, second in combinations(verdicts, 2):
        pairs: dict[str, list[tuple[bool, bool]]] = {}
        abstained = 0
        for item in items:
            verdict, other = verdicts[first][item.id], verdicts[second][item.id]
            if verdict is None or other is None:
                abstained += 1
            else:
                pairs.setdefault(item.task, []).append((verdict, other))
        yield agreement(first, second, pairs, abstained=abstained, settled=settled, seed=seed)
