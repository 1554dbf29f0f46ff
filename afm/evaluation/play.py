"""One episode of an evaluation: played, judged, and turned into a line, whatever fails on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, retry_if_result, stop_after_attempt
from tenacity.retry import retry_base
from tenacity.wait import wait_random_exponential

from afm.agents import AgentSpec, Limits
from afm.datasets import Task
from afm.datasets.schema import MESSAGES_KEY
from afm.errors import EngineError, ToolError
from afm.evaluation.groups import GROUPS_KEY, groups_of
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward, Sample
from afm.rewards.meter import judge_meter
from afm.rollout import Episode, episode_record, run_episode
from afm.tools import Tool
from afm.trajectory.record import Record, StopReason, Verdict

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


@dataclass(frozen=True, slots=True)
class Player:
    """Plays and judges single episodes.

    A failing engine or tool server makes a record with ``error``, a failing reward one whose verdict
    abstains: neither has a score.

    Attributes:
        limits: Instead of the agent's own.
        seed: Of the whole run.
        keep_tokens: Whether records hold token ids, mask and log-probabilities.
    """

    spec: AgentSpec
    model: TokenModel
    tools: Mapping[str, Tool]
    reward: Reward
    sampling: SamplingParams
    limits: Limits | None = None
    seed: int = 0
    failures: FailurePolicy = FailurePolicy()
    keep_tokens: bool = False

    async def play(self, job: Job) -> Record:
        """The record of one episode.

        Raises:
            SandboxUnavailableError: Model-written code cannot run on this machine at all.
        """
        try:
            attempts = self._retrying(retry_if_exception_type((EngineError, _ToolsDownError)))
            episode: Episode = await attempts(self._episode, job)
        except (EngineError, _ToolsDownError) as error:
            return self._failed(job, error)
        return episode_record(
            episode,
            self.spec,
            id=job.id,
            question=job.task.question,
            ground_truth=job.task.ground_truth,
            data_source=job.task.data_source,
            model=self.model.name,
            seed=self._seed(job),
            verdict=await self._verdict(job, episode),
            provenance=_provenance(job),
            with_tokens=self.keep_tokens,
        )

    async def _episode(self, job: Job) -> Episode:
        episode = await run_episode(
            self.spec,
            self.model,
            self.tools,
            job.task.question,
            prompt_ids=self._own_prompt(job.task),
            limits=self.limits,
            sampling=self.sampling,
            seed=self._seed(job),
        )
        if episode.stop is StopReason.ABORTED:
            raise EngineError("the engine aborted the generation")
        if episode.calls and not any(call.ok for call in episode.calls):
            raise _ToolsDownError(
                f"every tool call failed; the last: {episode.calls[-1].observation.strip()}"
            )
        return episode

    def _own_prompt(self, task: Task) -> list[int] | None:
        """The chat that a task brings along, encoded; ``None`` for the agent's prompt."""
        messages = task.extra_info.get(MESSAGES_KEY)
        return None if messages is None else self.model.encode_prompt(messages)

    async def _verdict(self, job: Job, episode: Episode) -> Verdict:
        sample = Sample(
            spec=self.spec,
            data_source=job.task.data_source,
            question=job.task.question,
            segments=episode.segments,
            ground_truth=job.task.ground_truth,
            agent_tokens=episode.cost.agent_tokens,
            response_tokens=episode.cost.agent_tokens + episode.cost.observation_tokens,
            extra_info=job.task.extra_info,
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
            model=self.model.name,
            seed=self._seed(job),
            stop=StopReason.ERROR,
            provenance=_provenance(job),
            error=f"{type(error).__name__.lstrip('_')}: {error}",
        )

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


def _abstains(verdict: Verdict) -> bool:
    return verdict.abstained


def _provenance(job: Job) -> dict[str, object]:
    groups = groups_of(job.task.extra_info)
    return {"task": job.task.id, "round": job.round} | ({GROUPS_KEY: groups} if groups else {})
