"""Samples of a question: episodes of the agent, or replies of any chat endpoint, with a verdict."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.endpoints.chat import ChatEndpoint, EndpointSettings, UnfinishedReasoningError, without_reasoning
from afm.errors import DataError, RefusedError, RewardError
from afm.models.base import SamplingParams, TokenModel
from afm.play import ModelPlayer, play_once
from afm.rewards import Reward, Sample
from afm.rewards.text_match import comparable, gold_answers
from afm.tools import Tool
from afm.trajectory import answers
from afm.trajectory.tags import Segment, author_segments

Judge = Callable[[Sample], Awaitable[bool]]
"""Returns whether a response is right. Raises :class:`RewardError` if it cannot be judged."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One sample.

    Attributes:
        stop: Why it ended.
    """

    right: bool
    stop: str


class QuestionAsker(Protocol):
    """Takes samples of questions."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return everything that the samples depend on, to distinguish runs."""
        ...

    async def ask(self, task: Task, seed: int) -> Answered:
        """Take one sample.

        Raises:
            RefusedError: The engine rejected the question, and would reject it again.
            EngineError, ToolError: The sample failed. Another attempt may succeed.
            RewardError: The answer cannot be judged.
        """
        ...

    async def close(self) -> None:
        """Close connections, models and tools."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeAsker:
    """Lets a model play the agent, with or without the agent's tools.

    Attributes:
        sampling: Parameters of the samples. ``seed`` is replaced.
        digests: Further facts: :func:`settings_digest` of the reward and of the tools.
    """

    spec: AgentSpec
    model: TokenModel
    tools: Mapping[str, Tool]
    judge: Judge
    sampling: SamplingParams
    digests: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return agent, model, tools, sampling and the digests."""
        return {
            "agent": self.spec.name,
            "agent_digest": self.spec.digest,
            "model": self.model.name,
            "tools": sorted(self.tools),
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_new_tokens,
            **self.digests,
        }

    async def ask(self, task: Task, seed: int) -> Answered:
        """Play one episode."""
        player = ModelPlayer(self.spec, self.model, self.tools, self.sampling)
        record = await play_once(player, task.id, task, seed)
        return Answered(await self.judge(sample_of(self.spec, task, record.segments)), record.stop.value)

    async def close(self) -> None:
        """Close the model and the tools."""
        await self.model.close()
        for tool in self.tools.values():
            await tool.close()


class ChatAsker:
    """Asks any OpenAI-compatible chat endpoint without tools. It needs neither token ids nor a tokenizer.

    Args:
        spec: The agent without its tools. It defines the prompt and the form of the answer.
        url: Address of the server, with or without ``/v1``.
        endpoint: Settings of the requests.
    """

    def __init__(
        self,
        spec: AgentSpec,
        url: str,
        model: str,
        judge: Judge,
        *,
        temperature: float,
        max_tokens: int,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        self._spec = spec
        self._judge = judge
        self._request = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._endpoint = ChatEndpoint(endpoint or EndpointSettings(), url)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return agent, model and sampling. The address is not included, because it may change."""
        return {"agent": self._spec.name, "agent_digest": self._spec.digest, "tools": [], **self._request}

    async def ask(self, task: Task, seed: int) -> Answered:
        """Take one reply. A truncated reply counts as a sample without an answer."""
        body = self._request | {"messages": self._spec.prompt_messages(task.question), "seed": seed}
        finishes = ("stop", "length", "content_filter")
        reply = await self._endpoint.ask(body, lambda reply: reply, finishes=finishes)
        if reply.finish == "length":
            return Answered(False, "length")
        if reply.finish == "content_filter":
            raise RefusedError(
                f"{self._endpoint.where}: the reply is incomplete (finish reason 'content_filter')"
            )
        segments = author_segments(_without_drafts(reply.text), self._spec)
        return Answered(await self._judge(sample_of(self._spec, task, segments)), "stop")

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def _without_drafts(reply: str) -> str:
    """Return a reply without its reasoning, which may hold drafts of the answer. Unfinished reasoning is not removed."""
    try:
        return without_reasoning(reply).strip()
    except UnfinishedReasoningError:
        return reply


def sample_of(spec: AgentSpec, task: Task, segments: tuple[Segment, ...]) -> Sample:
    """Return a response to a task in the form that judges take."""
    return Sample.of(spec, task, segments, extra_info=task.extra_info)


async def by_exact_match(sample: Sample) -> bool:
    """Judge by exact match: every final answer equals a gold answer after normalisation. The data source's reward is unused.

    A reply of one line without the agent's tags counts as the answer, because an untrained model does not know the tags.
    """
    try:
        accepted = {comparable(text) for text in gold_answers(sample.ground_truth)}
    except DataError as error:
        raise RewardError(error.message) from None
    texts = answers(sample.segments, sample.spec) or _bare(sample.segments)
    return bool(texts) and all(comparable(text) in accepted for text in texts)


def _bare(segments: tuple[Segment, ...]) -> tuple[str, ...]:
    text = "".join(segment.text for segment in segments).strip()
    return (text,) if text and "\n" not in text and "<" not in text else ()


def by_reward(reward: Reward) -> Judge:
    """Return a judge by the part ``correct`` of a reward. 1 is right. Format and length are ignored."""

    async def judge(sample: Sample) -> bool:
        verdict = await reward.score(sample)
        correct = verdict.parts.get("correct")
        if correct is None:
            raise RewardError(f"the reward abstains: {verdict.evidence or 'no reason given'}")
        return correct >= 1 - 1e-9

    return judge


def settings_digest(settings: Any) -> str:
    """Return a digest of settings without addresses, because a server may move."""
    return sha256(json.dumps(_without_addresses(settings), sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


def _without_addresses(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_addresses(item) for key, item in value.items() if key not in ("url", "urls")}
    return list(map(_without_addresses, value)) if isinstance(value, list | tuple) else value
