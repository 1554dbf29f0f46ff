"""Read the content of a report from a run folder, or from several evaluations. Every part of a folder may be missing.

A quickstart run contains ``sft/``, ``rl/`` and the evaluations ``eval_sft/``, ``eval_rl/`` and ``eval_real/``. Any
other ``eval_*`` folder is one more stage. The ``output_dir`` of a single evaluation is also accepted.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from afm.agents import AgentSpec, holds_model, lacks_model, load_agent, model_folder, shipped_agents
from afm.configuration import read_file
from afm.errors import ConfigError, DataError, UsageError
from afm.evaluation.agents import Agents
from afm.evaluation.compare import (
    Evaluation,
    agents_of,
    compare_evaluations,
    pick_episodes,
    pick_pairs,
    read_evaluation,
    read_evaluations,
)
from afm.evaluation.config import CONFIG_FILE, load_config
from afm.evaluation.curves import RL_METRICS, read_curves, score_curves
from afm.evaluation.health import read_health
from afm.evaluation.manifest import EPISODES_FILE, differences
from afm.evaluation.paired import paired_difference
from afm.evaluation.report_input import (
    VIEW_PORT,
    Command,
    Pair,
    ReportInput,
    StageDifference,
    StageResult,
    ViewLinks,
    facts_of,
    links_below,
)
from afm.file_kinds import configs_folder
from afm.terminal import afm_command

_KNOWN = {"eval_sft": "after SFT", "eval_rl": "after RL", "eval_real": "real data"}
_MODEL_KEYS = ("model.", "versions.")
_TOOL_GAIN = 0.05
_WORLD = "world"


def read_run(run_dir: Path, *, view_port: int = VIEW_PORT) -> ReportInput:
    """Return the content of a report on ``run_dir``. Links lead to `afm view` on ``view_port``.

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
    notes = [*_unfinished_notes(evaluations), *notes]
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
    """Return the first stage and those with the same questions. Only their costs can be compared in one picture."""
    data = [
        evaluation.manifest.settings["data"] if evaluation.manifest else None for evaluation in evaluations
    ]
    return [stage for stage, asked in zip(stages, data, strict=True) if asked == data[0]]


