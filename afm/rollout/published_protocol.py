"""AFM's published protocol for its web agent, as a thin layer over the episode loop.

Source: ``AFM/evaluation/web_agent/inference_web_agent.py`` and ``utils.py`` of the published repository (revision
8f94516). Each step is a separate chat request: the assistant's turn so far, trimmed and closed, then a new turn.
The record still has every sampled token. They do not start with what the model read, which the provenance notes
(``protocol``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afm.agents.spec import AgentSpec, Limits, RoleKind
from afm.errors import ConfigError
from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel
from afm.rollout.episode_loop import EpisodeRun, TokenBudget
from afm.rollout.tool_calls import ToolCaller, tools_by_role
from afm.rollout.transcript import Episode
from afm.seeds import generation_seed
from afm.tools.base import Tool
from afm.trajectory.observation import observation_text
from afm.trajectory.record import Cost, StopReason
from afm.trajectory.tags import Author, Step, StepClosed, StreamEvent, StreamParser

_TAG = re.compile(r"(<[^>]+>)")


def trimmed(
    text: str,
    max_tokens: int,
    kept_roles: Sequence[str],
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Return ``text`` trimmed to ``max_tokens`` tokens, counted piece by piece between tags.

    Closed blocks of ``kept_roles`` come first, then the newest of the other pieces that fit, in their order. The first
    text that does not fit keeps its beginning. If the blocks are too long themselves, only the newest of their pieces
    that fit remain, or else the first piece of the text.
    """
    pieces = [piece for piece in _TAG.split(text) if piece]
    if not pieces:
        return ""
    counts = [len(encode(piece)) for piece in pieces]
    kept = _blocks(pieces, kept_roles)
    room = max_tokens - sum(counts[at] for at in kept)
    if room < 0:
        left = _newest_that_fit(kept, counts, max_tokens)
        return "".join(pieces[at] for at in left) or pieces[0]
    others: list[str] = []
    for at in reversed([at for at in range(len(pieces)) if at not in kept]):
        if room <= 0:
            break
        if counts[at] <= room:
            others.append(pieces[at])
            room -= counts[at]
        elif not _TAG.match(pieces[at]):
            others.append(decode(encode(pieces[at])[:room]))
            room = 0
    return "".join([*(pieces[at] for at in sorted(kept)), *reversed(others)])


def _blocks(pieces: Sequence[str], roles: Sequence[str]) -> set[int]:
    """Return the places of the pieces in closed blocks of ``roles``, including the tags."""
    places: set[int] = set()
    opened: dict[str, list[int]] = {role: [] for role in roles}
    for at, piece in enumerate(pieces):
        name = piece[1:-1].removeprefix("/")
        if not _TAG.fullmatch(piece) or name not in opened:
            continue
        if not piece.startswith("</"):
            opened[name].append(at)
        elif opened[name]:
            places.update(range(opened[name].pop(), at + 1))
    return places


def _newest_that_fit(places: set[int], counts: Sequence[int], max_tokens: int) -> list[int]:
    left: list[int] = []
    for at in sorted(places, reverse=True):
        if counts[at] <= max_tokens:
            left.insert(0, at)
            max_tokens -= counts[at]
    return left


SAME_FUNCTION = (
    "This function was used five times in a row, so the step was not carried out. Try another way."
)
SAME_CONTENT = "This step was written before, so it was not carried out again. Try another way."


@dataclass(frozen=True, slots=True)
class PublishedProtocol:
    """The numbers of the published script.

    Attributes:
        max_steps: Limit of tool calls, suggested answers and the answer together.
        max_errors: Limit of generations without a step, which the history drops.
        suggestions: The suggested answer with this number becomes the answer.
        same_function: After this number of equal kinds of steps in a row, the next step is not carried out.
        total_tokens: Context in tokens.
        turn_tokens: New tokens of a step.
        reserve: Tokens that stay free.
        attempts: Number of times that an episode is played until it has an answer.
    """

    max_steps: int = 36
    max_errors: int = 10
    suggestions: int = 3
    same_function: int = 5
    total_tokens: int = 32_768
    turn_tokens: int = 4_096
    reserve: int = 512
    attempts: int = 3

    @classmethod
    def of(cls, limits: Limits) -> PublishedProtocol:
        """Return the protocol with the turns, turn tokens and response tokens of ``limits`` where they are set."""
        values = {
            "max_steps": limits.max_turns,
            "turn_tokens": limits.max_turn_tokens,
            "total_tokens": limits.max_response_tokens,
        }
        return cls(**{name: value for name, value in values.items() if value is not None})


