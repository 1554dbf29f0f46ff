"""Checks of an evaluation before the first episode."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from afm.agents import model_folder
from afm.configuration import read_mapping, validated
from afm.datasets import Task
from afm.datasets.hub import is_whole
from afm.datasets.hub_sets import LOCK_FILE, read_lock
from afm.errors import ConfigError, UsageError, exists_next_to, with_path
from afm.evaluation.benchmarks import BENCHMARKS
from afm.evaluation.config import EvalConfig, ModelSettings, load_config
from afm.evaluation.job import (
    checked_prompts,
    conditions_of,
    load_tasks,
    prices_of,
    row_agents,
    sources_of,
    task_files,
)
from afm.evaluation.manifest import (
    EPISODES_FILE,
    MANIFEST_FILE,
    RunManifest,
    data_checksum,
    differences,
    holds_episodes,
    make_manifest,
    read_manifest,
)
from afm.evaluation.page import plural
from afm.evaluation.tallies import Method
from afm.findings import Finding, Level, Report
from afm.harness.settings import program_finding
from afm.memory_arithmetic import TOKENIZER_FILES, disk_finding, missing_model_files, model_shape
from afm.models.openai import served_models
from afm.rewards import RewardSettings, load_reward
from afm.rewards.judge import ModelJudge, WithoutEndpoint
from afm.rewards.judge_endpoint import JudgeEndpoint
from afm.rewards.registry import BY_SOURCE, checked_name, scorer_name
from afm.rollout.routes import HOPELESS_ADVICE, Route, Routes, mismatch
from afm.tools import Tool, check_tools, load_tools
from afm.tools.health import tool_findings, unanswered

_NO_MODEL = "model=http://127.0.0.1:1"
_OF_THE_SERVER = ("model.name", "sampling.max_new_tokens")
"""Settings that only the model itself knows."""
_BYTES_A_TOKEN = 8
"""Bytes of a line in episodes.jsonl per token: text, calls and costs, without token ids."""


def diagnose(
    config_path: str | Path, overrides: Sequence[str], report: Report | None = None
) -> list[Finding]:
    """Check an evaluation without running an episode. Every error becomes a finding."""
    report = report or Report()
    loaded = report.asked("keys", lambda: _config(config_path, overrides, report))
    config, with_model = loaded or (None, False)
    routes = None if config is None else report.asked("agent", config.routes)
    if config is None or routes is None:
        return report.findings
    for route in routes:
        limits, spec = route.limits, route.declared
        calls = "any number of" if limits.max_turns is None else f"at most {limits.max_turns}"
        text = f"{spec.name} ({spec.digest}), {calls} tool calls an episode"
        report.add(_of_agent(Finding(Level.OK, "agent", text), route))
    report.asked("agent", config.unseen_roles)
    if report.asked("protocol", lambda: (config.published_protocol(),)) is None:
        return report.findings
    report.asked("prices", lambda: prices_of(config))
    if with_model:
        report.add(*_model(config, routes.max_response_tokens))
    if config.harness is None:
        report.asked("tools", lambda: _tools(config, routes, report))
    else:
        report.add(program_finding(config.harness))
    tasks = report.asked("data", lambda: load_tasks(config))
    if tasks is not None:
        report.add(*_data(config, tasks))
        report.asked("agents", lambda: _by_agent(config, routes, tasks, report))
        report.asked("judges", lambda: report.add(*_further_judges(config, len(tasks))))
        if config.benchmark is not None and config.team is None:
            report.asked("benchmark", lambda: report.add(_departures(config, tasks)))
        report.asked("output", lambda: report.add(*_output(config, routes, tasks)))
    return report.findings


def _by_agent(config: EvalConfig, routes: Routes, tasks: Sequence[Task], report: Report) -> None:
    """Check prompts and rewards of each agent's tasks, and report tasks that an agent can never solve."""
    if routes.by_row:
        kinds = Counter((task.data_source, task.ability) for task in tasks)
        unused = routes.check(kinds, ", ".join(map(str, config.data)))
        report.add(*(Finding(Level.WARNING, "agents", text) for text in unused))
    for route in routes:
        own = [task for task in tasks if routes.of(task.data_source, task.ability) is route]
        if routes.by_row:
            report.add(_of_agent(Finding(Level.OK, "agents", plural(len(own), "question")), route))
        asked = partial(checked_prompts, config, route, own)
        prompts = report.asked("prompts", asked) if config.team is None else None
        if prompts:
            report.add(_of_agent(Finding(Level.OK, "prompts", str(prompts)), route))
        report.asked("rewards", partial(_rewards, config, route, own, report))


