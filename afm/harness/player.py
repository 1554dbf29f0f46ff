"""Play the episodes of an evaluation with a program. They equal the episodes of RL, stored as records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.errors import RefusedError
from afm.harness.episode import HarnessEpisode, HarnessRunner, answer_segments, judge
from afm.harness.history import Sampled
from afm.harness.rendering import ChatRenderer
from afm.harness.sessions import Session, SessionLimits
from afm.harness.settings import HarnessSettings, Judge
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward
from afm.trajectory.record import Cost, Record, StopReason

Messages = Callable[[AgentSpec, str, Any], Sequence[dict[str, str]]]
"""Returns the agent's prompt for a question and the row's own prompt."""


class HarnessPlayer:
    """Player of tasks with a program that asks ``model`` through the gateway.

    Args:
        settings: The section ``harness``.
        spec: Agent whose answer format the reward expects.
        model: Model that answers the program.
        reward: Judge of the answers, unless the program scores itself.
        sampling: Sampling parameters of every generation.
        messages: Returns the prompt that the program gets with its task.
        runner: Runner of the episodes. The default runs the settings' program.
    """

    keeps_format = False

    def __init__(
        self,
        settings: HarnessSettings,
        spec: AgentSpec,
        model: TokenModel,
        reward: Reward,
        sampling: SamplingParams,
        messages: Messages,
        runner: HarnessRunner | None = None,
    ) -> None:
        self._runner = runner or HarnessRunner(settings)
        self._settings, self._spec, self._model, self._reward = settings, spec, model, reward
        self._sampling, self._messages = sampling, messages
        self._renderer = ChatRenderer(model.tokenizer)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._model.name

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """Play one episode. The record has a verdict if the program scores itself.

        Raises:
            RefusedError: The program failed in every attempt. The episode has no score.
            EngineError: The engine failed.
        """
        messages = self._messages(self._spec, task.question, task.prompt)
        played = await self._runner.play(task, messages, self._open, seed)
        if played.failure:
            raise RefusedError(f"harness: {played.failure}")
        verdict = None
        if self._settings.reward is Judge.HARNESS:
            verdict = await judge(played, self._settings, self._spec, task, self._reward)
        record = Record(
            id=episode,
            agent=self._spec.name,
            agent_digest=self._spec.digest,
            question=task.question,
            segments=answer_segments(played.answer, self._spec),
            ground_truth=task.ground_truth,
            data_source=task.data_source,
            model=self.name,
            seed=seed,
            stop=StopReason.END_OF_TEXT if played.answer is None else StopReason.ANSWER,
            verdict=verdict,
            cost=cost_of(played),
            provenance={"trajectories": [*map(describe, played.trajectories)]},
        )
        return self._complete(record, played)

    def _complete(self, record: Record, episode: HarnessEpisode) -> Record:
        """Return the record with further fields of the episode."""
        return record

    async def close(self) -> None:
        """Stop the gateway. The caller closes the model."""
        await self._runner.close()

    def _open(self, key: str, seed: int) -> Session:
        limits = SessionLimits(max_tokens=self._model.context_tokens)
        return Session(key, self._model, self._renderer, limits=limits, sampling=self._sampling, seed=seed)


def cost_of(episode: HarnessEpisode) -> Cost:
    """Return the tokens and time of an episode. Sampled tokens that trajectories share count once."""
    prompts = sum(len(trajectory.prompt_ids) for trajectory in episode.trajectories)
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns if turn.trained]
    return Cost(
        prompt_tokens=prompts,
        agent_tokens=episode.agent_tokens,
        observation_tokens=episode.response_tokens - episode.agent_tokens,
        generations=len(turns),
        tool_calls=sum(turn.tool_calls for turn in turns),
        wall_seconds=episode.seconds,
    )


def describe(trajectory: Sampled) -> dict[str, Any]:
    """Return a trajectory with its chat, for a record's provenance."""
    return {
        "name": trajectory.name,
        **({"member": trajectory.member} if trajectory.member else {}),
        "reason": trajectory.reason.value,
        "parent": trajectory.parent,
        "turns": len(trajectory.turns),
        "agent_tokens": sum(trajectory.response_mask),
        "response_tokens": len(trajectory.response_ids),
        "messages": [dict(message) for message in trajectory.messages],
    }
