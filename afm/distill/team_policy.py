"""A team as a policy: one model answers every member, and each conversation is stored as sampled tokens.

The same team file defines a teacher with models on servers (:mod:`afm.distill.model_team`). Here a session of the
gateway answers its members, so ``afm rl`` trains on exactly the sampled tokens of each member.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.event_log import ACCEPTED, CHECKED, Event, Recorder
from afm.distill.merge import merge_attempt
from afm.distill.model_team.members import MemberVoices, NoUsableReplyError
from afm.distill.model_team.settings import read_team
from afm.distill.model_team.team import VERIFIER, WRITER, ModelTeam
from afm.distill.program_team import ProgramTeamSettings
from afm.endpoints.budget import Spent
from afm.errors import EngineError, ToolError
from afm.harness import ChatRenderer, ModelRequest, RequestRefusedError, Session, SessionLimits
from afm.harness.episode import Claim, HarnessEpisode, HarnessRunner, OpenSession
from afm.harness.player import HarnessPlayer, Messages
from afm.harness.program import ProgramEnd, ProgramRun
from afm.harness.settings import HarnessSettings
from afm.models.base import SamplingParams, TokenModel
from afm.rewards import Reward
from afm.seeds import derive_seed
from afm.tools import check_tools, load_tools
from afm.trajectory.record import Record


class SessionVoices(MemberVoices):
    """Members that one session answers. Of their models only ``max_tokens`` and ``system_role`` apply."""

    def __init__(self, team: ModelTeam, session: Session) -> None:
        super().__init__(team.settings, team.prompts, team.settings.limits.asks)
        self._session = session

    async def _reply(self, recorder: Recorder, member: str, system: str, user: str) -> str:
        model, begun = self._models[self._members[member].model], time.perf_counter()
        request = ModelRequest(
            messages=model.messages(system, user), max_tokens=model.max_tokens, member=member
        )
        reply = await self._session.ask(request)
        recorder.call(
            member,
            prompt_tokens=len(reply.prompt_ids),
            completion_tokens=reply.completion_tokens,
            seconds=round(time.perf_counter() - begun, 6),
            meta={"model": reply.model},
        )
        return reply.choices[0].text


@dataclass(frozen=True, slots=True)
class TeamEpisode(HarnessEpisode):
    """An episode of a team, with the events of its last attempt."""

    events: tuple[Event, ...] = ()


class _TeamRun(ProgramRun):
    """A team's attempt in the form of a program's run."""

    @property
    def failure(self) -> str:
        if self.end is ProgramEnd.TIMEOUT:
            return f"the team did not end within {self.seconds:.0f} s"
        return self.stderr


class _NoLog:
    """A sink that drops the events of an episode. The recorder keeps them."""

    spent = Spent()

    def write(self, event: Event) -> None:
        """Drop the event."""


def _claims(events: Sequence[Event]) -> Iterator[Claim]:
    for event in events:
        if CHECKED in event.meta:
            yield Claim(WRITER, event.meta[CHECKED], VERIFIER, event.meta[ACCEPTED])


class TeamRunner(HarnessRunner):
    """Plays episodes with a team in this process. The team's attempt replaces a program's run.

    Args:
        settings: The section ``harness``, with a team.
        spec: The agent whose trajectories the team's work becomes. It also defines the form of the answers.

    Raises:
        ConfigError: The team's file, its roles or its tools are wrong.
    """

    def __init__(self, settings: HarnessSettings, spec: AgentSpec) -> None:
        super().__init__(settings)
        assert settings.team is not None
        self.team = _unserved(settings.team, spec)
        self._tools = load_tools(self.team.settings.tools)
        check_tools(f"{settings.team}: the team", self.team.settings.called_tools, self._tools)
        self._events: dict[str, tuple[Event, ...]] = {}

    async def play(
        self, task: Task, messages: Sequence[Mapping[str, str]], open_session: OpenSession, seed: int
    ) -> TeamEpisode:
        """Play one episode. An attempt whose tools failed, or that timed out, is repeated."""
        attempts: list[str] = []

        def opened(key: str, own_seed: int) -> Session:
            attempts.append(key)
            return open_session(key, own_seed)

        played = await super().play(task, messages, opened, seed)
        events = [self._events.pop(key, ()) for key in attempts][-1]
        fields = {name: getattr(played, name) for name in HarnessEpisode.__dataclass_fields__}
        return TeamEpisode(**fields | {"claims": tuple(_claims(events))}, events=events)

    async def close(self) -> None:
        """Close the tools."""
        await super().close()
        for tool in self._tools.values():
            await tool.close()

    async def _attempt(
        self, task: Task, messages: Sequence[Mapping[str, str]], session: Session, seed: int
    ) -> ProgramRun:
        recorder = Recorder(_NoLog(), task, 0, self._tools, attempt=1)
        begun, end, fault = time.monotonic(), ProgramEnd.DONE, ""
        try:
            async with asyncio.timeout(self.settings.timeout_s) as timer:
                await solve(self.team, recorder, session)
        except TimeoutError:
            if not timer.expired():
                raise
            end = ProgramEnd.TIMEOUT
        except (ToolError, RequestRefusedError) as error:
            end, fault = ProgramEnd.CRASHED, f"{type(error).__name__}: {error}"
        except EngineError:
            if session.error is None:  # the runner raises the session's
                raise
        finally:
            await session.close()
            self._events[session.key] = tuple(recorder.events)
        answer = recorder.events[-1].content if recorder.ended and not recorder.failure else None
        verdict = json.dumps({"answer": answer})
        return _TeamRun(end, "", fault, None, time.monotonic() - begun, verdict=verdict)


async def solve(team: ModelTeam, recorder: Recorder, session: Session) -> None:
    """Let a team work with one session. The attempt fails if a member gives no usable reply."""
    try:
        await team.solve(recorder, SessionVoices(team, session))
    except NoUsableReplyError as error:
        recorder.fail(str(error))


class TeamPolicyPlayer(HarnessPlayer):
    """A team as the player of an evaluation. Its records are merged trajectories of an agent."""

    def _complete(self, record: Record, episode: HarnessEpisode) -> Record:
        assert isinstance(episode, TeamEpisode)
        assert isinstance(self._runner, TeamRunner)
        roles = self._runner.team.roles
        merged = merge_attempt(episode.events, self._spec, roles, team=record.model, seed=record.seed)
        cost = record.cost.model_copy(
            update={"tool_calls": merged.cost.tool_calls, "tool_failures": merged.cost.tool_failures}
        )
        return record.model_copy(
            update={
                "segments": merged.segments,
                "calls": merged.calls,
                "cost": cost,
                "provenance": merged.provenance | record.provenance,
                "reason": merged.reason,
            }
        )


def runner_of(settings: HarnessSettings, spec: AgentSpec) -> HarnessRunner:
    """Return the runner of a section ``harness``, for its program or its team."""
    return HarnessRunner(settings) if settings.team is None else TeamRunner(settings, spec)


def player_of(
    settings: HarnessSettings,
    spec: AgentSpec,
    model: TokenModel,
    reward: Reward,
    sampling: SamplingParams,
    messages: Messages,
) -> HarnessPlayer:
    """Return the player of an evaluation with a section ``harness``."""
    kind = HarnessPlayer if settings.team is None else TeamPolicyPlayer
    return kind(settings, spec, model, reward, sampling, messages, runner_of(settings, spec))


class TrainedTeam:
    """A team for distillation in which one model answers every member.

    Args:
        policy: The file that names team and model.
        model: Answers in place of the model in the file.

    Attributes:
        settings: The settings of the team, including its tools.
        name: Identifies the team, its settings and its model.
    """

    def __init__(
        self, policy: ProgramTeamSettings, spec: AgentSpec, seed: int, model: TokenModel | None = None
    ) -> None:
        assert policy.harness.team is not None
        self.team = _unserved(policy.harness.team, spec)
        self.settings, self.spec, self.roles = self.team.settings, spec, self.team.roles
        self.name = f"{self.team.name}-{derive_seed(policy.model_dump_json()):08x}"
        self._policy, self._seed, self._model, self._own = policy, seed, model, model is None

    async def solve(self, recorder: Recorder) -> None:
        """Let the team work with one session of the model."""
        if self._model is None:
            self._model = self._policy.open_model()
        session = Session(
            recorder.task.id,
            self._model,
            ChatRenderer(self._model.tokenizer),
            limits=SessionLimits(max_tokens=self._model.context_tokens),
            sampling=SamplingParams(self._model.context_tokens, temperature=self._policy.temperature),
            seed=derive_seed(self._seed, recorder.task.id, bits=53),
        )
        await solve(self.team, recorder, session)

    async def close(self) -> None:
        """Free the model."""
        if self._model is not None and self._own:
            await self._model.close()


def _unserved(file: Path, spec: AgentSpec) -> ModelTeam:
    return ModelTeam(read_team(file), spec, str(file), served=False)