def _of_agent(finding: Finding, route: Route) -> Finding:
    """Add the name of the agent to a finding, if there are several agents."""
    return replace(finding, text=f"{route.name}: {finding.text}") if route.name else finding


def _config(path: str | Path, overrides: Sequence[str], report: Report) -> tuple[EvalConfig, bool]:
    """Return the settings, and whether they name a model. Without one the other checks still run."""
    try:
        config, with_model = load_config(path, overrides), True
    except UsageError as error:
        if "model: missing" not in str(error):
            raise
        config, with_model = load_config(path, [*overrides, _NO_MODEL]), False
        report.add(Finding(Level.ERROR, "model", "missing; set model=DIR or model=http://HOST:PORT"))
    report.add(Finding(Level.OK, "keys", f"{config.name}: all keys are known"))
    if config.team is not None:
        text = f"{config.team.file} answers in place of a model; only `afm eval` reads its file and endpoints"
        report.add(Finding(Level.WARNING, "team", text))
    return config, with_model and config.team is None


def _tools(config: EvalConfig, routes: Routes, report: Report) -> None:
    tools: dict[str, Tool] = {}
    for route in routes:
        needed = set(route.declared.tool_roles.values())
        source = config.tools_in_use(route)
        loaded = load_tools(source) if source is not None else {}
        check_tools(f"agent {route.declared.name!r}", needed, loaded)
        tools |= {name: tool for name, tool in loaded.items() if name in needed}
    report.add(*tool_findings(tools))


def _data(config: EvalConfig, tasks: Sequence[Task]) -> Iterator[Finding]:
    count, checksum = data_checksum(tasks)
    episodes = count * config.rounds
    text = f"{plural(count, 'question')} x {plural(config.rounds, 'round')} = {plural(episodes, 'episode')}, sha256 {checksum[:16]}"
    yield Finding(Level.OK, "data", text)
    for place in config.data:
        for file in task_files(place):
            yield from _beside(file)
            yield from _locked(file)
    published = BENCHMARKS[config.benchmark].questions if config.benchmark else None
    if published is not None and published != count:
        text = f"{plural(count, 'question')} here, {published:,} published, so scores cannot be compared"
        yield Finding(Level.WARNING, "data", text)


