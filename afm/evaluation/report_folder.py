"""Read a run folder for its report; every part of it may be missing.

A quickstart run holds ``sft/``, ``rl/`` and the evaluations ``eval_sft/``, ``eval_rl/``, ``eval_real/``; any other
``eval_*`` folder counts as one more stage. The ``output_dir`` of a single evaluation works as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afm.agents import AgentSpec, model_folder
from afm.errors import ConfigError, DataError
from afm.evaluation.agents import Agents
from afm.evaluation.failures import Scan, scan
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, RunManifest, differences, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.paired import paired_difference
from afm.evaluation.report_input import (
    VIEW_PORT,
    BenchmarkNote,
    Command,
    Pair,
    ReportInput,
    StageDifference,
    StageResult,
    ViewLinks,
    beside_published,
)
from afm.evaluation.report_sections import facts_of, pick_episodes, pick_pairs, score_curves
from afm.evaluation.run import METRICS_FILE, finished_metrics
from afm.evaluation.training_logs import RL_METRICS, read_curves, read_health
from afm.trajectory.io import read_records
from afm.trajectory.record import Record, opened


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation; ``manifest`` is ``None`` for a folder that was not made by ``evaluate``."""

    folder: Path
    name: str
    metrics: Metrics
    manifest: RunManifest | None
    finished: bool

    @property
    def episodes(self) -> Path:
        """Its episodes file."""
        return self.folder / EPISODES_FILE

    @property
    def declared(self) -> RunManifest:
        """Its manifest.

        Raises:
            DataError: It has none.
        """
        return self.manifest or read_manifest(self.folder / MANIFEST_FILE)

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
        parts = [f"{self.metrics.questions:,} questions{self._files()}"]
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
        remark = f"{unscored} of {self.metrics.episodes} episodes have no score; ours are the shares of the others."
        return replace(
            note,
            departures=(*note.departures, *self._further_departures(episode_scan)),
            remarks=(*note.remarks, *((remark,) if unscored else ())),
        )

    def _further_departures(self, episode_scan: Scan | None) -> Iterator[str]:
        """What became known only while it ran."""
        if not self.finished:
            yield f"not finished: {self.metrics.episodes} episodes so far"
        if episode_scan is not None and episode_scan.unjudged:
            yield f"judge: exact match stood in for a model in {episode_scan.unjudged} of {self.metrics.scored} episodes"


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """The evaluation in ``folder``, called ``name``; of one that is not finished the figures so far.

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
    """The agents of an evaluation, as far as can be read."""
    try:
        return manifest.agents if manifest else None
    except (ValueError, KeyError, ConfigError):
        return None


def _in_own_words(manifest: RunManifest) -> bool:
    """Whether each question was asked in its agent's own prompt."""
    asked = (manifest.settings, *manifest.settings.get("agents", {}).values())
    return manifest.team is None and not any("prompt" in settings for settings in asked)


_KNOWN = {"eval_sft": "after SFT", "eval_rl": "after RL", "eval_real": "real data"}
_MODEL_KEYS = ("model.", "versions.")
_TOOL_GAIN = 0.05
_WORLD = "world"


def read_run(run_dir: Path, *, view_port: int = VIEW_PORT) -> ReportInput:
    """Everything a report can show about ``run_dir``; links lead to `afm view` on ``view_port``.

    Raises:
        DataError: The folder holds nothing to report, or a manifest or metrics file is broken.
    """
    evaluations = _evaluations(run_dir)
    curves, notes = read_curves(run_dir)
    if not evaluations and not curves:
        raise DataError(
            f"{run_dir} holds nothing to report; expected {EPISODES_FILE} of an evaluation, trainer_log.jsonl of "
            f"`afm sft` or {RL_METRICS} of `afm rl`, or a run folder with {', '.join(_KNOWN)}, sft or rl"
        )
    notes = [*unfinished_notes(evaluations), *notes]
    spec = _spec(evaluations, notes)
    several = _several(evaluations)
    by_folder = {evaluation.folder.name: evaluation for evaluation in evaluations}
    before, after = by_folder.get("eval_sft"), by_folder.get("eval_rl")
    both = (before, after) if before and after else None
    stages = tuple(evaluation.stage() for evaluation in evaluations)
    difference = _difference(*both, notes) if both else None
    return ReportInput(
        title=_title(run_dir, spec, several),
        spec=spec,
        agents=several,
        facts=tuple(
            facts_of(run_dir, [(evaluation.name, evaluation.manifest) for evaluation in evaluations])
        ),
        stages=stages,
        differences=(difference,) if difference else (),
        tool_story=_tool_story(run_dir, *both) if both else None,
        curves=(*score_curves(_on_same_questions(evaluations, stages)), *curves),
        health=read_health(run_dir),
        pairs=tuple(_pairs(evaluations, both)),
        commands=tuple(_commands(run_dir, spec, evaluations)),
        notes=tuple(notes),
        links=ViewLinks(run_dir, view_port) if evaluations else None,
    )


def _on_same_questions(evaluations: Sequence[Evaluation], stages: Sequence[StageResult]) -> list[StageResult]:
    """The first stage and those that asked the same questions: only their costs belong into one picture."""
    data = [
        evaluation.manifest.settings["data"] if evaluation.manifest else None for evaluation in evaluations
    ]
    return [stage for stage, asked in zip(stages, data, strict=True) if asked == data[0]]


