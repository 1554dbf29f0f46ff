"""One episode of an evaluation: played, judged, and turned into a line, whatever fails on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tenacity import AsyncRetrying, RetryError, retry_if_exception, retry_if_result, stop_after_attempt
from tenacity.retry import retry_base
from tenacity.wait import wait_random_exponential

from afm.agents import AgentSpec, Limits, PromptSource
from afm.datasets import Task
from afm.errors import BudgetSpentError, EngineError, RefusedError, SandboxUnavailableError, ToolError
from afm.evaluation.measures import GROUPS_KEY, groups_of
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward, Sample
from afm.rewards.meter import judge_meter
from afm.rollout import Episode, PublishedProtocol, episode_record, run_episode, run_published
from afm.rollout.routes import ROUTE_KEY
from afm.tools import Tool
from afm.trajectory.record import Record, StopReason, Verdict
from afm.trajectory.types import Segment

_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What happens when infrastructure fails.

    Attributes:
        retries: Further attempts at an episode or a judgement that failed.
        max_share: Share of all episodes that may end without a score; more ends the run with an error.
    """

    retries: int = 2
    max_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: a task and the number of the round, from 0."""

    task: Task
    round: int

    @property
    def id(self) -> str:
        """Id of the episode's record."""
        return job_id(self.task.id, self.round)


def job_id(task_id: str, number: int) -> str:
    """Id of the record of a task's episode in round ``number``."""
    return f"{task_id}#{number}"


def episode_seed(seed: int, task_id: str, number: int) -> int:
    """Seed of one episode: 31 bits of a hash, so that episodes do not share their randomness."""
    text = f"{seed}\0{task_id}\0{number}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:4]) >> 1


def has_score(record: Record) -> bool:
    """Whether an episode counts in the results."""
    return not record.error and record.verdict is not None and not record.verdict.abstained


class Player(Protocol):
    """Who plays the tasks of an evaluation: a model in the episode loop, or a team."""

    @property
    def name(self) -> str:
        """Identifies the player in records and manifests."""
        ...

    @property
    def keeps_format(self) -> bool:
        """Whether its text has to keep the agent's rules; of a team only the answer is judged."""
        ...

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """One episode, not yet judged.

        Args:
            episode: Id of its record.

        Raises:
            EngineError, ToolError: Infrastructure failed, so that the episode has no score.
            BudgetSpentError: The run may cost no more; it ends.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPlayer:
    """A model in the episode loop.

    Attributes:
        limits: Instead of the agent's own.
        keep_tokens: Whether records hold token ids, mask and log-probabilities.
        prompt: Where the prompts come from.
        protocol: How AFM's script plays episodes; ``None`` for ours.
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
        """The model's."""
        return self.model.name

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """See :class:`Player`."""
        done = await self._played(task, seed)
        if done.stop is StopReason.ABORTED:
            raise EngineError("the engine aborted the generation")
        return episode_record(
            done,
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

    async def _played(self, task: Task, seed: int) -> Episode:
        known = (self.spec, self.model, self.tools, task.question)
        if self.protocol is not None:
            return await run_published(
                *known,
                self.prompt.messages(self.spec, task.question, task.prompt),
                protocol=self.protocol,
                limits=self.limits or self.spec.limits,
                sampling=self.sampling,
                seed=seed,
            )
        return await run_episode(
            *known,
            prompt_ids=self.prompt_ids(task),
            limits=self.limits,
            sampling=self.sampling,
            seed=seed,
        )

    def prompt_ids(self, task: Task) -> list[int]:
        """Token ids that a task is asked with.

        Raises:
            DataError: The row holds no prompt though ``prompt: row`` asks for it.
        """
        messages = self.prompt.messages(self.spec, task.question, task.prompt)
        return list(self.model.encode_prompt(messages))


@dataclass(frozen=True, slots=True)
class Referee:
    """Has single episodes played, and judges them.

    A failing engine or tool server makes a record with ``error``, a failing reward one whose verdict
    abstains: neither has a score.

    Attributes:
        seed: Of the whole run.
        route: The agent's key in ``agents:``, where there are several.
    """

    spec: AgentSpec
    player: Player
    reward: Reward
    seed: int = 0
    failures: FailurePolicy = FailurePolicy()
    route: str = ""

    async def play(self, job: Job) -> Record:
        """The record of one episode.

        Raises:
            SandboxUnavailableError: Model-written code cannot run on this machine at all.
            BudgetSpentError: The run may cost no more.
        """
        try:
            record: Record = await self._retrying(retry_if_exception(_may_pass))(self._episode, job)
        except (SandboxUnavailableError, BudgetSpentError):
            raise
        except (EngineError, ToolError) as error:
            return self._failed(job, error)
        provenance = record.provenance | self._provenance(job)
        verdict = await self._verdict(job, record)
        return record.model_copy(update={"verdict": verdict, "provenance": provenance})

    async def _episode(self, job: Job) -> Record:
        record = await self.player.play(job.id, job.task, self._seed(job))
        if record.calls and not any(call.ok for call in record.calls):
            raise _ToolsDownError(f"every tool call failed; the last: {record.calls[-1].observation.strip()}")
        return record

    async def _verdict(self, job: Job, record: Record) -> Verdict:
        sample = Sample(
            spec=self.spec,
            data_source=job.task.data_source,
            question=job.task.question,
            segments=tuple(Segment(part.author, part.text) for part in record.segments),
            ground_truth=job.task.ground_truth,
            agent_tokens=record.cost.agent_tokens,
            response_tokens=record.cost.agent_tokens + record.cost.observation_tokens,
            extra_info=job.task.extra_info,
            answer_alone=not self.player.keeps_format,
        )
        with judge_meter() as spent:
            try:
                verdict: Verdict = await self._retrying(retry_if_result(_abstains))(self.reward.score, sample)
            except RetryError as last:
                verdict = last.last_attempt.result()
        return verdict.model_copy(update={"judge_tokens": spent.tokens}) if spent.tokens else verdict

    def _failed(self, job: Job, error: Exception) -> Record:
        return Record(
            id=job.id,
            agent=self.spec.name,
            agent_digest=self.spec.digest,
            question=job.task.question,
            segments=(),
            ground_truth=job.task.ground_truth,
            data_source=job.task.data_source,
            model=self.player.name,
            seed=self._seed(job),
            stop=StopReason.ERROR,
            provenance=self._provenance(job),
            error=f"{type(error).__name__.lstrip('_')}: {error}",
        )

    def _provenance(self, job: Job) -> dict[str, object]:
        route: dict[str, object] = {ROUTE_KEY: self.route} if self.route else {}
        groups = groups_of(job.task.extra_info)
        return {"task": job.task.id, "round": job.round} | route | ({GROUPS_KEY: groups} if groups else {})

    def _seed(self, job: Job) -> int:
        return episode_seed(self.seed, job.task.id, job.round)

    def _retrying(self, retry: retry_base) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry,
            stop=stop_after_attempt(self.failures.retries + 1),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S),
            reraise=True,
        )


class _ToolsDownError(ToolError):
    """An episode says nothing about the agent when none of its tool calls was carried out."""


def _may_pass(error: BaseException) -> bool:
    """Whether the same episode may succeed at once: not where a budget is spent, or a team cannot read the task."""
    lasting = (BudgetSpentError, SandboxUnavailableError, RefusedError)
    return isinstance(error, EngineError | _ToolsDownError) and not isinstance(error, lasting)


def _abstains(verdict: Verdict) -> bool:
    return verdict.abstained
