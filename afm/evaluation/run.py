"""Evaluate a model: every task through the one episode loop, resumable after any kind of death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from afm.agents import AgentSpec, Limits, PromptSource
from afm.datasets import Task
from afm.errors import BudgetSpentError, ConfigError, DataError, EngineError
from afm.evaluation.agents import Agents, RowAgents
from afm.evaluation.manifest import EPISODES_FILE, Sources, claim, make_manifest
from afm.evaluation.measures import UnseenTool
from afm.evaluation.metrics import Metrics, Tally, tally_of
from afm.evaluation.play import FailurePolicy, Job, ModelPlayer, Player, Referee, has_score, job_id
from afm.evaluation.resumption import FinishedEpisodes
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward
from afm.rollout import PublishedProtocol
from afm.rollout.routes import Routes
from afm.runs.atomic import replace_text
from afm.runs.folder import RunFolder
from afm.tools import Tool
from afm.trajectory.io import read_records
from afm.trajectory.record import Record
from afm.trajectory.sealing import SEALING_KEY, opened, sealed

METRICS_FILE = "metrics.json"

_FAILURES_IN_A_ROW = 20

OnProgress = Callable[[int, int], None]
"""Receives how many episodes are done, those of earlier starts included, and how many there are."""


async def evaluate(
    tasks: Sequence[Task],
    spec: AgentSpec,
    model: TokenModel | None,
    tools: Mapping[str, Tool],
    reward: Reward,
    out_dir: str | Path,
    *,
    sampling: SamplingParams,
    limits: Limits | None = None,
    rounds: int = 1,
    parallel: int = 64,
    seed: int = 0,
    failures: FailurePolicy | None = None,
    keep_tokens: bool = False,
    prompt: PromptSource | None = None,
    protocol: PublishedProtocol | None = None,
    sources: Sources | None = None,
    original: AgentSpec | None = None,
    unseen: Mapping[str, UnseenTool] | None = None,
    team: Player | None = None,
    row_agents: RowAgents | None = None,
    on_progress: OnProgress | None = None,
) -> Metrics:
    """Run every task ``rounds`` times and judge it.

    Writes ``manifest.json`` first, one line of ``episodes.jsonl`` for every finished episode (its id is the
    task's and the round's), and ``metrics.json`` last. Called again after a kill it skips what is finished and
    repeats episodes without a score. An episode's randomness depends on seed, task and round only, so an
    interrupted run gives the same episodes as an undisturbed one, whatever ``parallel``.

    Args:
        limits: Instead of the agent's own.
        parallel: Episodes in flight; tasks beyond wait as data, not as coroutines.
        keep_tokens: Whether episodes hold token ids, mask and log-probabilities.
        prompt: Where prompts come from; by default the agent's own.
        protocol: How AFM's script plays episodes; ``None`` for ours.
        sources: Where model, tools and reward came from, for the manifest.
        original: The agent that ``spec`` is without its tools, so that its tags are known.
        unseen: Tools that the model was not trained with, by role, whose arguments are checked.
        team: Who plays where ``model`` is ``None``; sampling, limits and tools are then its own.
        row_agents: Where rows choose their agent: all of them; the others' arguments are then those of the first.

    Raises:
        BudgetSpentError: The team's budget is spent. What is finished stays.
        ConfigError: A tool of the agent is missing, ``out_dir`` holds a run with other settings, or another
            process is at work in it.
        DataError: A task id stands twice, or a line of an earlier start is broken.
        EngineError: Too many episodes failed. What is finished stays; run again to repeat the rest.
        SandboxUnavailableError: Model-written code cannot run on this machine.
    """
    out = Path(out_dir)
    token_exact = model is None or model.token_exact
    if keep_tokens and not token_exact:
        raise ConfigError(
            "keep_tokens: a chat endpoint shows no token ids; leave it out, or serve the model with token ids"
        )
    player = team or _model_player(
        spec, model, tools, sampling, limits, keep_tokens, prompt or PromptSource(), protocol
    )
    referee = Referee(spec, player, reward, seed, failures or FailurePolicy())
    referees = {"": referee} if row_agents is None else _referees(referee, row_agents)
    agents = Agents.of(spec, original) if row_agents is None else row_agents.agents
    manifest = make_manifest(
        tasks,
        spec,
        player.name,
        sampling=sampling,
        limits=limits or spec.limits,
        rounds=rounds,
        seed=seed,
        sources=sources or Sources(),
        original=original,
        unseen=unseen,
        prompt=prompt,
        protocol=protocol,
        row_agents=row_agents,
        token_exact=token_exact,
    )
    with RunFolder(out, "out_dir").locked():
        claim(out, manifest)
        (out / METRICS_FILE).unlink(missing_ok=True)
        tally = tally_of(agents, unseen=unseen, prices=manifest.prices)
        with FinishedEpisodes(out / EPISODES_FILE) as finished:
            jobs = _missing(tasks, rounds, finished)
            routes = row_agents.routes if row_agents else None
            run = _Run(referees, routes, finished, tally, len(tasks) * rounds, on_progress)
            await run.work(jobs, parallel)
            for record in finished.records():  # counted last, so that work begins at once
                tally.add(opened(record))
        metrics = tally.metrics(seed=seed)
        replace_text(out / METRICS_FILE, metrics.model_dump_json(indent=2) + "\n")
    return metrics


def _model_player(
    spec: AgentSpec,
    model: TokenModel | None,
    tools: Mapping[str, Tool],
    sampling: SamplingParams,
    limits: Limits | None,
    keep_tokens: bool,
    prompt: PromptSource,
    protocol: PublishedProtocol | None,
) -> Player:
    if model is None:
        raise ConfigError("nobody plays; expected a model or a team")
    _check_tools(spec, tools)
    return ModelPlayer(spec, model, tools, sampling, limits, keep_tokens, prompt, protocol=protocol)


def _referees(like: Referee, agents: RowAgents) -> dict[str, Referee]:
    """Of each agent, by its key in ``agents:``; they share the model."""
    if not isinstance(like.player, ModelPlayer):
        raise ConfigError("a team answers as one agent; rows cannot choose theirs")
    made = {}
    for route in agents.routes:
        tools = agents.tools[route.name]
        _check_tools(route.declared, tools)
        player = replace(
            like.player,
            spec=route.declared,
            tools=tools,
            limits=route.limits,
            prompt=agents.prompts[route.name],
            protocol=like.player.protocol and PublishedProtocol.of(route.limits),
        )
        reward = agents.rewards[route.name]
        made[route.name] = replace(like, spec=route.declared, player=player, reward=reward, route=route.name)
    return made


def _missing(tasks: Sequence[Task], rounds: int, finished: FinishedEpisodes) -> Iterator[Job]:
    """The jobs that are left, made one by one; those that are finished are only looked up."""
    done = finished.ids
    for number in range(rounds):
        names = [job_id(task.id, number) for task in tasks]
        if not done.issuperset(names):
            yield from (
                Job(task, number) for task, name in zip(tasks, names, strict=True) if name not in done
            )


def _check_tools(spec: AgentSpec, tools: Mapping[str, Tool]) -> None:
    if missing := sorted(set(spec.tool_roles.values()) - set(tools)):
        given = ", ".join(sorted(tools)) or "none"
        raise ConfigError(f"agent {spec.name!r} needs the tools {missing}; given: {given}")


def _as_written(record: Record, job: Job) -> Record:
    key = job.task.extra_info.get(SEALING_KEY)
    return record if key is None else sealed(record, key)


class _Run:
    """The workers of one evaluation: they share an iterator of jobs, so only what is in flight is in memory."""

    def __init__(
        self,
        referees: Mapping[str, Referee],
        routes: Routes | None,
        finished: FinishedEpisodes,
        tally: Tally,
        total: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._referees = referees
        self._routes = routes
        self._max_share = next(iter(referees.values())).failures.max_share
        self._finished = finished
        self._tally = tally
        self._total = total
        self._on_progress = on_progress
        self._failures_in_a_row = 0
        self._spent: BudgetSpentError | None = None

    async def work(self, jobs: Iterator[Job], parallel: int) -> None:
        self._report()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(parallel, self._total)):
                    group.create_task(self._worker(jobs, parallel))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._spent is not None:
            raise self._spent

    async def _worker(self, jobs: Iterator[Job], parallel: int) -> None:
        for job in jobs:
            if self._spent is not None:
                return
            try:
                record = await self._referee(job).play(job)
            except BudgetSpentError as error:  # those under way may still end
                self._spent = error
                return
            self._finished.write(_as_written(record, job), scored=has_score(record))
            self._tally.add(record)
            self._report()
            self._check(record, parallel)

    def _referee(self, job: Job) -> Referee:
        name = self._routes.of(job.task.data_source, job.task.ability).name if self._routes else ""
        return self._referees[name]

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._finished.count + self._tally.episodes, self._total)

    def _check(self, record: Record, parallel: int) -> None:
        """End the run when failures are more than accidents."""
        self._failures_in_a_row = 0 if has_score(record) else self._failures_in_a_row + 1
        share = self._max_share
        too_many = self._tally.failed > share * self._total
        endless = share < 1 and self._failures_in_a_row >= max(_FAILURES_IN_A_ROW, 2 * parallel)
        if not too_many and not endless:
            return
        cause = record.error or (record.verdict.evidence if record.verdict else "")
        raise EngineError(
            f"{self._tally.failed} of {self._finished.count + self._tally.episodes} episodes ended without a score "
            f"({self._tally.errors} failures of engine or tools, {self._tally.abstained} abstentions of the "
            f"reward); at most {share:.0%} of {self._total} may. The last one: {cause or 'no reason given'}. "
            "Remove the cause and run again: finished episodes are kept, these are repeated"
        )


def finished_metrics(out_dir: Path) -> Metrics:
    """The figures of an evaluation that ended.

    Raises:
        DataError: There are none, or they are of another version.
    """
    file = out_dir / METRICS_FILE
    if not file.is_file():
        raise DataError(
            "no finished evaluation here; expected the out_dir of an `afm eval` that ended", path=str(out_dir)
        )
    try:
        return Metrics.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"no metrics of this version: {error}", path=str(file)) from None


def keep_metrics(out_dir: Path, metrics: Metrics) -> None:
    """Replace the figures."""
    replace_text(out_dir / METRICS_FILE, metrics.model_dump_json(indent=2) + "\n")


def records_of(out_dir: Path) -> Iterator[Record]:
    """The episodes as they stand in the file.

    Raises:
        DataError: A line is broken.
    """
    for item in read_records(out_dir / EPISODES_FILE):
        if isinstance(item, DataError):
            raise item
        yield item
