"""An agent loop for verl that plays episodes with :mod:`afm.rollout`: real tools, exact tokens, rewards during rollout.

List it in the YAML of ``actor_rollout_ref.rollout.agent.agent_loop_config_path``::

    - name: afm_agent
      _target_: verl_ext.agent_loop.AfmAgentLoop
      settings: /path/of/settings.yaml     # agent, tools, rewards, limits (see EpisodeSettings)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from afm.agents import AgentSpec, PromptSource
from afm.datasets import Task
from afm.datasets.schema import task_of_row
from afm.errors import AfmError, DataError, EngineError
from afm.models.base import SamplingParams, TokenModel
from afm.models.tokenizer import ChatTokenizer, generation_end_ids
from afm.rewards import Reward, Sample, load_reward
from afm.rollout import Episode, episode_record, run_episode
from afm.rollout.routes import ROUTE_KEY, Opened, Route, Routes
from afm.sandbox.slots import share_cores
from afm.seeds import derive_seed
from afm.tools import Tool, load_tools
from afm.trajectory.record import Verdict
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.failures import is_fatal, record_failure
from verl_ext.group_guard import SAMPLER
from verl_ext.kept_episodes import keep, worth_keeping
from verl_ext.metrics import validating
from verl_ext.settings import EpisodeSettings, load_episode_settings, unfinished
from verl_ext.teacher import SCORES, score_response, shared_teacher
from verl_ext.training_sample import ServerModel, failed_sample, room_of, training_sample

_SHARES = 1 << 16


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all episodes of one agent share in one process."""

    settings: EpisodeSettings
    route: Route
    tools: Mapping[str, Tool]
    reward: Reward


@dataclass(frozen=True, slots=True)
class Shared:
    """The agents of a run in one process."""

    routes: Routes
    by_agent: Mapping[str, Surroundings]

    def of(self, task: Task) -> Surroundings:
        """Return what the episodes of a question share.

        Raises:
            DataError: No agent takes the question.
        """
        return self.by_agent[self.routes.of(task.data_source, task.ability).name]


@cache
def surroundings(settings_path: str, workers: int = 1) -> Shared:
    """Return agents, tools and rewards of a settings file, opened once per process. Agents with the same files share them.

    Args:
        settings_path: See :class:`EpisodeSettings`.
        workers: Number of these processes on the node, which share its cores.

    Raises:
        ConfigError: The settings are wrong.
    """
    share_cores(workers)
    settings = load_episode_settings(settings_path)
    routes = settings.routes()
    tools = Opened(lambda source: load_tools(source) if source is not None else {})
    rewards = Opened(load_reward)
    by_agent = {
        route.name: Surroundings(settings, route, tools.of(route.tools), rewards.of(route.rewards))
        for route in routes
    }
    return Shared(routes, by_agent)


@cache
def _end_ids(model_path: str) -> frozenset[int]:
    return generation_end_ids(model_path)


