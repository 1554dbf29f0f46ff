"""Evaluate a model: play every task in the episode loop. An interrupted run can be resumed at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

from afm.agents import AgentSpec, PromptSource
from afm.datasets import Task
from afm.errors import BudgetSpentError, ConfigError, DataError, EngineError
from afm.evaluation.agents import RowAgents
from afm.evaluation.manifest import EPISODES_FILE, Conditions, claim, make_manifest
from afm.evaluation.metrics import Metrics, Tally
from afm.models.base import TokenModel
from afm.play import FailurePolicy, Job, ModelPlayer, Player, Referee, has_score, work_in_parallel
from afm.rewards import Reward
from afm.rollout import PublishedProtocol
from afm.runs.atomic import replace_text, replacing
from afm.runs.folder import RunFolder
from afm.tools import Tool, check_tools
from afm.trajectory.io import RecordWriter, numbered_records, raw_lines, read_records
from afm.trajectory.record import SEALING_KEY, Record, opened, sealed

METRICS_FILE = "metrics.json"

_FAILURES_IN_A_ROW = 20

OnProgress = Callable[[int, int], None]
"""Receives the number of finished episodes, with those of earlier starts, and the total."""


async def evaluate(
    tasks: Sequence[Task],
    spec: AgentSpec,
    model: TokenModel | None,
    tools: Mapping[str, Tool],
    reward: Reward,
    output_dir: str | Path,
    conditions: Conditions,
    *,
    parallel: int = 64,
    failures: FailurePolicy | None = None,
    keep_tokens: bool = False,
    team: Player | None = None,
    on_progress: OnProgress | None = None,
) -> Metrics:
    """Play and judge every task in ``conditions.rounds`` rounds.

    Writes ``manifest.json`` first, then a line of ``episodes.jsonl`` for each finished episode, and ``metrics.json``
    last. The id of an episode has its task and round. After a kill, the same call skips finished episodes and repeats
    those without a score. The randomness of an episode depends only on seed, task and round. So an interrupted run
    gives the same episodes as an undisturbed one, with any ``parallel``.

    Args:
        parallel: Episodes in progress. Other tasks wait as data, not as coroutines.
        keep_tokens: Whether episodes hold token ids, mask and log-probabilities.
        team: Plays if ``model`` is ``None``, with its own sampling, limits and tools.

    Raises:
        BudgetSpentError: The budget of the team is spent. Finished episodes are kept.
        ConfigError: A tool of the agent is missing, ``output_dir`` holds a run with other settings, or another
            process uses it.
        DataError: A task id occurs twice, or a line of an earlier start is invalid.
        EngineError: Too many episodes failed. Finished episodes are kept. Run again to repeat the rest.
        SandboxUnavailableError: Model-written code cannot run on this machine.
    """
    player = team or _model_player(spec, model, tools, conditions, keep_tokens=keep_tokens)
    referee = Referee(spec, player, reward, conditions.seed, failures or FailurePolicy())
    token_exact = model is None or model.token_exact
    manifest = make_manifest(tasks, spec, player.name, conditions, token_exact=token_exact)
    out = Path(output_dir)
    with RunFolder(out, "output_dir").locked():
        claim(out, manifest)
        (out / METRICS_FILE).unlink(missing_ok=True)
        tally = Tally(conditions.agents(spec), unseen=conditions.unseen, prices=manifest.prices)
        finished = FinishedEpisodes(out / EPISODES_FILE)
        with finished:
            run = _Run(referee, conditions, finished, tally, len(tasks) * conditions.rounds, on_progress)
            jobs = (Job(task, number) for number in range(conditions.rounds) for task in tasks)
            await run.work((job for job in jobs if job.id not in finished.ids), parallel)
            for record in finished.records():  # counted last, so that work begins at once
                tally.add(opened(record))
        metrics = tally.metrics(seed=conditions.seed)
        keep_metrics(out, metrics)
    return metrics


def _model_player(
    spec: AgentSpec,
    model: TokenModel | None,
    tools: Mapping[str, Tool],
    conditions: Conditions,
    *,
    keep_tokens: bool,
) -> Player:
    if model is None:
        raise ConfigError("evaluate: got neither a model nor a team, expected one of them")
    if keep_tokens and not model.token_exact:
        raise ConfigError(
            "keep_tokens: a chat endpoint returns no token ids; remove it, or serve the model with token ids"
        )
    check_tools(f"agent {spec.name!r}", spec.tool_roles.values(), tools)
    return ModelPlayer(
        spec,
        model,
        tools,
        conditions.sampling,
        conditions.limits,
        keep_tokens,
        conditions.prompt or PromptSource(),
        protocol=conditions.protocol,
    )


def _referees(like: Referee, agents: RowAgents) -> dict[str, Referee]:
    """Return a referee for each agent, by key in ``agents:``. They share the model."""
    if not isinstance(like.player, ModelPlayer):
        raise ConfigError("a team answers as one agent, so rows cannot choose their agents")
    referees = {}
    for route in agents.routes:
        spec, tools = route.declared, agents.tools[route.name]
        check_tools(f"agent {spec.name!r}", spec.tool_roles.values(), tools)
        player = replace(
            like.player,
            spec=spec,
            tools=tools,
            limits=route.limits,
            prompt=agents.prompts[route.name],
            protocol=like.player.protocol and PublishedProtocol.of(route.limits),
        )
        reward = agents.rewards[route.name]
        referees[route.name] = replace(like, spec=spec, player=player, reward=reward, route=route.name)
    return referees


class FinishedEpisodes(RecordWriter):
    """The episodes file of an evaluation, which this start continues.

    The constructor moves a half-written last line to another file and removes episodes without a score.

    Attributes:
        ids: Ids of the episodes of earlier starts.

    Raises:
        DataError: A line is no record.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self:
            pass  # moves a half-written last line to another file
        self.ids: set[str] = set()
        unscored: set[int] = set()
        for number, item in numbered_records(path):
            if isinstance(item, DataError):
                raise item
            if has_score(item):
                self.ids.add(item.id)
            else:
                unscored.add(number)
        if unscored:
            with replacing(path) as temporary, temporary.open("wb") as scored:
                scored.writelines(line for number, line in raw_lines(path) if number not in unscored)

    def records(self) -> Iterator[Record]:
        """Yield the episodes of earlier starts, one at a time.

        Raises:
            DataError: A line is no record. The error names file and line.
        """
        return islice(records_of(self.path.parent), len(self.ids))


