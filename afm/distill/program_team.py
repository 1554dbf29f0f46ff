"""A harness as a team: its program's requests and replies become events, and then a trajectory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from afm.agents import AgentSpec, RoleKind
from afm.configuration import Settings
from afm.distill.event_log import Recorder
from afm.distill.merge import RoleMap
from afm.harness.episode import HarnessEpisode, HarnessRunner
from afm.harness.history import Sampled
from afm.harness.rendering import ChatRenderer
from afm.harness.sessions import Session, SessionLimits
from afm.harness.settings import HarnessSettings
from afm.models.base import SamplingParams, TokenModel
from afm.models.load import load_model
from afm.seeds import derive_seed
from afm.trajectory.tags import split

MEMBER = "model"
"""The member that stands for the model's text outside of the agent's tags."""


class ProgramTeamSettings(Settings):
    """The file of a team that is a program."""

    harness: HarnessSettings
    """The program or the team, as in ``afm rl``. ``reward``, ``credit`` and ``by_member`` have no effect here. A team
    has ``roles`` of its own."""
    model: str
    """Folder of the model that answers the program, or the address of a server that returns token ids."""
    tokenizer: str | None = None
    """Folder of the tokenizer, for a server."""
    name: str | None = None
    """The model's name at the server."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of every generation. The program's own value is ignored."""
    agent: str
    """The agent whose trajectories the program's work becomes: the name of a shipped agent, or a YAML."""
    tools: Literal[None] = None
    """Always empty, because the program has its own tools."""
    roles: RoleMap = RoleMap(messages={})
    """The role of the agent for ``model``, the text outside of the agent's tags. The default is the agent's only thought
    role. Text in a tag has that tag's role."""

    def open_model(self) -> TokenModel:
        """Load the model. The caller closes it."""
        return load_model(self.model, name=self.name, tokenizer=self.tokenizer)


class ProgramTeam:
    """A program with the agent and roles of its file.

    Args:
        model: Answers the program in place of the model in the file.

    Attributes:
        name: Distinguishes the programs of two runs.
    """

    def __init__(
        self, settings: ProgramTeamSettings, spec: AgentSpec, seed: int, model: TokenModel | None = None
    ) -> None:
        self.settings, self.spec = settings, spec
        self._seed, self._model, self._own = seed, model, model is None
        self._runner = HarnessRunner(settings.harness)
        files = (Path(word) for word in settings.harness.command)
        source = b"".join(file.read_bytes() for file in files if file.is_file())
        words = repr(settings.model_dump(mode="json")).encode()
        self.name = f"program-{hashlib.sha256(source + words).hexdigest()[:8]}"

    @property
    def roles(self) -> RoleMap:
        """The roles of the agent's tags, and of text outside of them."""
        texts = {tag: tag for tag, role in self.spec.roles.items() if role.kind is RoleKind.TEXT}
        thoughts = {tag: tag for tag in self.spec.thought_roles}
        only = {MEMBER: self.spec.thought_roles[0]} if len(self.spec.thought_roles) == 1 else {}
        named = self.settings.roles
        return named.model_copy(update={"messages": texts | thoughts | only | named.messages})

    async def solve(self, recorder: Recorder) -> None:
        """Run the program and log the trajectory of its last generation."""
        model, task = self._opened(), recorder.task
        renderer = ChatRenderer(model.tokenizer)
        sampling = SamplingParams(model.context_tokens, temperature=self.settings.temperature)
        limits = SessionLimits(max_tokens=model.context_tokens)

        def open_session(key: str, seed: int) -> Session:
            return Session(key, model, renderer, limits=limits, sampling=sampling, seed=seed)

        messages = self.spec.prompt_messages(task.question)
        seed = derive_seed(self._seed, task.id, bits=53)
        episode = await self._runner.play(task, messages, open_session, seed)
        write_down(episode, self.spec, model, recorder)

    async def close(self) -> None:
        """Stop the gateway, and free the model."""
        await self._runner.close()
        if self._model is not None and self._own:
            await self._model.close()

    def _opened(self) -> TokenModel:
        if self._model is None:
            self._model = self.settings.open_model()
        return self._model