def _beside(file: Path) -> Iterator[Finding]:
    """Check a file against the manifest next to it."""
    manifest = file.with_suffix(".manifest.json")
    if not manifest.is_file():
        return
    try:
        rows = json.loads(manifest.read_text(encoding="utf-8"))["counts"]["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        yield Finding(Level.WARNING, "data", f"{manifest} cannot be read; prepare the data again")
        return
    with file.open("rb") as lines:
        here = sum(1 for line in lines if line.strip()) if file.suffix == ".jsonl" else rows
    if here != rows:
        text = f"{file}: {here:,} rows, but {rows:,} in its manifest; prepare the data again"
        yield Finding(Level.ERROR, "data", text)


def _locked(file: Path) -> Iterator[Finding]:
    """Check a file of `afm data download` against the lock of its folder, bit for bit."""
    folder = next((parent for parent in file.absolute().parents if (parent / LOCK_FILE).is_file()), None)
    if folder is None:
        return
    name = file.absolute().relative_to(folder)
    pinned = read_lock(folder / LOCK_FILE).sets.get(name.parts[0])
    entries = pinned.hub_files() if pinned else ()
    wanted = [entry for entry in entries if Path(entry.name) == Path(*name.parts[1:])]
    if wanted and is_whole(wanted[0], file, lambda *_: None):
        yield Finding(Level.OK, "data", f"{file}: matches {folder / LOCK_FILE}")
    elif wanted:
        yield Finding(Level.ERROR, "data", f"{file}: differs from {folder / LOCK_FILE}; download it again")


def _rewards(config: EvalConfig, route: Route, tasks: Sequence[Task], report: Report) -> None:
    load_reward(route.rewards)
    label, data = read_mapping({} if route.rewards is None else route.rewards, "reward")
    reward = validated(RewardSettings, data, label)
    table = BY_SOURCE | {source.lower(): name for source, name in reward.by_source.items()}
    try:
        judged = [(task, _scorer(task, table)) for task in tasks]
    except ConfigError as error:
        raise ConfigError(with_path(str(error), config.data[0])) from None
    scorers = Counter(name for _, name in judged)
    listed = ", ".join(f"{name} ({count:,})" for name, count in scorers.most_common())
    report.add(
        _of_agent(Finding(Level.OK, "rewards", f"judged by {listed}; formula {reward.formula}"), route)
    )
    reasons = Counter(
        (task.data_source, why)
        for task, name in judged
        if (why := mismatch(route.declared, name, task.ground_truth)) is not None
    )
    for (source, why), count in reasons.items():
        text = f"{plural(count, 'question')} of data_source {source!r} can never be solved: {why}"
        report.add(Finding(Level.ERROR, "agents", f"{text}; {HOPELESS_ADVICE}"))
    if scorers["judge"]:
        report.add(*_judge(reward, scorers["judge"] * config.rounds))


def _scorer(task: Task, table: dict[str, str]) -> str:
    own = task.extra_info.get("reward")
    return checked_name(str(own), f"task {task.id}") if own else scorer_name(task.data_source, table)


def _judge(reward: RewardSettings, answers: int) -> Iterator[Finding]:
    if reward.judge.place().url is None:
        stands_in = reward.judge.without_endpoint is not WithoutEndpoint.ABSTAIN
        why = "exact match is used, which is stricter" if stands_in else "no answer would get a score"
        text = f"no endpoint: {why}; set GRM_BASE_URL, GRM_API_KEY and GRM_MODEL_NAME, or rewards.judge.url"
        yield Finding(Level.WARNING if stands_in else Level.ERROR, "judge", text)
        return
    ModelJudge(reward.judge)  # an address or a key that cannot be used is an error
    yield from _endpoint("judge", reward.judge, answers * (2 if reward.judge.control else 1))


def _model(config: EvalConfig, wanted: int | None) -> list[Finding]:
    """Check the model without loading it. ``wanted`` are the tokens of the longest response."""
    report = Report()
    settings, folder = config.answering, config.answering.folder
    if folder is None and settings.chat is None:
        report.asked("model", lambda: _check_tokenizer(settings.tokenizer))
    known = report.asked(
        "model", lambda: _served(settings) if folder is None else _model_folder(folder, config.recipe_file)
    )
    if known is not None:
        report.add(Finding(Level.OK, "model", known[0]))
    room = settings.context_tokens or (known[1] if known else None)
    if room and wanted:
        fits = wanted < room
        text = f"an episode has up to {wanted:,} tokens after its prompt, the model {room:,} in total"
        advice = "" if fits else "; lower limits.max_response_tokens, or serve it with more positions"
        report.add(Finding(Level.OK if fits else Level.WARNING, "context", text + advice))
    return report.findings


def _model_folder(folder: Path, source: Path | None) -> tuple[str, int | None]:
    """Describe a model folder, and return the number of positions of its model."""
    if not folder.is_dir():
        advice = exists_next_to(folder, source) or "; train a model, or name a server: model=URL"
        raise ConfigError(f"{folder}: no such folder{advice}")
    whole = model_folder(folder)
    if missing := missing_model_files(whole):
        raise ConfigError(f"{whole}: lacks {', '.join(missing)}; copy the whole model")
    shape = model_shape(str(whole))
    size = f", {shape.parameters / 1e6:,.1f} M parameters" if shape else ""
    return f"{whole}: configuration, weights and tokenizer{size}", shape.max_positions if shape else None


def _served(settings: ModelSettings) -> tuple[str, int | None]:
    """Ask the server for the model. Return a description, and the context if it reports one."""
    served = served_models(settings.path)
    listed = ", ".join(sorted(served)) or "nothing"
    name = settings.name or (next(iter(served)) if len(served) == 1 else None)
    if name is None:
        raise ConfigError(f"{settings.path} serves {listed}; choose with model.name=NAME")
    if name not in served:
        raise ConfigError(f"{settings.path} serves no {name!r}, but {listed}; fix model.name")
    return f"{name} answers at {settings.path}", served[name]


def _check_tokenizer(folder: str | None) -> None:
    if folder is None:
        raise ConfigError("a server needs its tokenizer on this machine; set model.tokenizer=DIR")
    if not any((model_folder(folder) / name).is_file() for name in TOKENIZER_FILES):
        names = " or ".join(TOKENIZER_FILES)
        raise ConfigError(
            f"{folder}: no tokenizer ({names}); set model.tokenizer=DIR to the folder of the model"
        )


def _further_judges(config: EvalConfig, questions: int) -> Iterator[Finding]:
    """Check what ``best_of`` and ``agreement`` need: rounds, an endpoint that answers, and its key."""
    best_of, why_not = config.choosing()
    if why_not:
        yield Finding(Level.WARNING, "best_of", f"skipped: {why_not}")
    if best_of is not None:
        graded = config.rounds if Method.SCORE in best_of.methods else 0
        listed = sum(config.rounds // k for k in best_of.sizes) if Method.LIST in best_of.methods else 0
        yield from _endpoint("best_of", best_of.judge, questions * (graded + listed))
    again, why_not = config.agreeing()
    if why_not:
        yield Finding(Level.WARNING, "agreement", f"skipped: {why_not}")
    if again is not None:
        episodes = min(again.episodes or questions * config.rounds, questions * config.rounds)
        for judge in again.judges:
            calls = episodes * again.repeats * (2 if judge.control else 1)
            yield from _endpoint("agreement", judge, calls)


def _endpoint(subject: str, judge: JudgeEndpoint, calls: int) -> Iterator[Finding]:
    place = judge.place()
    if place.url is None:
        return
    text = f"{place.model} at {place.url}, at most {calls:,} calls"
    if place.api_key is None:
        advice = f"export {judge.key_variable} if it needs one"
        yield Finding(Level.WARNING, subject, f"{text}, asked without a key; {advice}")
    else:
        yield Finding(Level.OK, subject, text)
    if why_not := asyncio.run(unanswered(place.url)):
        # Episodes and scores exist by then, so `afm eval choose` or `agree` can add the verdicts later.
        problem = f"no answer from {place.url} ({why_not}); start the server, or correct its address"
        yield Finding(Level.ERROR, subject, problem)


def _output(config: EvalConfig, routes: Routes, tasks: Sequence[Task]) -> Iterator[Finding]:
    folder = config.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(Level.ERROR, "output", f"{folder} cannot be written to; choose another output_dir")
        return
    yield from _earlier_run(config, tasks)
    longest = routes.max_response_tokens or 32768
    need = len(tasks) * config.rounds * longest * _BYTES_A_TOKEN
    yield disk_finding(
        need,
        config.output_dir,
        "episodes of full length",
        "lower rounds or limit, or choose another output_dir",
    )


def _departures(config: EvalConfig, tasks: Sequence[Task]) -> Finding:
    """Return the departures from the published run that the report will list."""
    departures = [str(text) for text in _manifest(config, tasks).sources["benchmark"]["departures"]]
    # The number of questions is a separate finding.
    others = [text for text in departures if not text.startswith("questions:")]
    if not others:
        return Finding(Level.OK, "benchmark", f"{config.benchmark}: the published settings")
    level = Level.WARNING if any(text.startswith("tests:") for text in others) else Level.OK
    return Finding(level, "benchmark", f"{config.benchmark}, not as published: {'; '.join(others)}")


def _earlier_run(config: EvalConfig, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Check the output folder for an earlier run."""
    manifest, episodes = config.output_dir / MANIFEST_FILE, config.output_dir / EPISODES_FILE
    if not manifest.exists() or not holds_episodes(config.output_dir) or config.team is not None:
        return
    now = _manifest(config, tasks)
    changed = [
        text for text in differences(read_manifest(manifest), now) if not text.startswith(_OF_THE_SERVER)
    ]
    if changed:
        text = f"{config.output_dir} holds a run with other settings ({', '.join(changed[:3])})"
        yield Finding(Level.ERROR, "output", f"{text}; choose another output_dir, or delete the folder")
        return
    with episodes.open("rb") as lines:
        done = sum(1 for _ in lines)
    yield Finding(
        Level.OK,
        "output",
        f"{config.output_dir} holds {plural(done, 'episode')} of this run, which is resumed",
    )


def _manifest(config: EvalConfig, tasks: Sequence[Task]) -> RunManifest:
    """Return the manifest that a run with these settings would write."""
    agents = row_agents(config, tasks, opened=False)
    model_name = config.answering.name or config.answering.path
    return make_manifest(
        tasks, agents.routes.first.declared, model_name, conditions_of(config, agents, sources_of(config))
    )
