"""Episodes: played, judged and turned into records, also if something fails.

Evaluation uses :class:`Referee`, which judges and does not raise for a failed episode. The selection of questions for
reinforcement learning uses :func:`play_once` and judges separately. :func:`work_in_parallel` runs either for several
tasks at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tenacity import AsyncRetrying, RetryError, retry_if_exception, retry_if_result, stop_after_attempt
from tenacity.retry import retry_base
from tenacity.wait import wait_random_exponential

from afm.agents import AgentSpec, Limits, PromptSource
from afm.datasets import Task
from afm.errors import BudgetSpentError, EngineError, RefusedError, SandboxUnavailableError, ToolError
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward, Sample
from afm.rewards.judge_endpoint import judge_meter
from afm.rollout import Episode, PublishedProtocol, episode_record, run_episode, run_published
from afm.rollout.routes import ROUTE_KEY
from afm.seeds import episode_seed
from afm.tools import Tool
from afm.trajectory.record import Record, StopReason, Verdict

GROUPS_KEY = "groups"
"""Key of a record's provenance with the groups of its question."""

_GROUP_FIELDS = (
    *("level", "difficulty", "category", "subject", "subfield"),
    *("domain", "problem_topic", "type", "prop", "platform", "steps"),
)
"""Fields of published rows that group questions."""
_MAX_GROUP_CHARS = 80
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limits for failures of infrastructure.

    Attributes:
        retries: Further attempts at an episode or a judgement that failed.
        max_share: Largest share of episodes without a score; a larger share ends the run with an error.
    """

    retries: int = 2
    max_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """An episode to play: a task and its round, counted from 0."""

    task: Task
    round: int

    @property
    def id(self) -> str:
        """Id of the episode's record."""
        return job_id(self.task.id, self.round)


def job_id(task_id: str, number: int) -> str:
    """Return the id of the record of a task's episode in round ``number``."""
    return f"{task_id}#{number}"


def has_score(record: Record) -> bool:
    """Return whether an episode counts in the results."""
    return not record.error and record.verdict is not None and not record.verdict.abstained