def write_down(episode: HarnessEpisode, spec: AgentSpec, model: TokenModel, recorder: Recorder) -> None:
    """Log an episode as an attempt of a team. An episode without an answer has failed."""
    if episode.failure:
        recorder.fail(f"harness: {episode.failure}")
        return
    trajectory = episode.trajectories[episode.last]
    teller = _Teller(spec, recorder)
    recorder.call(
        MEMBER,
        prompt_tokens=len(trajectory.prompt_ids),
        completion_tokens=episode.agent_tokens,
        seconds=round(episode.seconds, 3),
    )
    for by_agent, text, calls, answered in _turns(trajectory, model):
        if by_agent:
            teller.hear(text)
            teller.pending += calls
        else:
            teller.observe(text, answered)
    if episode.answer is None:
        recorder.fail("the program gave no answer")
    else:
        recorder.finish(MEMBER, episode.answer)


Calls = list[tuple[str, str, str]]
"""Id, tool and argument of each call; the id is empty for a call without one."""


class _Teller:
    """Logs the turns of a conversation. A result answers the open call with its id, or else the oldest open call."""

    def __init__(self, spec: AgentSpec, recorder: Recorder) -> None:
        self._spec, self._recorder = spec, recorder
        self.pending: Calls = []

    def hear(self, text: str) -> None:
        """Log the model's text: as steps if it uses the agent's tags, otherwise as one message."""
        steps = split(text, self._spec).steps
        if not steps and text.strip():
            self._recorder.say(MEMBER, text.strip())
        for step in steps:
            if step.role in self._spec.tool_roles:
                self.pending.append(("", self._spec.tool_roles[step.role], step.content))
            elif step.role not in (self._spec.answer_role, self._spec.observation_role):
                self._recorder.say(step.role, step.content)

    def observe(self, text: str, answered: str) -> None:
        """Log the result of the call with the id ``answered``. Without an open call the text is a prompt, and not logged."""
        if not self.pending:
            return
        ids = [identity for identity, _, _ in self.pending]
        _, tool, argument = self.pending.pop(ids.index(answered) if answered in ids else 0)
        steps = [step for step in split(text, self._spec).steps if step.role == self._spec.observation_role]
        self._recorder.observe(MEMBER, tool, argument, steps[0].content.strip("\n") if steps else text)


def _turns(trajectory: Sampled, model: TokenModel) -> Iterator[tuple[bool, str, Calls, str]]:
    """Yield the turns after the first prompt: messages of a chat, or spans of tokens.

    Each has whether the agent wrote it, its text, its calls, and the id of the call that it answers.
    """
    if trajectory.messages and "role" in trajectory.messages[0]:
        begun = False
        for message in trajectory.messages:
            by_agent = message.get("role") == "assistant"
            begun = begun or by_agent
            if begun:
                yield (
                    by_agent,
                    str(message.get("content") or ""),
                    [*map(_call, message.get("tool_calls") or ())],
                    str(message.get("tool_call_id") or ""),
                )
        return
    end = 0
    for turn in trajectory.turns:
        if between := model.decode(trajectory.response_ids[end : turn.begin]):
            yield False, between, [], ""
        yield True, model.decode(trajectory.response_ids[turn.begin : turn.end]), [], ""
        end = turn.end


def _call(call: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the id, tool and argument of a call. A single text argument is returned without its name."""
    function = call["function"]
    arguments = str(function.get("arguments") or "")
    try:
        values = list(json.loads(arguments).values())
    except (ValueError, AttributeError):
        values = []
    alone = len(values) == 1 and isinstance(values[0], str)
    return str(call.get("id") or ""), str(function["name"]), values[0] if alone else arguments
