"""Read finished evaluations, compare them with the first, and choose questions that show what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afm.agents import AgentSpec
from afm.errors import ConfigError, DataError
from afm.evaluation.agents import Agents
from afm.evaluation.failures import Scan, scan
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, RunManifest, differences, read_manifest
from afm.evaluation.metrics import Metrics, passed, summarise, task_of
from afm.evaluation.page import plural
from afm.evaluation.paired import (
    PairedDifference,
    Played,
    Savings,
    holm_corrected,
    paired_difference,
    savings,
)
from afm.evaluation.report_input import BenchmarkNote, Pair, StageResult, beside_published
from afm.evaluation.run import METRICS_FILE, finished_metrics, records_of
from afm.trajectory.io import read_records
from afm.trajectory.record import Record, opened


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation. ``manifest`` is ``None`` if ``evaluate`` did not make the folder."""

    folder: Path
    name: str
    metrics: Metrics
    manifest: RunManifest | None
    finished: bool

    @property
    def episodes(self) -> Path:
        """The episodes file."""
        return self.folder / EPISODES_FILE

    @property
    def declared(self) -> RunManifest:
        """The manifest.

        Raises:
            DataError: There is no manifest.
        """
        return self.manifest or read_manifest(self.folder / MANIFEST_FILE)

    @property
    def spec(self) -> AgentSpec | None:
        """The agent, the first of several. ``None`` if it cannot be read."""
        agents = agents_of(self.manifest)
        return agents.first if agents else None

    def records(self) -> Iterator[Record]:
        """Yield the readable episodes."""
        return (item for item in read_records(self.episodes) if isinstance(item, Record))

    def stage(self, *, scanned: bool = True) -> StageResult:
        """Return the evaluation as a stage of a report. ``scanned`` reads all episodes for results beyond the metrics."""
        episode_scan = scan(self.records(), agents_of(self.manifest)) if scanned else None
        return StageResult(
            self.name,
            self.metrics,
            self.episodes,
            self._note(),
            episode_scan,
            self._published(episode_scan),
            own_prompt=self.manifest is None or _in_own_words(self.manifest),
        )

    def _note(self) -> str:
        parts = [f"{plural(self.metrics.questions, 'question')}{self._files()}"]
        if self.metrics.rounds > 1:
            parts.append(f"{self.metrics.rounds} rounds")
        if self.manifest is not None:
            parts.append(f"temperature {self.manifest.settings['sampling']['temperature']:g}")
        return ", ".join(parts)

    def _files(self) -> str:
        data = self.manifest.sources.get("data", ()) if self.manifest is not None else ()
        return f" of {', '.join(Path(path).name for path in data)}" if data else ""

    def _published(self, episode_scan: Scan | None) -> BenchmarkNote | None:
        note = beside_published(self.manifest, self.metrics) if self.manifest is not None else None
        if note is None:
            return None
        unscored = self.metrics.episodes - self.metrics.scored
        remark = f"{unscored} of {self.metrics.episodes} episodes have no score. Our figures are shares of the others."
        return replace(
            note,
            departures=(*note.departures, *self._further_departures(episode_scan)),
            remarks=(*note.remarks, *((remark,) if unscored else ())),
        )

    def _further_departures(self, episode_scan: Scan | None) -> Iterator[str]:
        """Departures that only the episodes show."""
        if not self.finished:
            yield f"not finished: {self.metrics.episodes} episodes so far"
        if episode_scan is not None and episode_scan.unjudged:
            yield f"judge: exact match replaced a model in {episode_scan.unjudged} of {self.metrics.scored} episodes"


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """Read the evaluation in ``folder`` and call it ``name``. An unfinished one has its figures so far.

    Raises:
        DataError: Its manifest or metrics cannot be read.
    """
    manifest_file, finished = folder / MANIFEST_FILE, (folder / METRICS_FILE).exists()
    manifest = read_manifest(manifest_file) if manifest_file.exists() else None
    if finished:
        metrics = finished_metrics(folder)
    else:
        items = read_records(folder / EPISODES_FILE)
        records = (opened(item) for item in items if isinstance(item, Record))
        prices = manifest.prices if manifest else None
        metrics = summarise(records, spec=agents_of(manifest), prices=prices)
    return Evaluation(folder, name, metrics, manifest, finished)


