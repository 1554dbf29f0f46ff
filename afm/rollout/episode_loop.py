"""The episode loop of a model that acts, for evaluation, distillation, ``afm ask`` and reinforcement learning.

It works on tokens. The sampled tokens are kept unchanged with mask 1, and the environment's answers are appended as
separate tokens with mask 0.
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
    """Let ``model`` act as ``spec`` until it answers or reaches a limit.

    The returned episode has its :class:`~afm.trajectory.record.StopReason`. The failure of a tool becomes an observation.
    The response stays within its limits and the model's context: an observation that would exceed them is not appended
    and ends the episode. ``max_seconds`` ends a generation that can be cancelled (:attr:`TokenModel.cancellable`).
    Otherwise the episode waits for the generation, which ``max_new_tokens`` limits.

    Args:
        spec: The agent.
        model: Samples the agent's text.
        tools: Tools by name, including every tool that the agent may call.
        question: The question in the agent's prompt, unless ``prompt_ids`` is set. Tools receive it as the goal.
        limits: Limits that replace the agent's own.
        sampling: Sampling parameters. ``max_new_tokens`` limits the tokens between two observations, and the agent's
            stop strings replace ``stop``. The default is temperature 1 with no limit except ``limits``.
        prompt_ids: The encoded prompt, if the caller has it.
        seed: Makes the episode reproducible, by default the one in ``sampling``. Each generation gets a seed from it.
        on_event: Receives the events of the episode, for a live view. A streaming model sends single tokens.

    Raises:
        ConfigError: A tool is missing.
        EngineError: The model failed, and there is no episode.
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
        """Play until an answer or a limit."""
        stop = None
        while stop is None:
            stop = await self._turn()
        if self._live:
            self._live.finish()
        if self._on_event:
            self._on_event(Stopped(stop))
        return self._episode(stop)

    async def _turn(self) -> StopReason | None:
        """Sample one generation and act on it. Return the reason if this ends the episode."""
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
        """Return why a generation without a call or an answer ends the episode, or ``None`` if it does not."""
        match generation.finish:
            case FinishReason.END_OF_TEXT:
                return StopReason.END_OF_TEXT
            case FinishReason.ABORTED:
                return StopReason.ABORTED
            case FinishReason.LENGTH:
                return room.reason
        if not generation.token_ids:
            raise EngineError("the model reports a complete stop string, but returned no token")
        return None  # inside another role, a stop string is text

    async def _generate(self, max_new_tokens: int) -> Generation | None:
        """Return the next generation, or ``None`` if it was cancelled because time ran out."""
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
                raise EngineError("the model timed out before the episode's time limit") from error
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
        """Return the token ids that the next generation continues."""
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
        """Cut a generation after a stop string that began before it, because engines only search the new text.

        An example is ``<answer></code></answer>``, where one token ends the first tag and begins the second.
        """
        written = self._transcript.turn_tokens  # since the last observation, in which no stop string begins
        if not written or not generation.token_ids:
            return generation
        before = self._transcript.ids[-min(written, max(len(text.encode()) for text in stop)) :]
        count = stop_length(self._model.decode, generation.token_ids, stop, before)
        return generation if count is None else generation.stopped(count)

    def _decisive(self, events: Sequence[StreamEvent]) -> StepOpened | StepClosed | None:
        """Return the event that ends the turn, if any. Nothing may follow it."""
        for index, event in enumerate(events):
            if not self._decides(event):
                if isinstance(event, StepClosed) and event.step.role in self._spec.thought_roles:
                    self._thought = event.step.content
                continue
            if index + 1 < len(events):
                name = f"<{event.role}>" if isinstance(event, StepOpened) else f"</{event.step.role}>"
                raise EngineError(
                    f"the model continued after {name} instead of stopping there; "
                    "use an engine that obeys stop strings"
                )
            return event
        return None

    def _decides(self, event: StreamEvent) -> bool:
        if isinstance(event, StepOpened):
            return event.role == self._spec.observation_role
        return event.step.role == self._spec.answer_role or event.step.role in self._spec.tool_roles

    async def _call(self, step: Step) -> StopReason | None:
        """Run a tool and append its answer. Return the reason if this ends the episode."""
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
        """Return the seconds that the next call may take, and the reason to stop if it takes longer."""
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
    """The number of tokens for the next generation, and the reason to stop once they are used up."""

    tokens: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The token limits of one episode. ``None`` means unlimited.

    Attributes:
        response: Limit of sampled and observed tokens together, which respects the model's context.
        agent: Limit of sampled tokens.
        turn: Limit of sampled tokens since the last observation.
    """

    response: int
    agent: int | None
    turn: int | None

    @classmethod
    def of(cls, limits: Limits, *, context_left: int, turn_tokens: int | None) -> TokenBudget:
        """Return the budget for an agent's limits, the context after the prompt, and the caller's limit per turn."""
        response = context_left
        if limits.max_response_tokens is not None:
            response = min(response, limits.max_response_tokens)
        turn = min(
            (value for value in (limits.max_turn_tokens, turn_tokens) if value is not None), default=None
        )
        return cls(response, limits.max_agent_tokens, turn)

    def room(self, *, response: int, agent: int, turn: int) -> Room:
        """Return the tokens that are left after these numbers of tokens."""
        rooms = [Room(self.response - response, StopReason.RESPONSE_TOKENS)]
        if self.agent is not None:
            rooms.append(Room(self.agent - agent, StopReason.AGENT_TOKENS))
        if self.turn is not None:
            rooms.append(Room(self.turn - turn, StopReason.AGENT_TOKENS))
        return min(rooms, key=lambda room: room.tokens)


class Clock:
    """The wall-clock time since the episode began."""

    def __init__(self, max_seconds: float | None) -> None:
        self._begun = time.perf_counter()
        self._max_seconds = max_seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float | None:
        """Seconds that remain, at least 0, or ``None`` if time is unlimited."""
        return None if self._max_seconds is None else max(0.0, self._max_seconds - self.elapsed)