class AfmAgentLoop(AgentLoopBase):
    """Runs one episode. verl makes an instance for each episode."""

    def __init__(self, *args: Any, settings: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = str(settings)

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Answer the question of ``row`` and score the answer.

        A failing tool is part of the episode. Any other error is recorded. An error of the engine is raised, and our sampler
        ends the run. Any other error yields a sample without a score, of which our sampler allows a few.
        """
        try:
            task = _task(row)
            shared = surroundings(self._settings, self._workers()).of(task)
            return await self._run(shared, task, sampling_params, row)
        except Exception as error:
            fatal = is_fatal(error) or not self._failures_are_counted()
            record_failure(
                load_episode_settings(self._settings).output_dir,
                row.get("raw_prompt"),
                error,
                step=int(row.get("global_steps") or 0),
                episode=episode_name(row),
                fatal=fatal,
            )
            if not fatal:
                sample = failed_sample(
                    error, row, episode=episode_name(row), token=self.tokenizer.eos_token_id
                )
                if load_episode_settings(self._settings).teacher is not None and not validating():
                    sample.extra_fields[SCORES] = torch.zeros(1)  # samples of a batch have equal fields
                return sample
            if isinstance(error, AfmError):
                raise
            raise EngineError(f"the episode failed: {type(error).__name__}: {error}") from error

    def _failures_are_counted(self) -> bool:
        """Whether our sampler drops failed episodes and ends a run with too many. verl's own sampler would train on them."""
        path = OmegaConf.select(self.config, "trainer.v1.sampler.custom_sampler.path")
        return str(path) == SAMPLER

    def _workers(self) -> int:
        """Number of workers on the fullest node. verl distributes them over the nodes in turn."""
        return -(-int(self.rollout_config.agent.num_workers) // int(self.config.trainer.nnodes))

    async def _run(
        self, shared: Surroundings, task: Task, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        rollout, seed = self.rollout_config, episode_seed(shared.settings.seed, task, row)
        model = self._model(self._codec(), request_id(rollout, seed))
        episode = await run_episode(
            shared.route.spec,
            model,
            shared.tools,
            task.question,
            prompt_ids=prompt_ids(shared.route.spec, shared.route.prompt, model, task, rollout.prompt_length),
            sampling=sampling_of(sampling_params, rollout.response_length),
            seed=seed,
        )
        self._check_length(episode, task)
        begun = time.perf_counter()
        verdict = await _verdict(shared, task, episode)
        score_seconds = time.perf_counter() - begun
        self._keep(shared, task, episode, verdict, row)
        if not episode.response_ids:  # verl does not accept an empty response
            token = self.tokenizer.eos_token_id
            episode = replace(episode, response_ids=(token,), response_mask=(0,), logprobs=(0.0,))
        sample = training_sample(
            episode,
            verdict,
            model,
            data_source=task.data_source,
            question_index=task.id,
            agent=shared.route.name,
            score_seconds=score_seconds,
            mask_observations=shared.settings.mask_observations,
        )
        await self._add_teacher(shared, sample)
        return sample

    def _codec(self) -> ChatTokenizer:
        return ChatTokenizer(self.tokenizer, _end_ids(self.config.actor_rollout_ref.model.path))

    def _model(self, codec: ChatTokenizer, request: str) -> ServerModel:
        """Return the rollout servers as the model of one episode, which they know by the id ``request``."""
        rollout = self.rollout_config
        return ServerModel(
            self.server_manager,
            codec,
            engine=rollout.name,
            request_id=request,
            context_tokens=room_of(rollout),
        )

    async def _add_teacher(self, shared: Surroundings, sample: AgentLoopOutput) -> None:
        """Add the teacher's log-probabilities to a training sample if the run has a teacher."""
        if (teacher := shared.settings.teacher) is not None and not validating():
            scorer = shared_teacher(teacher.model, teacher.name, shared.settings.model)
            scores = await score_response(scorer, sample.prompt_ids, sample.response_ids)
            sample.extra_fields[SCORES] = torch.tensor(scores)

    def _keep(
        self,
        shared: Surroundings,
        task: Task,
        episode: Episode,
        verdict: Verdict,
        row: Mapping[str, Any],
        **provenance: Any,
    ) -> None:
        if shared.settings.output_dir is None:
            return
        seed, step = episode_seed(shared.settings.seed, task, row), int(row.get("global_steps") or 0)
        per_step = self.config.data.get("train_batch_size", 1) * self.rollout_config.get("n", 1)
        sampled = seed % _SHARES < _SHARES * shared.settings.episodes_per_step / per_step
        if not worth_keeping(episode.stop, sampled=sampled):
            return
        record = episode_record(
            episode,
            shared.route.spec,
            id=episode_name(row),
            question=task.question,
            ground_truth=task.ground_truth,
            data_source=task.data_source,
            seed=seed,
            verdict=verdict,
            provenance={"task": task.id, "step": step}
            | ({ROUTE_KEY: shared.route.name} if shared.route.name else {})
            | ({"validation": True} if validating() else {})
            | provenance,
        )
        keep(shared.settings.output_dir, step, record, sampled=sampled)

    def _check_length(self, episode: Episode, task: Task) -> None:
        limit = self.rollout_config.response_length
        if len(episode.response_ids) > limit:
            raise EngineError(
                f"task {task.id}: the episode has {len(episode.response_ids)} response tokens, expected at most {limit}; "
                "set data.max_response_length and the agent's limits.max_response_tokens to the same value"
            )


def prompt_ids(spec: AgentSpec, source: PromptSource, model: TokenModel, task: Task, limit: int) -> list[int]:
    """Return the token ids of a task's prompt, the same as in SFT and evaluation with the same ``prompt``.

    Raises:
        DataError: The prompt has more than ``limit`` tokens, or the row has no prompt.
    """
    try:
        ids = list(model.encode_prompt(source.messages(spec, task.question, task.prompt)))
    except DataError as error:
        raise DataError(f"task {task.id}: {error.message}") from None
    if len(ids) > limit:
        raise DataError(
            f"task {task.id}: the prompt has {len(ids)} tokens, more than data.max_prompt_length ({limit}); "
            "raise the limit or drop the row (prompts are never cut)"
        )
    return ids


async def _verdict(shared: Surroundings, task: Task, episode: Episode) -> Verdict:
    """Return the score of an episode, or the reason why it has no score."""
    if not episode.response_ids:
        return Verdict(
            score=None, evidence=f"no token was generated before the episode ended ({episode.stop})"
        )
    if not validating() and (reasons := unfinished(episode) & set(shared.settings.leave_out)):
        return Verdict(score=None, evidence=f"left out: {', '.join(sorted(reasons))} ({episode.stop})")
    return await shared.reward.score(_sample(shared.route.spec, task, episode))


def _task(row: Mapping[str, Any]) -> Task:
    """Return the task of a row from verl's data set, which calls the prompt ``raw_prompt``."""
    known = {key: row.get(key) for key in _COLUMNS}
    columns = {key: value for key, value in known.items() if value is not None}
    return task_of_row(
        {**columns, "prompt": row.get("raw_prompt")}, default_id=str(row.get("index", row["uid"]))
    )


_COLUMNS = ("data_source", "ability", "reward_model", "extra_info", "question")


def episode_name(row: Mapping[str, Any]) -> str:
    """Return the name of an episode: ``STEP/UID/SAMPLE``."""
    return f"{int(row.get('global_steps') or 0)}/{row['uid']}/{row.get('session_id', 0)}"


def request_id(rollout: Any, seed: int) -> str:
    """Return the id by which verl chooses a server.

    With ``full_determinism`` on the CPU engine it is the same in each run. vLLM needs unique ids.
    """
    fixed = rollout.name == CPU_ENGINE and rollout.get("full_determinism")
    return f"det-{seed}" if fixed else uuid4().hex


def sampling_of(params: Mapping[str, Any], response_tokens: int) -> SamplingParams:
    """Convert verl's sampling parameters. ``response_tokens`` limits one generation."""
    return SamplingParams(
        max_new_tokens=response_tokens,
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=max(0, int(params.get("top_k", 0))),
    )


def episode_seed(seed: int, task: Task, row: Mapping[str, Any]) -> int:
    """Return the seed of an episode, the same in each run for the same step, question, draw and sample.

    A step may draw a question more than once. Each process counts its own draws. A CPU run has one process.
    """
    step = row.get("global_steps")
    draw = _draw((step, task.id, validating()), str(row.get("uid")))
    again = f"/draw {draw}" if draw else ""
    return derive_seed(f"{seed}/{step}/{task.id}/{row.get('session_id')}{again}", bits=56)


_DRAWS: dict[tuple[Any, ...], list[str]] = {}
"""Uids of the draws of each question in a step, in the order of their first episodes."""
_DRAWS_KEPT = 1 << 14


def _draw(question: tuple[Any, ...], uid: str) -> int:
    """Return the index of a draw among those of its question. Uids are random, their order is not."""
    uids = _DRAWS.setdefault(question, [])
    if uid not in uids:
        uids.append(uid)
        while len(_DRAWS) > _DRAWS_KEPT:
            del _DRAWS[next(iter(_DRAWS))]
    return uids.index(uid)


def _sample(spec: AgentSpec, task: Task, episode: Episode) -> Sample:
    return Sample.of(
        spec,
        task,
        episode.segments,
        agent_tokens=sum(episode.response_mask),
        response_tokens=episode.length,
        extra_info=task.extra_info,
    )