def agents_of(manifest: RunManifest | None) -> Agents | None:
    """Return the agents of an evaluation, ``None`` if they cannot be read."""
    try:
        return manifest.agents if manifest else None
    except (ValueError, KeyError, ConfigError):
        return None


def _in_own_words(manifest: RunManifest) -> bool:
    """Whether each question was asked with its agent's own prompt."""
    asked = (manifest.settings, *manifest.settings.get("agents", {}).values())
    return manifest.team is None and not any("prompt" in settings for settings in asked)


OF_THE_MODEL = ("model.",)
"""Settings that may differ, because a comparison is about them."""
_OF_A_TEAM = (*OF_THE_MODEL, "agent.", "prompt", "sampling.", "limits.")
"""Settings that may differ between a team and a model: a team has its own sampling and limits, and no agent's format."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with the first run.

    Attributes:
        changes: Other settings than the model that differ, as ``key: old -> new``.
        savings: Savings, if exactly one of the two runs is that of a team.
        prices: A warning if the two use different prices, so that costs cannot be compared.
    """

    folder: Path
    metrics: Metrics
    paired: PairedDifference | None = None
    changes: tuple[str, ...] = ()
    prices: str = ""
    savings: Savings | None = None


def compare(folders: Sequence[Path], *, anyway: bool = False, seed: int = 0) -> list[Comparison]:
    """Compare each evaluation with the first. Several p-values are corrected for their number.

    Args:
        folders: ``output_dir`` of at least two evaluations.
        anyway: Compare although settings differ.

    Raises:
        ConfigError: Settings other than those of the model differ.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    return compare_evaluations(read_evaluations(folders), anyway=anyway, seed=seed)


def read_evaluations(folders: Sequence[Path]) -> list[Evaluation]:
    """Read the evaluations in ``folders`` and give them distinct names.

    Raises:
        DataError: A folder is no evaluation.
    """
    for folder in folders:
        if not (folder / EPISODES_FILE).is_file():
            raise DataError("no episodes here; expected the output_dir of `afm eval`", path=str(folder))
        read_manifest(folder / MANIFEST_FILE)
    return [read_evaluation(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]


def compare_evaluations(runs: Sequence[Evaluation], *, anyway: bool, seed: int = 0) -> list[Comparison]:
    """Compare evaluations as :func:`compare` does."""
    first, *others = runs
    rows = [Comparison(first.folder, first.metrics)]
    for other in others:
        before, after = first.declared, other.declared
        may_differ = OF_THE_MODEL if (before.team is None) == (after.team is None) else _OF_A_TEAM
        changes = tuple(change for change in differences(before, after) if not change.startswith(may_differ))
        if changes and not anyway:
            raise ConfigError(
                f"{first.folder} and {other.folder} did not measure the same thing: {'; '.join(changes)}. "
                "Add --anyway to compare them"
            )
        paired = paired_difference(records_of(first.folder), records_of(other.folder), seed=seed)
        prices, saved = _other_prices(before, after), _savings(first, other)
        rows.append(Comparison(other.folder, other.metrics, paired, changes, prices, saved))
    several = [row.paired for row in rows if row.paired is not None]
    if len(several) < 2:
        return rows
    corrected = zip(rows[1:], holm_corrected(several), strict=True)
    return [rows[0], *(replace(row, paired=paired) for row, paired in corrected)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct ends of the paths. A repeated folder gets its number."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} ({number})" for number, path in enumerate(parts, 1)]


def _savings(first: Evaluation, other: Evaluation) -> Savings | None:
    """Return the savings of the model, if exactly one of the two runs is that of a team."""
    teams = [run for run in (first, other) if run.declared.team is not None]
    if len(teams) != 1:
        return None
    model = other if teams[0] is first else first
    return savings(*map(_played, (teams[0], model)))


def _played(run: Evaluation) -> Played:
    prices, by_team = run.declared.prices, run.declared.team is not None
    return Played(run.name, map(opened, records_of(run.folder)), prices, by_team)


def _other_prices(first: RunManifest, other: RunManifest) -> str:
    """Return a warning if the prices differ. The runs stay comparable, because prices do not change scores."""
    if first.prices == other.prices or None in (first.prices, other.prices):
        return ""
    return f"costs use different prices: {_listed(first)} -> {_listed(other)}"


def _listed(manifest: RunManifest) -> str:
    prices = manifest.prices.model_dump(exclude_none=True) if manifest.prices else {}
    tools = prices.pop("tools", {})
    return ", ".join(f"{name} {usd:g}" for name, usd in (prices | tools).items())


Reader = Callable[[], Iterable[Record]]
"""Reads the episodes of a stage from the beginning."""


@dataclass(frozen=True, slots=True)
class _Glance:
    """What the choice of pairs needs to know of a question's first scored episode."""

    id: str
    question: str
    passed: bool
    tool_calls: int