def suggestion_role(spec: AgentSpec) -> str | None:
    """Return the role of an answer that is checked first: only checks that lead to the answer may follow it."""
    for role, following in spec.transitions.items():
        grades = [spec.roles[tag].grade for tag in following]
        if following and all(grade and spec.answer_role in grade.when_accepted for grade in grades):
            return role
    return None


def check_agent(spec: AgentSpec) -> None:
    """Check that the published script can run an agent.

    Raises:
        ConfigError: The agent suggests no answers. The script only runs the web agent.
    """
    if suggestion_role(spec) is None or spec.observation_role is None or not spec.thought_roles:
        raise ConfigError(
            f"protocol: got published, but agent {spec.name!r} suggests no answers; expected an agent that thinks, calls tools and "
            "suggests answers (web, wiki, full). Sets of questions, math and programs were evaluated by the trainer's "
            "validation, whose loop is that of protocol=ours"
        )


async def run_published(
    spec: AgentSpec,
    model: TokenModel,
    tools: Mapping[str, Tool],
    question: str,
    messages: Sequence[Mapping[str, str]],
    *,
    protocol: PublishedProtocol,
    limits: Limits,
    sampling: SamplingParams,
    seed: int | None = None,
) -> Episode:
    """Play a question with the published protocol. See :func:`afm.rollout.run_episode`.

    The first attempt with an answer counts, or else the last one. Its cost includes all attempts. ``limits`` sets the
    time and the length of an observation, and the protocol sets steps and tokens.

    Args:
        messages: The prompt. The history follows it as the assistant's turn.

    Raises:
        ConfigError: A tool is missing, or the agent suggests no answers.
        EngineError: The model failed, and there is no episode.
    """
    check_agent(spec)
    by_role = tools_by_role(spec, tools)
    unbounded = limits.model_copy(update={"max_turns": None})
    prompt = tuple(model.encode_prompt(messages))
    costs: list[Cost] = []
    while True:
        own_seed = None if seed is None else generation_seed(seed, len(costs))
        caller = ToolCaller(by_role, run_repeated=True)
        run = PublishedRun(spec, model, caller, question, prompt, unbounded, sampling, own_seed, None)
        run.begin(messages, protocol)
        episode = await run.to_the_end()
        costs.append(episode.cost)
        over = episode.protocol["answer_from"] or episode.stop is StopReason.ABORTED
        if over or len(costs) == protocol.attempts:
            note = {**episode.protocol, "attempts": len(costs)}
            return replace(episode, cost=_sum_of(costs), protocol=note)


def _sum_of(costs: Sequence[Cost]) -> Cost:
    """Return the cost of all attempts together. They share the prompt."""
    parts = {name: [getattr(cost, name) for cost in costs] for name in Cost.model_fields}
    total = {name: sum(values) for name, values in parts.items() if None not in values}
    return Cost(**total | {"prompt_tokens": costs[-1].prompt_tokens})