class _Run:
    """The workers of an evaluation. They share an iterator of jobs, so only episodes in progress are in memory."""

    def __init__(
        self,
        referee: Referee,
        conditions: Conditions,
        finished: FinishedEpisodes,
        tally: Tally,
        total: int,
        on_progress: OnProgress | None,
    ) -> None:
        several = conditions.row_agents
        self._referees = {"": referee} if several is None else _referees(referee, several)
        self._routes = None if several is None else several.routes
        self._max_share = referee.failures.max_share
        self._finished = finished
        self._tally = tally
        self._total = total
        self._on_progress = on_progress
        self._failures_in_a_row = 0
        self._spent: BudgetSpentError | None = None

    async def work(self, jobs: Iterator[Job], parallel: int) -> None:
        """Play ``jobs``. After the budget is spent, only episodes in progress continue."""
        self._report()
        affordable = takewhile(lambda _: self._spent is None, jobs)
        await work_in_parallel(affordable, lambda job: self._play(job, parallel), parallel)
        if self._spent is not None:
            raise self._spent

    async def _play(self, job: Job, parallel: int) -> None:
        try:
            record = await self._referee(job).play(job)
        except BudgetSpentError as error:
            self._spent = error
            return
        key = job.task.extra_info.get(SEALING_KEY)
        self._finished.write(record if key is None else sealed(record, key))
        self._tally.add(record)
        self._report()
        self._check(record, parallel)

    def _referee(self, job: Job) -> Referee:
        name = self._routes.of(job.task.data_source, job.task.ability).name if self._routes else ""
        return self._referees[name]

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(len(self._finished.ids) + self._tally.episodes, self._total)

    def _check(self, record: Record, parallel: int) -> None:
        """End the run if too many episodes failed, or many in a row."""
        self._failures_in_a_row = 0 if has_score(record) else self._failures_in_a_row + 1
        share = self._max_share
        too_many = self._tally.failed > share * self._total
        endless = share < 1 and self._failures_in_a_row >= max(_FAILURES_IN_A_ROW, 2 * parallel)
        if not too_many and not endless:
            return
        cause = record.error or (record.verdict.evidence if record.verdict else "")
        raise EngineError(
            f"{self._tally.failed} of {len(self._finished.ids) + self._tally.episodes} episodes ended without a score "
            f"({self._tally.errors} failures of engine or tools, {self._tally.abstained} abstentions of the "
            f"reward); at most {share:.0%} of {self._total} may. The last one: {cause or 'no reason given'}. "
            "Remove the cause and run again. Finished episodes are kept, failed ones are repeated"
        )


def finished_metrics(output_dir: Path) -> Metrics:
    """Return the figures of a finished evaluation.

    Raises:
        DataError: The file is missing, or has another format.
    """
    file = output_dir / METRICS_FILE
    if not file.is_file():
        raise DataError(
            "no finished evaluation here; expected the output_dir of an `afm eval` that ended",
            path=str(output_dir),
        )
    try:
        return Metrics.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"metrics in another format: {error}", path=str(file)) from None


def keep_metrics(output_dir: Path, metrics: Metrics) -> None:
    """Replace the figures of an evaluation."""
    replace_text(output_dir / METRICS_FILE, metrics.model_dump_json(indent=2) + "\n")


def records_of(output_dir: Path) -> Iterator[Record]:
    """Yield the episodes in the order of the file.

    Raises:
        DataError: A line is invalid.
    """
    for item in read_records(output_dir / EPISODES_FILE):
        if isinstance(item, DataError):
            raise item
        yield item