def pick_pairs(before: tuple[str, Reader], after: tuple[str, Reader], *, count: int = 3) -> list[Pair]:
    """Return pairs of episodes of a question: first one that was gained, one that stayed, and one that was lost."""
    first, second = _glances(before[1]()), _glances(after[1]())
    common = [
        (first[task], second[task])
        for task in sorted(first.keys() & second.keys())
        if first[task].question == second[task].question
    ]
    chosen = _choose(common, _kinds(before[0], after[0]), count)
    old_records = _load(before[1](), {old.id for _, old, _ in chosen})
    new_records = _load(after[1](), {new.id for _, _, new in chosen})
    return [
        Pair(title, ((before[0], old_records[old.id]), (after[0], new_records[new.id])))
        for title, old, new in chosen
    ]


def _kinds(before: str, after: str) -> list[tuple[str, Callable[[_Glance, _Glance], bool]]]:
    old, new = (name if name.startswith("after ") else f"by {name}" for name in (before, after))
    return [
        (
            f"Solved {new}, with the tool that was not used {old}",
            lambda old, new: not old.passed and new.passed and old.tool_calls == 0 < new.tool_calls,
        ),
        (f"Solved {old} and {new}", lambda old, new: old.passed and new.passed),
        (f"Solved {old}, not {new}", lambda old, new: old.passed and not new.passed),
        (f"Solved neither {old} nor {new}", lambda old, new: not old.passed and not new.passed),
        (f"Solved {new}, not {old}", lambda old, new: not old.passed and new.passed),
    ]


def _choose(
    pairs: Sequence[tuple[_Glance, _Glance]],
    kinds: Sequence[tuple[str, Callable[[_Glance, _Glance], bool]]],
    count: int,
) -> list[tuple[str, _Glance, _Glance]]:
    """Return the first pair of every kind, then the second of every kind, up to ``count``."""
    chosen: list[tuple[str, _Glance, _Glance]] = []
    taken: set[str] = set()
    for title, fits in [kind for _ in range(count) for kind in kinds]:
        pair_of_kind = next((pair for pair in pairs if pair[0].id not in taken and fits(*pair)), None)
        if pair_of_kind is not None and len(chosen) < count:
            taken.add(pair_of_kind[0].id)
            chosen.append((title, *pair_of_kind))
    return chosen


def pick_episodes(name: str, read: Reader, *, count: int = 3) -> Iterator[Pair]:
    """Yield single episodes: one passed, one not passed, one without a score, then further ones in that order."""
    first: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    titles = {True: "Passed", False: "Not passed", None: "Without a score"}
    for record in read():
        outcome = passed(record)
        if len(first[outcome]) < count:
            first[outcome].append(record.id)
    ranked = sorted(
        (rank, number, identity, titles[outcome])
        for number, (outcome, ids) in enumerate(first.items())
        for rank, identity in enumerate(ids)
    )
    chosen = ranked[:count]
    records = _load(read(), {identity for _, _, identity, _ in chosen})
    for _, _, identity, title in chosen:
        yield Pair(f"{title}, {name}", ((name, records[identity]),))


def _glances(records: Iterable[Record]) -> dict[str, _Glance]:
    """Return facts by task of the episode with the smallest id, so that the order in the file does not matter."""
    glances: dict[str, _Glance] = {}
    for record in records:
        outcome = passed(record)
        task = task_of(record)
        if outcome is None or (task in glances and glances[task].id <= record.id):
            continue
        glances[task] = _Glance(record.id, record.question, outcome, record.cost.tool_calls)
    return glances


def _load(records: Iterable[Record], ids: set[str]) -> dict[str, Record]:
    return {record.id: record for record in records if record.id in ids}