class PublishedRun(EpisodeRun):
    """The state of one episode of the published protocol."""

    def begin(self, messages: Sequence[Mapping[str, str]], protocol: PublishedProtocol) -> None:
        """Set up the state that the episode loop does not have."""
        spec, model = self._spec, self._model
        self._protocol = protocol
        self._messages = [dict(message) for message in messages]
        self._suggesting = suggestion_role(spec) or ""
        self._budget = TokenBudget(sys.maxsize, None, protocol.turn_tokens)
        forged = f"<{spec.observation_role}>"
        self._stops = (
            *(text for text in spec.stop_strings if text != forged),
            f"</{self._suggesting}>",
            forged,
        )
        self._history = ""
        asked = (message["content"] for message in messages if message["role"] != "system")
        self._prompt_tokens = sum(len(model.encode(text)) for text in asked)
        self._kinds: list[str] = []
        self._suggestions: list[str] = []
        self._read: list[int] = []
        self._note: dict[str, Any] = {"name": "published", "answer_from": None}
        self._counts = dict.fromkeys(
            ("steps", "errors", "forgotten_tokens", "quoted_steps", "trimmed_reads"), 0
        )

    async def to_the_end(self) -> Episode:
        """Play until an answer or a limit. At a limit, the last suggested answer counts."""
        stop = None
        while stop is None:
            stop = await self._turn()
        if stop not in (StopReason.ANSWER, StopReason.ABORTED) and self._suggestions:
            self._adopt(self._suggestions[-1], "last suggested answer")
        episode = self._episode(stop)
        forgotten = self._counts["forgotten_tokens"]
        cost = episode.cost.model_copy(update={"agent_tokens": episode.cost.agent_tokens + forgotten})
        return replace(episode, cost=cost, protocol=self._note | self._counts)

    def _reading(self) -> list[int]:
        return self._read

    async def _turn(self) -> StopReason | None:
        if self._counts["steps"] >= self._protocol.max_steps:
            return StopReason.TURNS
        if self._counts["errors"] >= self._protocol.max_errors:
            return StopReason.END_OF_TEXT
        if self._clock.left == 0:
            return StopReason.SECONDS
        self._look_back()
        room = min(self._protocol.turn_tokens, self._model.context_tokens - len(self._read))
        if room < 1:
            self._forget(0)
            return None
        generation = await self._generate(room)
        if generation is None:
            return StopReason.SECONDS
        if generation.finish is FinishReason.ABORTED:
            return StopReason.ABORTED
        step = self._step(self._model.decode(generation.token_ids))
        if step is not None:
            return await self._taken(generation, step)
        self._forget(len(generation.token_ids))
        return None

    def _look_back(self) -> None:
        """What the next generation reads: the trimmed history as a closed turn, then the beginning of a new one."""
        self._history += f"<{self._spec.thought_roles[0]}>"
        # Half of the context is in effect the bound of the history: its own length is taken off as well.
        protocol, own = self._protocol, len(self._model.encode(self._history))
        room = protocol.total_tokens - protocol.turn_tokens - self._prompt_tokens - own - protocol.reserve
        shown = trimmed(self._history, room, _kept_roles(self._spec), self._model.encode, self._model.decode)
        self._counts["trimmed_reads"] += len(shown) < len(self._history)
        self._read = self._model.encode_prompt([*self._messages, {"role": "assistant", "content": shown}])

    def _step(self, text: str) -> Step | None:
        """Return the step that ended a generation, or ``None`` if it ended otherwise, for example in a thought."""
        event = self._decisive(StreamParser(self._spec).feed(text))
        return event.step if isinstance(event, StepClosed) else None

    def _decides(self, event: StreamEvent) -> bool:
        suggested = isinstance(event, StepClosed) and event.step.role == self._suggesting
        return suggested or super()._decides(event)

    def _forget(self, tokens: int) -> None:
        self._counts["errors"] += 1
        self._counts["forgotten_tokens"] += tokens

    async def _taken(self, generation: Generation, step: Step) -> StopReason | None:
        """Carry out a step unless it is a repetition."""
        notice = self._repeats(self._model.decode(generation.token_ids))
        self._kinds.append(step.role)
        self._counts["steps"] += 1
        self._transcript.end_segment()
        text = self._transcript.add_generation(generation)
        if step.role == self._suggesting:
            self._suggestions.append(step.content)
        if notice is not None:
            self._quote(text, notice)
            return None
        if step.role == self._spec.answer_role:
            self._note["answer_from"] = "answer"
            return StopReason.ANSWER
        if step.role != self._suggesting:
            return await self._called(step, text)
        if len(self._suggestions) < self._protocol.suggestions:
            self._history += text
            return None
        self._adopt(step.content, f"suggested answer {len(self._suggestions)}")
        return StopReason.ANSWER

    def _repeats(self, text: str) -> str | None:
        """Return why a step is not carried out, or ``None`` if it is."""
        recent = self._kinds[-self._protocol.same_function :]
        if len(recent) == self._protocol.same_function and len(set(recent)) == 1:
            return SAME_FUNCTION
        bare = text.rpartition(f"</{self._spec.thought_roles[0]}>")[2].strip()
        return SAME_CONTENT if bare in self._history else None

    def _quote(self, text: str, notice: str) -> None:
        """Record a step as a quotation by the environment, so that an answer in it does not count."""
        self._counts["quoted_steps"] += 1
        self._transcript.end_segment(Author.ENVIRONMENT)
        observation = observation_text(notice, self._spec, self._limits.max_observation_chars)
        self._transcript.add_observation(self._model.encode(observation), observation)
        self._history += text + observation.removesuffix("\n")

    async def _called(self, step: Step, text: str) -> StopReason | None:
        reason = await self._call(step)
        if reason is None:
            self._history += f"\n{text}{self._transcript.last_text}".removesuffix("\n")
        return reason

    def _adopt(self, content: str, source: str) -> None:
        """Append a suggested answer as the answer. It counts as the agent's text, and its tokens have mask 0."""
        role = self._spec.answer_role
        text = f"\n<{role}>{content}</{role}>"
        self._transcript.add_adopted(self._model.encode(text), text)
        self._note["answer_from"] = source


def _kept_roles(spec: AgentSpec) -> tuple[str, ...]:
    """Return the roles of plans and reflections: text roles except suggested answers and their checks."""
    suggesting = suggestion_role(spec) or ""
    checked = {suggesting, *spec.transitions.get(suggesting, ())}
    return tuple(tag for tag, role in spec.roles.items() if role.kind is RoleKind.TEXT and tag not in checked)
