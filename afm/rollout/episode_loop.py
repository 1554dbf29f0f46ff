"""The one loop that lets a model act: evaluation, distillation, ``afm ask`` and reinforcement learning.

Tokens in, tokens out: what the model sampled is kept byte for byte with mask 1, and what the environment
answered is appended as its own tokens with mask 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from afm.agents.spec import AgentSpec, Limits
from afm.errors import EngineError
from afm.models.base import FinishReason, Generation, SamplingParams, StreamingModel, TokenModel
from afm.models.tokenizer import stop_length
from afm.rollout.tool_calls import ToolCaller, tools_by_role
from afm.rollout.transcript import CallFinished, CallStarted, Episode, LiveText, OnEvent, Stopped, Transcript
from afm.seeds import generation_seed
from afm.tools.base import Tool, working_toward
from afm.trajectory.observation import observation_content, tagged_observation
from afm.trajectory.record import CallRecord, Cost, StopReason
from afm.trajectory.tags import Step, StepClosed, StepOpened, StreamEvent, StreamParser


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
    on_event: OnEvent | None = None,
) -> Episode:
    """Let ``model`` act as ``spec`` until it answers or a limit ends it.

    Whatever ends it, the episode is returned with its :class:`~afm.trajectory.record.StopReason`. A tool that
    fails is answered with an observation of the failure. The response exceeds neither its limits nor the model's
    context: an observation that would is not appended and ends the episode. ``max_seconds`` ends a generation that can be
    cancelled (:attr:`TokenModel.cancellable`). For another one the episode waits, at most for ``max_new_tokens``.

    Args:
        spec: The agent.
        model: Samples the agent's text.
        tools: By name; must hold every tool the agent may call.
        question: Put into the agent's prompt, unless ``prompt_ids`` are given; tools see it as the goal.
        limits: Instead of the agent's own.
        sampling: How to sample; ``max_new_tokens`` bounds the tokens between two observations, and ``stop``
            is replaced by the agent's stop strings. Default: temperature 1, bounded by ``limits`` alone.
        prompt_ids: The encoded prompt, when the caller has it.
        seed: Makes the episode reproducible; each generation gets a seed of its own from it. Default: the
            seed in ``sampling``.
        on_event: Receives what happens, for a live view. Tokens come one by one from a model that streams.

    Raises:
        ConfigError: A tool is missing.
        EngineError: The model failed; there is no episode.
    """
    caller = ToolCaller(
        tools_by_role(spec, tools), run_repeated=(limits or spec.limits).duplicate_calls == "execute"
    )
    prompt = tuple(model.encode_prompt(spec.prompt_messages(question)) if prompt_ids is None else prompt_ids)
    run = EpisodeRun(spec, model, caller, question, prompt, limits or spec.limits, sampling, seed, on_event)
    return await run.to_the_end()


class EpisodeRun:
    """The state of one episode."""

    def __init__(
        self,
        spec: AgentSpec,
        model: TokenModel,
        caller: ToolCaller,
        question: str,
        prompt: tuple[int, ...],
        limits: Limits,
        sampling: SamplingParams | None,
        seed: int | None,
        on_event: OnEvent | None,
    ) -> None:
        self._spec = spec
        self._model = model
        self._caller = caller
        self._question = question
        self._thought = ""
        self._prompt = prompt
        self._limits = limits
        self._sampling = sampling or SamplingParams(max_new_tokens=1)
        self._seed = self._sampling.seed if seed is None else seed
        self._on_event = on_event
        self._budget = TokenBudget.of(
            limits,
            context_left=model.context_tokens - len(prompt),
            turn_tokens=sampling.max_new_tokens if sampling else None,
        )
        self._clock = Clock(limits.max_seconds)
        self._transcript = Transcript(model.decode)
        self._parser = StreamParser(spec)
        self._live = LiveText(spec, model.decode, on_event) if on_event else None
        self._calls: list[CallRecord] = []
        self._generations = 0
        self._read_tokens = 0
        self._generation_seconds = 0.0
        self._unfit_tokens = 0
        self._stops = spec.stop_strings

    async def to_the_end(self) -> Episode:
        """Play on until an answer or a limit."""
        stop = None
        while stop is None:
            stop = await self._turn()
        if self._live:
            self._live.finish()
        if self._on_event:
            self._on_event(Stopped(stop))
        return self._episode(stop)

    async def _turn(self) -> StopReason | None:
        """One generation and what follows from it; a reason when that is the end."""
        transcript = self._transcript
        room = self._budget.room(
            response=len(transcript.ids), agent=transcript.agent_tokens, turn=transcript.turn_tokens
        )
        if room.tokens < 1:
            return room.reason
        if self._clock.left == 0:
            return StopReason.SECONDS
        generation = await self._generate(room.tokens)
        if generation is None:
            return StopReason.SECONDS
        text = transcript.add_generation(generation)
        event = self._decisive(self._parser.feed(text))
        if isinstance(event, StepOpened):
            return StopReason.FORGED_OBSERVATION
        if event is not None and event.step.role == self._spec.answer_role:
            return StopReason.ANSWER
        if event is not None:
            return await self._call(event.step)
        return self._after(generation, room)

    def _after(self, generation: Generation, room: Room) -> StopReason | None:
        """What a generation means that neither called a tool nor answered."""
        match generation.finish:
            case FinishReason.END_OF_TEXT:
                return StopReason.END_OF_TEXT
            case FinishReason.ABORTED:
                return StopReason.ABORTED
            case FinishReason.LENGTH:
                return room.reason
        if not generation.token_ids:
            raise EngineError("the model reports a completed stop string, but returned no token")
        return None  # a stop string inside another role is text

    async def _generate(self, max_new_tokens: int) -> Generation | None:
        """The next generation; ``None`` when time ran out in it, if it can be cancelled."""
        params = replace(
            self._sampling,
            max_new_tokens=max_new_tokens,
            stop=self._stops,
            seed=None if self._seed is None else generation_seed(self._seed, self._generations),
        )
        prompt = self._reading()
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._clock.left if self._model.cancellable else None) as timer:
                generation = await self._ask(prompt, params)
        except TimeoutError as error:
            if not timer.expired():
                raise EngineError("the model timed out on its own account") from error
            return None
        finally:
            self._generations += 1
            self._read_tokens += len(prompt)
            self._generation_seconds += time.perf_counter() - begun
        if len(generation.token_ids) > max_new_tokens:
            raise EngineError(
                f"the model returned {len(generation.token_ids)} tokens, asked for at most {max_new_tokens}"
            )
        return generation

    def _reading(self) -> list[int]:
        """Token ids that the next generation continues."""
        return [*self._prompt, *self._transcript.ids]

    async def _ask(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        if self._live is not None and isinstance(self._model, StreamingModel):
            streamed = await self._model.stream(prompt, params, self._live.add_token)
            return self._until_stop(streamed, params.stop)
        generation = self._until_stop(await self._model.generate(prompt, params), params.stop)
        if self._live is not None:
            self._live.add_tokens(generation.token_ids)
        return generation

    def _until_stop(self, generation: Generation, stop: Sequence[str]) -> Generation:
        """Cut behind a stop string that began before the generation: engines look for them in the new text alone.

        For example ``<answer></code></answer>``, where one token ends the first tag and begins the second.
        """
        written = self._transcript.turn_tokens  # since the last observation, in which no stop string begins
        if not written or not generation.token_ids:
            return generation
        before = self._transcript.ids[-min(written, max(len(text.encode()) for text in stop)) :]
        count = stop_length(self._model.decode, generation.token_ids, stop, before)
        return generation if count is None else generation.stopped(count)

    def _decisive(self, events: Sequence[StreamEvent]) -> StepOpened | StepClosed | None:
        """The event that ends the turn, if there is one; nothing may follow it."""
        for index, event in enumerate(events):
            if not self._decides(event):
                if isinstance(event, StepClosed) and event.step.role in self._spec.thought_roles:
                    self._thought = event.step.content
                continue
            if index + 1 < len(events):
                raise EngineError(
                    f"the model went on after {self._name(event)} instead of stopping there; "
                    "the engine must honour stop strings"
                )
            return event
        return None

    def _decides(self, event: StreamEvent) -> bool:
        if isinstance(event, StepOpened):
            return event.role == self._spec.observation_role
        return event.step.role == self._spec.answer_role or event.step.role in self._spec.tool_roles

    def _name(self, event: StreamEvent) -> str:
        return f"<{event.role}>" if isinstance(event, StepOpened) else f"</{event.step.role}>"

    async def _call(self, step: Step) -> StopReason | None:
        """Run a tool and append its answer; a reason when that is the end."""
        if self._limits.max_turns is not None and len(self._calls) >= self._limits.max_turns:
            return StopReason.TURNS
        if self._clock.left == 0:
            return StopReason.SECONDS
        if self._on_event:
            self._on_event(CallStarted(step.role, self._caller.tool_name(step.role), step.content))
        seconds, reason = self._tool_time()
        with working_toward(self._question, self._thought):
            call, late = await self._caller.call(step, seconds)
        content = observation_content(call.observation, self._spec, self._limits.max_observation_chars)
        text = tagged_observation(content, self._spec)
        call = call.model_copy(update={"observation": content})
        self._calls.append(call)
        if self._on_event:
            self._on_event(CallFinished(call))
        if late:
            return reason
        ids = self._model.encode(text)
        if len(self._transcript.ids) + len(ids) > self._budget.response:
            self._unfit_tokens = len(ids)
            return StopReason.RESPONSE_TOKENS
        self._transcript.add_observation(ids, text)
        self._parser.feed_observation(text)
        if self._live:
            self._live.add_observation(text)
        return None

    def _tool_time(self) -> tuple[float | None, StopReason]:
        """Seconds that the next call may take, and what has run out when it takes longer."""
        whole = self._clock.left
        if self._limits.max_tool_seconds is None:
            return whole, StopReason.SECONDS
        left = max(0.0, self._limits.max_tool_seconds - sum(call.seconds for call in self._calls))
        return (
            (whole, StopReason.SECONDS)
            if whole is not None and whole < left
            else (left, StopReason.TOOL_SECONDS)
        )

    def _episode(self, stop: StopReason) -> Episode:
        transcript, calls = self._transcript, self._calls
        return Episode(
            prompt_ids=self._prompt,
            response_ids=tuple(transcript.ids),
            response_mask=tuple(transcript.mask),
            logprobs=transcript.logprobs,
            segments=transcript.segments(),
            calls=tuple(calls),
            stop=stop,
            cost=Cost(
                prompt_tokens=len(self._prompt),
                read_tokens=self._read_tokens,
                agent_tokens=transcript.agent_tokens,
                observation_tokens=len(transcript.ids) - transcript.agent_tokens,
                generations=self._generations,
                tool_calls=len(calls),
                tool_failures=sum(not call.ok for call in calls),
                generation_seconds=self._generation_seconds,
                tool_seconds=sum(call.seconds for call in calls),
                wall_seconds=self._clock.elapsed,
            ),
            unfit_tokens=self._unfit_tokens,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens that the next generation may have, and the reason to stop once they are used up."""

    tokens: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The bounds on tokens of one episode; ``None`` means unbounded.

    Attributes:
        response: Sampled and observed tokens together, the model's context included.
        agent: Sampled tokens.
        turn: Sampled tokens since the last observation.
    """

    response: int
    agent: int | None
    turn: int | None

    @classmethod
    def of(cls, limits: Limits, *, context_left: int, turn_tokens: int | None) -> TokenBudget:
        """The bounds from an agent's limits, the room a prompt leaves, and the caller's own bound a turn."""
        response = context_left
        if limits.max_response_tokens is not None:
            response = min(response, limits.max_response_tokens)
        turn = min(
            (value for value in (limits.max_turn_tokens, turn_tokens) if value is not None), default=None
        )
        return cls(response, limits.max_agent_tokens, turn)

    def room(self, *, response: int, agent: int, turn: int) -> Room:
        """What is left after these numbers of tokens."""
        rooms = [Room(self.response - response, StopReason.RESPONSE_TOKENS)]
        if self.agent is not None:
            rooms.append(Room(self.agent - agent, StopReason.AGENT_TOKENS))
        if self.turn is not None:
            rooms.append(Room(self.turn - turn, StopReason.AGENT_TOKENS))
        return min(rooms, key=lambda room: room.tokens)


class Clock:
    """Wall time since the episode began."""

    def __init__(self, max_seconds: float | None) -> None:
        self._begun = time.perf_counter()
        self._max_seconds = max_seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float | None:
        """Seconds that remain, not below 0; ``None`` when time is unbounded."""
        return None if self._max_seconds is None else max(0.0, self._max_seconds - self.elapsed)
