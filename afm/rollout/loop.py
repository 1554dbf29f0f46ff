"""The one loop in which a model acts: evaluation, distillation, ``afm ask`` and RL all run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from afm.agents import AgentSpec
from afm.agents.spec import Limits
from afm.errors import ConfigError
from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel
from afm.rollout.calls import Caller
from afm.rollout.episode import Episode
from afm.rollout.events import CallFinished, CallStarted, EpisodeEvent, EpisodeStopped, TextAdded
from afm.rollout.text import IncrementalDecoder
from afm.rollout.transcript import Transcript
from afm.tools import Tool
from afm.trajectory import StepClosed, StepOpened, StreamEvent, StreamParser
from afm.trajectory.record import Cost, StopReason
from afm.trajectory.types import Author, Step

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


async def run_episode(
    spec: AgentSpec,
    model: TokenModel,
    tools: Mapping[str, Tool],
    question: str,
    *,
    limits: Limits | None = None,
    sampling: SamplingParams | None = None,
    prompt_ids: Sequence[int] | None = None,
    seed: int | None = None,
    on_event: Callable[[EpisodeEvent], None] | None = None,
) -> Episode:
    """Let ``model`` answer ``question`` as the agent ``spec``, with real tool calls.

    Reaching a limit is an ordinary end: the episode comes back with its reason. A failing tool is an
    observation that says so.

    Args:
        limits: Replaces ``spec.limits``.
        sampling: Temperature and so on; its stop strings are replaced by the agent's, its
            ``max_new_tokens`` bounds every generation.
        prompt_ids: The prompt as tokens; by default the agent's prompt through the model's template.
        seed: Makes the episode reproducible; every generation gets a seed of its own from it.
        on_event: Called with each :data:`afm.rollout.events.EpisodeEvent` as it happens.

    Raises:
        ConfigError: A tool is missing, or the prompt leaves no room for a response.
        EngineError: The model failed; there is no episode.
    """
    bounds = limits or spec.limits
    prompt = tuple(prompt_ids if prompt_ids is not None else _prompt(spec, model, question))
    room = model.context_tokens - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, the model's context {model.context_tokens}; nothing is left"
        )
    params = sampling or SamplingParams(max_new_tokens=room)
    run = _Run(spec, model, Caller(spec, tools, bounds), bounds, prompt, params, seed, on_event)
    return await run.episode(room)


def _prompt(spec: AgentSpec, model: TokenModel, question: str) -> list[int]:
    return model.encode_prompt(spec.prompt_messages(question))


class _Run:
    """The state of one episode."""

    def __init__(
        self,
        spec: AgentSpec,
        model: TokenModel,
        caller: Caller,
        limits: Limits,
        prompt: tuple[int, ...],
        params: SamplingParams,
        seed: int | None,
        on_event: Callable[[EpisodeEvent], None] | None,
    ) -> None:
        self._spec = spec
        self._model = model
        self._caller = caller
        self._limits = limits
        self._prompt = prompt
        self._params = params
        self._seed = seed
        self._tell = on_event or _ignore
        self._transcript = Transcript()
        self._parser = StreamParser(spec)
        self._decoder = IncrementalDecoder(model.decode)
        self._generations = 0
        self._generation_s = 0.0

    async def episode(self, room: int) -> Episode:
        begun = time.perf_counter()
        most = min(room, self._limits.max_response_tokens or room)
        stop = StopReason.SECONDS
        try:
            async with asyncio.timeout(self._limits.max_seconds) as clock:
                stop = await self._turns(most)
        except TimeoutError:
            if not clock.expired():
                raise
        self._add_text(Author.AGENT, self._decoder.flush())
        self._tell(EpisodeStopped(stop))
        script = self._transcript
        return Episode(
            prompt_ids=self._prompt,
            response_ids=tuple(script.token_ids),
            response_mask=tuple(script.mask),
            logprobs=tuple(script.logprobs),
            segments=script.segments,
            calls=tuple(self._caller.records),
            stop=stop,
            cost=self._cost(time.perf_counter() - begun),
        )

    async def _turns(self, most: int) -> StopReason:
        """Generate and call tools until something ends the episode; ``most`` bounds the response's tokens."""
        while True:
            budget, reason = self._budget(most)
            if budget < 1:
                return reason
            generation = await self._generate(budget)
            event = self._absorb(generation)
            if isinstance(event, StepOpened):
                return StopReason.FORGED_OBSERVATION
            if event is not None and event.step.role == self._spec.answer_role:
                return StopReason.ANSWER
            if event is not None:
                if (ended := await self._call(event.step, most)) is not None:
                    return ended
            elif generation.finish is FinishReason.END_OF_TEXT:
                return StopReason.END_OF_TEXT
            elif generation.finish is FinishReason.ABORTED:
                return StopReason.ABORTED
            elif generation.finish is FinishReason.LENGTH:
                return self._budget(most)[1]

    def _budget(self, most: int) -> tuple[int, StopReason]:
        """Tokens the next generation may sample, and why the episode ends once they are used up."""
        left = most - len(self._transcript)
        if self._limits.max_agent_tokens is not None:
            agent_left = self._limits.max_agent_tokens - self._transcript.agent_tokens
        else:
            agent_left = left
        turn = min(self._params.max_new_tokens, self._limits.max_turn_tokens or left)
        reason = StopReason.RESPONSE_TOKENS if left <= min(agent_left, turn) else StopReason.AGENT_TOKENS
        return min(left, agent_left, turn), reason

    async def _generate(self, budget: int) -> Generation:
        seed = None
        if self._seed is not None:
            seed = (self._seed + self._generations * _SEED_STRIDE) & _SEED_MASK
        params = replace(self._params, max_new_tokens=budget, stop=self._spec.stop_strings, seed=seed)
        begun = time.perf_counter()
        generation = await self._model.generate((*self._prompt, *self._transcript.token_ids), params)
        self._generation_s += time.perf_counter() - begun
        self._generations += 1
        return generation

    def _absorb(self, generation: Generation) -> StepClosed | StepOpened | None:
        """Add what was sampled; returns the event that ends this turn, if there is one.

        An engine that generates on past a stop string loses what lies behind it.
        """
        ids, text = generation.token_ids, ""
        cut = self._first_stop(ids) if generation.finish is not FinishReason.STOP else len(ids)
        if cut < len(ids):
            generation = Generation(ids[:cut], generation.logprobs[:cut], FinishReason.STOP)
        text = self._decoder.feed(generation.token_ids)
        self._transcript.add_sampled(generation)
        self._add_text(Author.AGENT, text)
        return self._turning_point(self._parser.feed(text))

    def _first_stop(self, ids: Sequence[int]) -> int:
        """How many of ``ids`` it takes to complete the first stop string; all of them without one."""
        text = self._model.decode(ids)
        ends = [at + len(stop) for stop in self._spec.stop_strings if (at := text.find(stop)) >= 0]
        if not ends:
            return len(ids)
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._model.decode(ids[:middle])) >= min(ends):
                high = middle
            else:
                low = middle + 1
        return low

    def _turning_point(self, events: Sequence[StreamEvent]) -> StepClosed | StepOpened | None:
        ending = {*self._spec.tool_roles, self._spec.answer_role}
        for event in events:
            if isinstance(event, StepClosed) and event.step.role in ending:
                return event
            if isinstance(event, StepOpened) and event.role == self._spec.observation_role:
                return event
        return None

    async def _call(self, step: Step, most: int) -> StopReason | None:
        turns = self._limits.max_turns
        if turns is not None and len(self._caller.records) >= turns:
            return StopReason.TURNS
        self._tell(CallStarted(step.role, self._spec.tool_roles[step.role], step.content))
        text = await self._caller.call(step.role, step.content)
        self._tell(CallFinished(self._caller.records[-1]))
        ids = self._model.encode(text)
        if len(self._transcript) + len(ids) > most:
            return StopReason.RESPONSE_TOKENS
        held = self._decoder.flush()
        self._add_text(Author.AGENT, held)
        self._parser.feed(held)
        self._transcript.add_observed(ids)
        self._add_text(Author.ENVIRONMENT, text)
        self._parser.feed_observation(text)
        self._decoder = IncrementalDecoder(self._model.decode)
        return None

    def _add_text(self, author: Author, text: str) -> None:
        self._transcript.add_text(author, text)
        if text:
            self._tell(TextAdded(author, text))

    def _cost(self, wall_s: float) -> Cost:
        calls = self._caller.records
        sampled = self._transcript.agent_tokens
        return Cost(
            prompt_tokens=len(self._prompt),
            agent_tokens=sampled,
            observation_tokens=len(self._transcript) - sampled,
            generations=self._generations,
            tool_calls=len(calls),
            tool_failures=sum(not call.ok for call in calls),
            generation_seconds=self._generation_s,
            tool_seconds=sum(call.seconds for call in calls),
            wall_seconds=wall_s,
        )


def _ignore(_: EpisodeEvent) -> None:
    """Nobody listens."""