def read_stages(run_dir: Path) -> list[StageResult]:
    """The evaluated stages of ``run_dir``, in the order of the work.

    Raises:
        DataError: A manifest or metrics file is broken.
    """
    return [evaluation.stage(scanned=False) for evaluation in _evaluations(run_dir)]


def _evaluations(run_dir: Path) -> list[Evaluation]:
    if (run_dir / EPISODES_FILE).exists():
        return [read_evaluation(run_dir, "this run")]
    others = sorted(
        folder.name
        for folder in run_dir.glob("eval_*")
        if folder.name not in _KNOWN and (folder / EPISODES_FILE).exists()
    )
    names = _KNOWN | {name: _spoken(name) for name in others}
    return [
        read_evaluation(run_dir / folder, name)
        for folder, name in names.items()
        if (run_dir / folder / EPISODES_FILE).exists()
    ]


def _spoken(folder: str) -> str:
    """``eval_aime24_1a2b3c4d`` is the evaluation of aime24; the end tells files of one name apart."""
    return re.sub(r"_[0-9a-f]{8}\Z", "", folder.removeprefix("eval_")).replace("_", " ")


def unfinished_notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """A sentence about each that did not run to its end."""
    return [
        f"The evaluation {evaluation.name} is not finished: the figures are of its first {evaluation.metrics.episodes} episodes."
        for evaluation in evaluations
        if not evaluation.finished
    ]


def _spec(evaluations: list[Evaluation], notes: list[str]) -> AgentSpec | None:
    manifests = [evaluation.manifest for evaluation in evaluations if evaluation.manifest is not None]
    if not manifests:
        return None
    try:
        return manifests[0].spec
    except (ValueError, KeyError, ConfigError) as error:
        notes.append(
            f"The agent's declaration in the manifest cannot be read ({error}); roles are not coloured."
        )
        return None


def _several(evaluations: list[Evaluation]) -> Agents | None:
    """The agents of the first evaluation in which rows chose theirs."""
    known = (agents_of(evaluation.manifest) for evaluation in evaluations)
    return next((agents for agents in known if agents and len(agents.specs) > 1), None)


def _title(run_dir: Path, spec: AgentSpec | None, several: Agents | None) -> str:
    name = run_dir.resolve().name
    if several is not None:
        return f"The agents {', '.join(several.specs)}, run {name}"
    return f"The {spec.name} agent, run {name}" if spec else f"Run {name}"


def _difference(before: Evaluation, after: Evaluation, notes: list[str]) -> StageDifference | None:
    try:
        result = paired_difference(before.records(), after.records())
    except DataError as error:
        notes.append(f"No paired difference: {error}.")
        return None
    changed: list[str] = []
    if before.manifest is not None and after.manifest is not None:
        differing = differences(before.manifest, after.manifest)
        changed = [change for change in differing if not change.startswith(_MODEL_KEYS)]
    caveats = tuple(f"The two stages were not run alike: {change}." for change in changed)
    return StageDifference(before.name, after.name, result, caveats)


def _tool_story(run_dir: Path, before: Evaluation, after: Evaluation) -> tuple[str, str] | None:
    """The stages to explain; only the team of the generated world is known to answer without the tool."""
    if not (run_dir / _WORLD).is_dir():
        return None
    used_before, used_after = before.metrics.tool_use, after.metrics.tool_use
    if used_before is None or used_after is None or used_after - used_before < _TOOL_GAIN:
        return None
    return before.name, after.name


def _pairs(evaluations: list[Evaluation], both: tuple[Evaluation, Evaluation] | None) -> Iterator[Pair]:
    if both is None:
        for evaluation in evaluations[:1]:
            yield from pick_episodes(evaluation.name, evaluation.records)
        return
    before, after = both
    yield from pick_pairs((before.name, before.records), (after.name, after.records))
    for evaluation in evaluations:
        if evaluation is not before and evaluation is not after:
            for pair in pick_episodes(evaluation.name, evaluation.records, count=1):
                yield replace(pair, spec=_spec([evaluation], []))


def _commands(run_dir: Path, spec: AgentSpec | None, evaluations: list[Evaluation]) -> Iterator[Command]:
    models = [
        folder for name in ("rl", "sft") if (model_folder(folder := run_dir / name) / "config.json").exists()
    ]
    question = next((record.question for evaluation in evaluations for record in evaluation.records()), None)
    if spec is not None and models and question is not None:
        model = shlex.quote(str(models[0]))
        if (index := run_dir / _WORLD / "index").is_dir():
            yield Command(
                f"afm serve wiki --index {shlex.quote(str(index))}",
                "Start the search server that the next two need, and leave it running",
            )
        yield Command(
            f"afm ask {shlex.quote(question)} --agent {spec.name} --model {model}",
            "Watch one episode live with the trained model",
        )
        yield Command(
            f"afm eval configs/tiny/eval/{spec.name}_world.yaml model={model} "
            f"data={shlex.quote(str(run_dir / _WORLD / 'heldout.jsonl'))} rounds=8 "
            f"output_dir={shlex.quote(str(run_dir / 'eval_rounds'))}",
            "Eight rounds a question: how much luck is in one sample, and what pass@8 is",
        )
    if (run_dir / "rl").is_dir():
        yield Command(
            "MODEL=models/code_agent_7b_sft train/code_agent/rl/train_dapo_code_agent.sh --dry-run",
            "The same training for a 7B model on GPUs: print what would run",
        )