def read_stages(run_dir: Path) -> list[StageResult]:
    """Return the evaluated stages of ``run_dir``, in the order in which they ran.

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
    # aime24 for eval_aime24_1a2b3c4d, whose checksum distinguishes files of one name
    names = _KNOWN | {name: re.sub(r"_[0-9a-f]{8}\Z", "", name.removeprefix("eval_")) for name in others}
    return [
        read_evaluation(run_dir / folder, name)
        for folder, name in names.items()
        if (run_dir / folder / EPISODES_FILE).exists()
    ]


def _unfinished_notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence about each unfinished evaluation."""
    return [
        f"The evaluation {evaluation.name} is not finished. Its figures are from the first {evaluation.metrics.episodes} episodes."
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
    """Return the agents of the first evaluation with several agents."""
    known = (agents_of(evaluation.manifest) for evaluation in evaluations)
    return next((agents for agents in known if agents and len(agents.specs) > 1), None)


def _title(run_dir: Path, spec: AgentSpec | None, several: Agents | None) -> str:
    folder = run_dir.resolve()
    run = f"runs of {folder.parent.name}" if folder.name == "runs" else f"run {folder.name}"
    if several is not None:
        return f"The agents {', '.join(several.specs)}, {run}"
    return f"The {spec.name} agent, {run}" if spec else f"R{run[1:]}"


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
    caveats = tuple(f"The two stages had different settings: {change}." for change in changed)
    return StageDifference(before.name, after.name, result, caveats)


def _tool_story(run_dir: Path, before: Evaluation, after: Evaluation) -> tuple[str, str] | None:
    """Return the stages to explain. Only the team of the generated world is known to answer without the tool."""
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


def _start() -> Command:
    words, activate = f"cd {shlex.quote(str(Path.cwd()))}", Path(sys.executable).with_name("activate")
    if afm_command() != "afm" and activate.is_file():
        words += f" && source {shlex.quote(str(activate))}"
    return Command(words, "Start in the folder this report was written from")


def _commands(run_dir: Path, spec: AgentSpec | None, evaluations: list[Evaluation]) -> Iterator[Command]:
    """Yield commands that can be pasted in the folder from which the report was written."""
    if not evaluations:
        if commands := list(_training_commands(run_dir)):
            yield from (_start(), *commands)
        return
    yield _start()
    yield Command(f"afm view {shlex.quote(str(run_dir))}", "Read every episode in a browser")
    models = [folder for name in ("rl", "sft") if holds_model(model_folder(folder := run_dir / name))]
    question = next((record.question for evaluation in evaluations for record in evaluation.records()), None)
    if spec is not None and models and question is not None:
        model = shlex.quote(str(models[0]))
        if (index := run_dir / _WORLD / "index").is_dir():
            yield Command(
                f"afm serve wiki --index {shlex.quote(str(index))}",
                "Start the search server that the next two commands need, and leave it running",
            )
        yield Command(
            f"afm ask {shlex.quote(question)} --model {model}{_files_of(evaluations[-1].folder, spec)}",
            "Watch one episode live with the trained model",
        )
    if spec is not None and models and evaluations[-1].metrics.rounds == 1:
        folder = evaluations[-1].folder
        if (config := folder / CONFIG_FILE).is_file():
            out = folder.with_name(f"{folder.name}_8_rounds")
            yield Command(
                f"afm eval {shlex.quote(str(config))} rounds=8 {shlex.quote(f'output_dir={out}')}",
                "Ask every question eight times, to see pass@8 and the variance of single samples",
            )


def _training_commands(run_dir: Path) -> Iterator[Command]:
    """Yield the commands for a training run, which has no evaluation of its own."""
    run = shlex.quote(str(run_dir))
    if next(run_dir.glob("episodes/*.jsonl"), None):
        yield Command(f"afm view {run}", "Read the sampled episodes in a browser")
    lack = lacks_model(run_dir)
    if "afm export" in lack:
        yield Command(f"afm export {run}", "Write the newest checkpoint as a model")
    if lack:
        return
    evaluated = sorted(run_dir.parent.glob(f"eval_*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    if (options := _options_of_training(run_dir, evaluated)) is not None:
        yield Command(f"afm ask --model {run}{options}", "Chat with the trained model. Ctrl-D ends the chat")
    out = run_dir.with_name(f"eval_{run_dir.name}")
    if out.exists():
        yield Command(f"afm report {shlex.quote(str(out))}", "See how well it answers")
    elif evaluated:
        words = (str(evaluated[-1]), f"model={run_dir}", f"output_dir={out}")
        line = f"afm eval {' '.join(map(shlex.quote, words))}"
        yield Command(line, "Evaluate it as the last evaluation in this folder was")


def _options_of_training(run_dir: Path, evaluated: Sequence[Path]) -> str | None:
    """Return the options of ``afm ask`` for the agent of a training run, or ``None`` if its tools are not known."""
    config = run_dir / "rl_config.yaml"
    tools = read_file(config).get("tools") if config.is_file() else None
    if isinstance(tools, str):
        shipped = Path(tools).is_relative_to(configs_folder().resolve())
        return "" if shipped else f" --tools {shlex.quote(tools)}"
    try:
        spec = load_agent(run_dir)
        if spec.name in shipped_agents() and load_agent(spec.name).digest == spec.digest:
            return ""
    except ConfigError:
        return None
    return _files_of(evaluated[-1].parent, spec) if evaluated else None


def _files_of(folder: Path, spec: AgentSpec) -> str:
    """Return the options of ``afm ask`` for an evaluation's agent, and for its tools if they are not shipped."""
    try:
        settings, shipped = load_config(folder / CONFIG_FILE), configs_folder().resolve()
    except (ConfigError, UsageError):
        return f" --agent {spec.name}"
    words = f" --agent {shlex.quote(settings.agent or spec.name)}"
    tools = settings.tools
    if not isinstance(tools, Path) or not tools.is_file():  # a relative path is wrong in the copy of a run
        return words
    return words if tools.resolve().is_relative_to(shipped) else f"{words} --tools {shlex.quote(str(tools))}"


def read_comparison(
    folders: Sequence[Path], *, anyway: bool = False, view_port: int = VIEW_PORT
) -> ReportInput:
    """Return the content of a report on several evaluations, each compared with the first.

    Args:
        anyway: Compare even if other settings than the model's differ. The page lists the differences.

    Raises:
        ConfigError: These settings differ.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    runs = read_evaluations(folders)
    first, *_ = names = [run.name for run in runs]
    rows = compare_evaluations(runs, anyway=anyway)
    stages = tuple(run.stage() for run in runs)
    words = [*map(str, folders), *(["--anyway"] if anyway else [])]
    return ReportInput(
        title=f"{', '.join(names[:-1])} and {names[-1]}",
        kind="Comparison",
        spec=runs[0].spec,
        facts=tuple(facts_of(folders[0], [(run.name, run.manifest) for run in runs])),
        stages=stages,
        differences=tuple(
            StageDifference(
                first,
                name,
                row.paired,
                tuple(f"Not comparable: {change}." for change in row.changes),
                f"{row.prices[:1].upper()}{row.prices[1:]}." if row.prices else "",
            )
            for name, row in zip(names, rows, strict=True)
            if row.paired is not None
        ),
        savings=tuple(row.savings for row in rows if row.savings is not None),
        curves=tuple(score_curves(stages)),
        pairs=tuple(pick_pairs(*((run.name, run.records) for run in runs[:2]))),
        commands=(
            _start(),
            Command(f"afm eval compare {shlex.join(words)}", "The figures of this page in the terminal"),
        ),
        notes=tuple(_unfinished_notes(runs)),
        links=links_below(folders, view_port),
    )