class Player(Protocol):
    """A model in the episode loop, or a team, that plays tasks."""

    @property
    def name(self) -> str:
        """Name of the player in records and manifests."""
        ...

    @property
    def keeps_format(self) -> bool:
        """Whether its text must keep the agent's rules. For a team, only the answer is judged."""
        ...

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """Play one episode. It is not judged, unless the player judges its own episodes.

        Args:
            episode: Id of the record.

        Raises:
            EngineError, ToolError: Infrastructure failed, so that the episode has no score.
            BudgetSpentError: The budget is spent, and the run ends.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPlayer:
    """A model in the episode loop.

    Attributes:
        limits: Replace the agent's limits.
        keep_tokens: Whether records contain token ids, mask and log-probabilities.
        protocol: The protocol of AFM's script; ``None`` for ours.
    """

    spec: AgentSpec
    model: TokenModel
    tools: Mapping[str, Tool]
    sampling: SamplingParams
    limits: Limits | None = None
    keep_tokens: bool = False
    prompt: PromptSource = field(default_factory=PromptSource)
    keeps_format: bool = True
    protocol: PublishedProtocol | None = None

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """See :meth:`Player.play`."""
        played = await self._run(task, seed)
        if played.stop is StopReason.ABORTED:
            raise EngineError("the engine aborted the generation")
        return episode_record(
            played,
            self.spec,
            id=episode,
            question=task.question,
            ground_truth=task.ground_truth,
            data_source=task.data_source,
            model=self.name,
            seed=seed,
            with_tokens=self.keep_tokens,
            provenance=None if self.model.token_exact else {"token_exact": False},
        )

    async def _run(self, task: Task, seed: int) -> Episode:
        scene = (self.spec, self.model, self.tools, task.question)
        messages = self.prompt.messages(self.spec, task.question, task.prompt)
        if self.protocol is not None:
            return await run_published(
                *scene,
                messages,
                protocol=self.protocol,
                limits=self.limits or self.spec.limits,
                sampling=self.sampling,
                seed=seed,
            )
        prompt_ids = list(self.model.encode_prompt(messages))
        return await run_episode(
            *scene, prompt_ids=prompt_ids, limits=self.limits, sampling=self.sampling, seed=seed
        )


class ToolsDownError(ToolError):
    """Every tool call of an episode failed, so its result says nothing about the question."""


async def play_once(player: Player, episode: str, task: Task, seed: int) -> Record:
    """Play one episode without judging it.

    Raises:
        ToolsDownError: Every tool call of the episode failed.
        EngineError, ToolError: Infrastructure failed.
        BudgetSpentError: The budget is spent.
    """
    record = await player.play(episode, task, seed)
    if record.calls and not any(call.ok for call in record.calls):
        last = record.calls[-1].observation.strip()
        raise ToolsDownError(
            f"every tool call failed, which says nothing about the question; the last: {last}"
        )
    return record


@dataclass(frozen=True, slots=True)
class Referee:
    """Plays and judges single episodes.

    If an engine or tool server fails, the record has an ``error``. If the reward fails, the verdict abstains. Neither has
    a score.

    Attributes:
        seed: Seed of the whole run.
        route: The agent's key in ``agents:``, if there are several agents.
    """

    spec: AgentSpec
    player: Player
    reward: Reward
    seed: int = 0
    failures: FailurePolicy = FailurePolicy()
    route: str = ""

    async def play(self, job: Job) -> Record:
        """Play and judge one episode, and return its record.

        Raises:
            SandboxUnavailableError: Model-written code cannot run on this machine at all.
            BudgetSpentError: The budget is spent.
        """
        seed = episode_seed(self.seed, job.task.id, job.round)
        attempts = self._retrying(retry_if_exception(_may_pass))
        try:
            record: Record = await attempts(play_once, self.player, job.id, job.task, seed)
        except (SandboxUnavailableError, BudgetSpentError):
            raise
        except (EngineError, ToolError) as error:
            return self._failed(job, seed, error)
        provenance = record.provenance | self._provenance(job)
        verdict = record.verdict or await self._verdict(job, record)
        return record.model_copy(update={"verdict": verdict, "provenance": provenance})

    async def _verdict(self, job: Job, record: Record) -> Verdict:
        sample = Sample.of(
            self.spec,
            job.task,
            record.segments,
            agent_tokens=record.cost.agent_tokens,
            response_tokens=record.cost.agent_tokens + record.cost.observation_tokens,
            extra_info=job.task.extra_info,
            answer_alone=not self.player.keeps_format,
        )
        with judge_meter() as spent:
            try:
                verdict: Verdict = await self._retrying(retry_if_result(lambda verdict: verdict.abstained))(
                    self.reward.score, sample
                )
            except RetryError as last:
                verdict = last.last_attempt.result()
        return verdict.model_copy(update={"judge_tokens": spent.tokens}) if spent.tokens else verdict

    def _failed(self, job: Job, seed: int, error: Exception) -> Record:
        return Record(
            id=job.id,
            agent=self.spec.name,
            agent_digest=self.spec.digest,
            question=job.task.question,
            segments=(),
            ground_truth=job.task.ground_truth,
            data_source=job.task.data_source,
            model=self.player.name,
            seed=seed,
            stop=StopReason.ERROR,
            provenance=self._provenance(job),
            error=f"{type(error).__name__}: {error}",
        )

    def _provenance(self, job: Job) -> dict[str, object]:
        route: dict[str, object] = {ROUTE_KEY: self.route} if self.route else {}
        groups = groups_of(job.task.extra_info)
        return {"task": job.task.id, "round": job.round} | route | ({GROUPS_KEY: groups} if groups else {})

    def _retrying(self, retry: retry_base) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry,
            stop=stop_after_attempt(self.failures.retries + 1),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S),
            reraise=True,
        )


def groups_of(extra_info: Mapping[str, Any]) -> dict[str, str]:
    """Return the groups of a question by field name."""
    values = {key: extra_info.get(key) for key in _GROUP_FIELDS}
    return {
        key: str(value)
        for key, value in values.items()
        if isinstance(value, str | int) and 0 < len(str(value)) <= _MAX_GROUP_CHARS
    }


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed. It cannot if the budget is spent or a team cannot read the task."""
    lasting = (BudgetSpentError, SandboxUnavailableError, RefusedError)
    return isinstance(error, EngineError | ToolsDownError) and not isinstance(error, lasting)


JobT = TypeVar("JobT")


async def work_in_parallel(
    jobs: Iterable[JobT], work: Callable[[JobT], Awaitable[None]], parallel: int
) -> None:
    """Do ``work`` on every job, ``parallel`` at a time. A job is read when a worker is free.

    Raises:
        Exception: The first exception of a job. It cancels the other jobs.
    """
    todo = iter(jobs)

    async def worker() -> None:
        for job in todo:
            await work(job)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())
    except* Exception as errors:
        raise _first(errors) from errors


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
