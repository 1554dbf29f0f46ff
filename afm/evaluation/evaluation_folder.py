"""One evaluation on disk, as a report reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from afm.agents import AgentSpec
from afm.errors import ConfigError, DataError
from afm.evaluation.agents import Agents
from afm.evaluation.beside import BenchmarkNote, beside_published
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, Manifest, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.report_input import StageResult
from afm.evaluation.run import METRICS_FILE
from afm.evaluation.scan import Scan, scan
from afm.trajectory.io import read_records
from afm.trajectory.record import Record
from afm.trajectory.sealing import opened


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation.

    Attributes:
        manifest: ``None`` for a folder that was not made by ``evaluate``.
        finished: Whether it ran to its end.
    """

    folder: Path
    name: str
    metrics: Metrics
    manifest: Manifest | None
    finished: bool

    @property
    def episodes(self) -> Path:
        """Its episodes file."""
        return self.folder / EPISODES_FILE

    @property
    def spec(self) -> AgentSpec | None:
        """Its agent, as far as that can be read; of several the first."""
        agents = agents_of(self.manifest)
        return agents.first if agents else None

    def records(self) -> Iterator[Record]:
        """Its readable episodes."""
        return (item for item in read_records(self.episodes) if isinstance(item, Record))

    def stage(self, *, scanned: bool = True) -> StageResult:
        """As the report shows it; ``scanned`` reads all episodes for what the metrics do not hold."""
        found = scan(self.records(), agents_of(self.manifest)) if scanned else None
        return StageResult(
            self.name,
            self.metrics,
            self.episodes,
            self._note(),
            found,
            self._published(found),
            own_prompt=self.manifest is None or _in_own_words(self.manifest),
        )

    def _note(self) -> str:
        parts = [f"{self.metrics.questions:,} questions{self._files()}"]
        if self.metrics.rounds > 1:
            parts.append(f"{self.metrics.rounds} rounds")
        if self.manifest is not None:
            parts.append(f"temperature {self.manifest.settings['sampling']['temperature']:g}")
        return ", ".join(parts)

    def _files(self) -> str:
        data = self.manifest.sources.get("data", ()) if self.manifest is not None else ()
        return f" of {', '.join(Path(path).name for path in data)}" if data else ""

    def _published(self, found: Scan | None) -> BenchmarkNote | None:
        note = beside_published(self.manifest, self.metrics) if self.manifest is not None else None
        if note is None:
            return None
        unscored = self.metrics.episodes - self.metrics.scored
        remark = f"{unscored} of {self.metrics.episodes} episodes have no score; ours are the shares of the others."
        return replace(
            note,
            departures=(*note.departures, *self._further_departures(found)),
            remarks=(*note.remarks, *((remark,) if unscored else ())),
        )

    def _further_departures(self, found: Scan | None) -> Iterator[str]:
        """What became known only while it ran."""
        if not self.finished:
            yield f"not finished: {self.metrics.episodes} episodes so far"
        if found is not None and found.unjudged:
            yield f"judge: exact match stood in for a model in {found.unjudged} of {self.metrics.scored} episodes"


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """The evaluation in ``folder``, called ``name``; of one that is not finished the figures so far.

    Raises:
        DataError: Its manifest or metrics cannot be read.
    """
    manifest_file, metrics_file = folder / MANIFEST_FILE, folder / METRICS_FILE
    manifest = read_manifest(manifest_file) if manifest_file.exists() else None
    finished = metrics_file.exists()
    if finished:
        try:
            metrics = Metrics.model_validate_json(metrics_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"no metrics of this version: {error}", path=str(metrics_file)) from None
    else:
        found = read_records(folder / EPISODES_FILE)
        records = (opened(item) for item in found if isinstance(item, Record))
        prices = manifest.prices if manifest else None
        metrics = summarise(records, spec=agents_of(manifest), prices=prices)
    return Evaluation(folder, name, metrics, manifest, finished)


def agents_of(manifest: Manifest | None) -> Agents | None:
    """The agents of an evaluation, as far as can be read."""
    try:
        return manifest.agents if manifest else None
    except (ValueError, KeyError, ConfigError):
        return None


def _in_own_words(manifest: Manifest) -> bool:
    """Whether each question was asked in its agent's own prompt."""
    asked = (manifest.settings, *manifest.settings.get("agents", {}).values())
    return manifest.team is None and not any("prompt" in one for one in asked)
