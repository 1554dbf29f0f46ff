"""The agent loop of a harness: a program or team of the user is the agent, and verl trains on its trajectories.

verl accepts a list of sequences for one sample. Their keys in its queue are ``UID_SAMPLE_OUTPUT``. All sequences of an
episode have the episode's score. verl's GRPO compares the last sequence of each sample, so it counts each episode once
(:mod:`afm.harness.credit` has the formulas). Our sampler counts episodes in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.team_policy import runner_of
from afm.harness import ChatRenderer, Sampled, Session, SessionLimits
from afm.harness.credit import Credit, MemberCredit, shares
from afm.harness.episode import HarnessEpisode, HarnessRunner, judge, member_verdicts
from afm.harness.player import cost_of, describe
from afm.harness.settings import HarnessSettings
from afm.models.base import FinishReason
from afm.rollout import Episode
from afm.trajectory.record import Cost, StopReason, Verdict
from afm.trajectory.tags import Author, Segment
from verl_ext.agent_loop import (
    AfmAgentLoop,
    Surroundings,
    episode_seed,
    request_id,
    sampling_of,
)
from verl_ext.group_guard import DRIFT
from verl_ext.metrics import validating
from verl_ext.settings import unfinished
from verl_ext.training_sample import LOGGED, MEMBER, SHARE, ServerModel, training_sample, unscored_sample

_RUNNERS: WeakKeyDictionary[asyncio.AbstractEventLoop, HarnessRunner] = WeakKeyDictionary()
"""The gateway of each event loop in this process."""


class HarnessAgentLoop(AfmAgentLoop):
    """Runs the user's program or team for one episode. verl makes an instance for each episode."""

    async def _run(
        self, shared: Surroundings, task: Task, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        settings, spec = shared.settings.harness, shared.route.spec
        assert settings is not None, "the launcher chooses this loop for recipes with a harness"
        tokenizer = self._codec()
        renderer = ChatRenderer(tokenizer)
        sampling = sampling_of(sampling_params, self.rollout_config.response_length)
        models: list[ServerModel] = []

        def open_session(key: str, seed: int) -> Session:
            models.append(self._model(tokenizer, request_id(self.rollout_config, seed)))
            limits = SessionLimits(max_tokens=models[-1].context_tokens)
            return Session(key, models[-1], renderer, limits=limits, sampling=sampling, seed=seed)

        messages = shared.route.prompt.messages(spec, task.question, task.prompt)
        seed = episode_seed(shared.settings.seed, task, row)
        episode = await _runner(settings, spec).play(task, messages, open_session, seed)
        if not episode.trajectories:
            token = self.tokenizer.eos_token_id
            return unscored_sample(f"harness: {episode.failure}", row, token=token, more=episode.facts)
        model = models[-1]
        played = [as_episode(episode, each, model) for each in episode.trajectories]
        begun = time.perf_counter()
        verdict = await self._verdict_of(shared, task, episode, played[episode.last])
        wanted = settings.by_member is MemberCredit.OWN and not verdict.abstained
        own = await member_verdicts(episode, spec, task, shared.reward) if wanted else {}
        seconds = time.perf_counter() - begun
        chats = [*map(describe, episode.trajectories)]
        self._keep(shared, task, played[episode.last], verdict, row, trajectories=chats)
        samples = [
            training_sample(
                each,
                verdict,
                model,
                data_source=task.data_source,
                question_index=task.id,
                agent=shared.route.name,
                score_seconds=seconds,
                mask_observations=shared.settings.mask_observations,
            )
            for each in played
        ]
        samples = share_out(episode, samples, settings.credit, own)
        for sample in samples:
            await self._add_teacher(shared, sample)
        return samples

    async def _verdict_of(
        self, shared: Surroundings, task: Task, episode: HarnessEpisode, last: Episode
    ) -> Verdict:
        if not validating() and (reasons := unfinished(last) & set(shared.settings.leave_out)):
            return Verdict(score=None, evidence=f"left out: {', '.join(sorted(reasons))} ({last.stop})")
        settings = shared.settings.harness
        assert settings is not None
        verdict = await judge(episode, settings, shared.route.spec, task, shared.reward)
        # We write the program's answer in the agent's format, so the format counts as correct.
        return verdict.model_copy(update={"parts": {"format": 1.0} | verdict.parts})


def as_episode(episode: HarnessEpisode, trajectory: Sampled, model: ServerModel) -> Episode:
    """Return a trajectory as an episode of our own loop."""
    return Episode(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.response_mask,
        logprobs=trajectory.logprobs,
        segments=segments_of(trajectory, model),
        calls=(),
        stop=_stop(episode, trajectory),
        cost=Cost(
            prompt_tokens=len(trajectory.prompt_ids),
            agent_tokens=sum(trajectory.response_mask),
            observation_tokens=len(trajectory.response_ids) - sum(trajectory.response_mask),
            generations=len(trajectory.turns),
            tool_calls=sum(turn.tool_calls for turn in trajectory.turns if turn.trained),
            wall_seconds=episode.seconds,
        ),
    )


def segments_of(trajectory: Sampled, model: ServerModel) -> tuple[Segment, ...]:
    """Return the text of a response by author. Turns that an earlier trajectory trains are the agent's too."""
    segments, end = [], 0
    for turn in trajectory.turns:
        segments += [
            Segment(Author.ENVIRONMENT, model.decode(trajectory.response_ids[end : turn.begin])),
            Segment(Author.AGENT, model.decode(trajectory.response_ids[turn.begin : turn.end])),
        ]
        end = turn.end
    return tuple(segment for segment in segments if segment.text)


def member_part(
    episode: HarnessEpisode, member: str, score: float, own: Mapping[str, float]
) -> dict[str, Any]:
    """Return a member's part of an episode for :func:`~verl_ext.training_sample.share_advantages`."""
    words = hashlib.sha256(repr(episode.said_by(member)).encode()).hexdigest()
    return {"member": member, "score": score, "own": own.get(member, score), "words": words}


def share_out(
    episode: HarnessEpisode, samples: Sequence[AgentLoopOutput], credit: Credit, own: Mapping[str, float]
) -> list[AgentLoopOutput]:
    """Return the trained samples, each with its share in the episode's advantage and its member's part.

    All samples have the facts of the whole episode, because verl uses those of an episode's last sample for all of them.
    """
    last = episode.last
    calls = cost_of(episode).tool_calls
    total = samples[last].extra_fields[LOGGED] | {
        "agent_tokens": float(episode.agent_tokens),
        "response_tokens": float(episode.response_tokens),
        "tool_calls": float(calls),
        "used_tool": float(calls > 0),
        DRIFT: sum(sample.extra_fields[LOGGED][DRIFT] for sample in samples),
        **episode.facts,
    }
    kept = []
    for number, share in enumerate(shares(episode.turns, credit, last)):
        if not share:
            continue
        sample = samples[number]
        if credit is Credit.LAST and any(sample.response_mask):  # an abstained sample has no loss
            sample.response_mask = _all_turns(episode.trajectories[number], len(sample.response_ids))
        sample.extra_fields |= {LOGGED: dict(total), SHARE: share}
        if member := episode.trajectories[number].member:
            sample.extra_fields[MEMBER] = member_part(episode, member, sample.reward_score, own)
        kept.append(sample)
    return kept


def _all_turns(trajectory: Sampled, length: int) -> list[int]:
    """Return a mask of all sampled turns of a trajectory, including those that other trajectories train."""
    mask = [0] * length
    for turn in trajectory.turns:
        mask[turn.begin : turn.end] = [1] * (turn.end - turn.begin)
    return mask[:length]


def _stop(episode: HarnessEpisode, trajectory: Sampled) -> StopReason:
    if episode.failure:
        return StopReason.ABORTED
    if episode.answer is not None:
        return StopReason.ANSWER
    cut = trajectory.turns[-1].finish is FinishReason.LENGTH
    return StopReason.RESPONSE_TOKENS if cut else StopReason.END_OF_TEXT


def _runner(settings: HarnessSettings, spec: AgentSpec) -> HarnessRunner:
    loop = asyncio.get_running_loop()
    if loop not in _RUNNERS:
        _RUNNERS[loop] = runner_of(settings, spec)
    return _RUNNERS[loop]
