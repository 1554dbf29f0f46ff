"""One episode of a harness: its program runs against a session of the gateway, and says what it found.

A program gets the task on standard input, as one JSON object, and the same in a file. Its environment holds what
:func:`afm.processes.program_environment` gives to programs of others, and:

``OPENAI_BASE_URL``, ``OPENAI_API_KEY``
    The episode's own address, ``http://HOST:PORT/s/KEY/v1``, and its key.
``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``
    The same for Anthropic's clients, without ``/v1``.
``AFM_MODEL``
    What to give as the model's name.
``AFM_TASK``
    A file with the task: ``id``, ``question``, ``data_source``, ``messages`` (the agent's prompt), ``seed``.
``AFM_VERDICT``
    A file that the program may write. See :class:`OwnVerdict`.

Its answer is ``answer`` of that file, else the last line of its standard output. Its folder is empty and its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator

from afm.agents import AgentSpec
from afm.configuration import Settings
from afm.datasets import Task
from afm.harness.credit import MemberCredit
from afm.harness.history import Sampled
from afm.harness.jail import ORIGIN, HarnessJail
from afm.harness.program import ProgramEnd, ProgramRun, run_program
from afm.harness.server import HarnessServer
from afm.harness.sessions import Session
from afm.harness.settings import HarnessSettings, Judge
from afm.models.base import FinishReason
from afm.processes import named_environment, program_environment
from afm.rewards import Reward, Sample
from afm.seeds import derive_seed
from afm.trajectory import author_segments
from afm.trajectory.answer import dressed_answer
from afm.trajectory.record import Verdict
from afm.trajectory.tags import Segment

NEVER_ASKED = "silent"
"""Counted next to :class:`~afm.harness.program.ProgramEnd`: the program ended well and asked the model nothing."""

OpenSession = Callable[[str, int], Session]
"""Makes the session of an attempt from its key and its seed."""


class OwnVerdict(Settings):
    """What a program writes into its verdict file."""

    answer: str | None = None
    """Its final answer, in place of the last line of its standard output."""
    score: float | None = None
    """Its own reward."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Further numbers that become metrics; ``correct`` says whether the question is solved (default: ``score``)."""
    evidence: str = ""
    """Why, in words."""
    members: dict[str, float] = Field(default_factory=dict)
    """Own verdicts of members of a team, by name (``by_member: own``)."""

    @field_validator("score", "parts", "members")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(number is not None and not math.isfinite(number) for number in numbers):
            raise ValueError("a finite number")
        return value


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer that a member of a team suggested, and what another one made of it."""

    author: str
    answer: str
    checker: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class HarnessEpisode:
    """What became of an episode.

    Attributes:
        trajectories: What was sampled in the last attempt, in the order in which the trajectories began.
        verdict: What the program wrote of itself.
        answer: Its final answer; ``None`` without one.
        failure: Why there is no score to give, empty when the program ended well.
        ends: How often its attempts ended in which way.
        left_behind: Processes that outlived their program.
        seconds: Of all attempts.
        claims: Of a team.
    """

    trajectories: tuple[Sampled, ...]
    verdict: OwnVerdict
    answer: str | None
    failure: str
    ends: Mapping[str, int] = field(default_factory=dict)
    left_behind: int = 0
    seconds: float = 0.0
    claims: tuple[Claim, ...] = ()

    @property
    def agent_tokens(self) -> int:
        """Sampled tokens, each counted once."""
        return sum(sum(trajectory.response_mask) for trajectory in self.trajectories)

    @property
    def response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(trajectory.response_ids) for trajectory in self.trajectories)

    @property
    def turns(self) -> list[int]:
        """Sampled turns of each trajectory, those that it shares with an earlier one left out."""
        return [sum(turn.trained for turn in trajectory.turns) for trajectory in self.trajectories]

    @property
    def last(self) -> int:
        """Index of the trajectory with the episode's last generation."""
        calls = [trajectory.turns[-1].call for trajectory in self.trajectories]
        return max(range(len(calls)), key=calls.__getitem__)

    def said_by(self, member: str) -> list[tuple[int, ...]]:
        """What a member's model sampled, by turn, each once."""
        return [
            trajectory.response_ids[turn.begin : turn.end]
            for trajectory in self.trajectories
            if trajectory.member == member
            for turn in trajectory.turns
            if turn.trained
        ]

    @property
    def facts(self) -> dict[str, float]:
        """Numbers for metrics: what failed, and how the history branched."""
        branches = Counter(str(trajectory.reason) for trajectory in self.trajectories[1:])
        failed = {
            f"harness_{end}": float(self.ends.get(end, 0))
            for end in (ProgramEnd.TIMEOUT, ProgramEnd.CRASHED, ProgramEnd.OUTPUT, NEVER_ASKED)
        }
        return {
            **failed,
            "harness_retries": float(sum(self.ends.values()) - 1),
            "harness_left_behind": float(self.left_behind),
            "trajectories": float(len(self.trajectories)),
            "branches": float(branches.total()),
        }


class HarnessRunner:
    """Plays episodes with one program. It belongs to the event loop of its first episode.

    Args:
        settings: The section ``harness``.
    """

    def __init__(self, settings: HarnessSettings) -> None:
        self.settings = settings
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._server: HarnessServer | None = None
        self._jail: HarnessJail | None = None
        self._place: TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()

    async def play(
        self, task: Task, messages: Sequence[Mapping[str, str]], open_session: OpenSession, seed: int
    ) -> HarnessEpisode:
        """One episode: an attempt, and others where the program hung, crashed or asked nothing, or a generation broke off.

        Args:
            messages: The agent's prompt, for programs that want it.
            open_session: Called for each attempt.
            seed: Of the first attempt; others have one of their own.

        Raises:
            ConfigError: The program cannot be started.
            EngineError: The engine failed.
        """
        begun, ends, left_behind = time.monotonic(), Counter[str](), 0
        async with self._gate:
            for number in range(self.settings.retries + 1):
                own_seed = derive_seed(f"{seed}/attempt {number}", bits=53) if number else seed
                session = open_session(uuid4().hex, own_seed)
                if self.settings.max_requests is not None:
                    session.limits = replace(session.limits, max_calls=self.settings.max_requests)
                run = await self._attempt(task, messages, session, own_seed)
                if session.error is not None:
                    raise session.error
                trajectories = tuple(session.trajectories())
                silent = run.end is ProgramEnd.DONE and not trajectories
                ends[NEVER_ASKED if silent else run.end] += 1
                left_behind += run.left_behind
                failure = "the program asked the model nothing" if silent else run.failure
                if any(turn.finish is FinishReason.ABORTED for each in trajectories for turn in each.turns):
                    failure = "the engine broke off a generation"
                if not failure:
                    break
        verdict, fault = _own_verdict(run, session)
        return HarnessEpisode(
            trajectories,
            verdict,
            verdict.answer if verdict.answer is not None else _last_line(run.stdout),
            failure or fault,
            ends,
            left_behind,
            time.monotonic() - begun,
        )

    async def close(self) -> None:
        """Stop the gateway, and programs that run in a jail."""
        server, self._server = self._server, None
        jail, self._jail = self._jail, None
        if jail is not None:
            await jail.close()
        if server is not None:
            await server.close()
        if self._place is not None:
            self._place.cleanup()

    async def _attempt(
        self, task: Task, messages: Sequence[Mapping[str, str]], session: Session, seed: int
    ) -> ProgramRun:
        server = await self._running()
        url, given = server.open(session), describe_task(task, messages, seed)
        try:
            if self._jail is not None:
                inside = named_environment(self.settings.environment, "harness") | environment(
                    session, url.replace(server.origin, ORIGIN, 1)
                )
                return await self._jail.run_program(inside, given)
            with TemporaryDirectory(prefix="afm-harness-", ignore_cleanup_errors=True) as place:
                folder = Path(place)
                work, verdict, file = folder / "work", folder / "verdict.json", folder / "task.json"
                work.mkdir()
                file.write_bytes(given)
                env = program_environment(self.settings.environment, "harness") | environment(session, url)
                return await run_program(
                    self.settings.words,
                    episode=session.key,
                    folder=work,
                    env=env | {"AFM_TASK": str(file), "AFM_VERDICT": str(verdict)},
                    stdin=given,
                    timeout_s=self.settings.timeout_s,
                    max_output_bytes=self.settings.max_output_bytes,
                    verdict_file=verdict,
                )
        finally:
            await server.end(session.key)

    async def _running(self) -> HarnessServer:
        async with self._starting:
            if self._server is None:
                self._server = self._server_of_jail() if self.settings.sandbox else HarnessServer()
                await self._server.start()
        return self._server

    def _server_of_jail(self) -> HarnessServer:
        """A gateway on a Unix socket alone. Every user may connect; it takes the key of a session to be answered."""
        self._place = TemporaryDirectory(prefix="afm-gateway-", ignore_cleanup_errors=True)
        folder = Path(self._place.name)
        folder.chmod(0o711)
        server = HarnessServer(host=None, unix_socket=folder / "gateway.sock")
        (folder / "gateway.sock").chmod(0o666)
        self._jail = HarnessJail(self.settings, folder / "gateway.sock")
        return server


def environment(session: Session, url: str) -> dict[str, str]:
    """Where a program finds its model."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.key,
        "AFM_MODEL": session.model.name,
    }


def describe_task(task: Task, messages: Sequence[Mapping[str, str]], seed: int) -> bytes:
    """What a program learns of its task: nothing of the gold answer."""
    row = {
        "id": task.id,
        "question": task.question,
        "data_source": task.data_source,
        "messages": [dict(message) for message in messages],
        "seed": seed,
    }
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


async def judge(
    episode: HarnessEpisode, settings: HarnessSettings, spec: AgentSpec, task: Task, reward: Reward
) -> Verdict:
    """The score of an episode, or the reason for its absence; an episode that failed never scores 0."""
    if episode.failure:
        return Verdict(score=None, evidence=f"harness: {episode.failure}")
    if fault := _no_member_credit(episode, settings):
        return Verdict(score=None, evidence=f"harness: by_member: {settings.by_member}: {fault}")
    if settings.reward is Judge.HARNESS:
        own = episode.verdict
        if own.score is None:
            return Verdict(score=None, evidence="harness: the program gave no score (AFM_VERDICT)")
        parts = {"correct": own.score, "format": 1.0} | own.parts
        return Verdict(score=own.score, parts=parts, evidence=own.evidence)
    return await reward.score(_sample(episode, episode.answer, spec, task))


def _no_member_credit(episode: HarnessEpisode, settings: HarnessSettings) -> str:
    """Why ``by_member`` cannot be applied to an episode; empty when it can."""
    if settings.by_member is MemberCredit.SHARED:
        return ""
    if not all(trajectory.member for trajectory in episode.trajectories):
        return "a request named no member; ask ADDRESS/s/KEY/agent/NAME/v1 in place of ADDRESS/s/KEY/v1"
    if settings.by_member is MemberCredit.OWN and settings.command and not episode.verdict.members:
        return "the program gave no `members` (AFM_VERDICT)"
    return ""


async def member_verdicts(
    episode: HarnessEpisode, spec: AgentSpec, task: Task, reward: Reward
) -> dict[str, float]:
    """The own verdict of each member that has one.

    A program gives them (``members`` of its verdict file). In a team they come from its suggested answers, of which
    ``c`` is the scorer's ``correct`` (``score`` without it). The writer has the mean of ``c``. The verifier has the mean
    of ``c`` for an answer that it accepted, and of ``1 - c`` for one that it refused.
    """
    verdicts: dict[str, list[float]] = defaultdict(list)
    for claim in episode.claims:
        verdict = await reward.score(_sample(episode, claim.answer, spec, task))
        if verdict.score is None:
            continue
        correct = verdict.parts.get("correct", verdict.score)
        verdicts[claim.author].append(correct)
        verdicts[claim.checker].append(correct if claim.accepted else 1 - correct)
    return {member: fmean(values) for member, values in verdicts.items()} | episode.verdict.members


def _sample(episode: HarnessEpisode, answer: str | None, spec: AgentSpec, task: Task) -> Sample:
    return Sample.of(
        spec,
        task,
        answer_segments(answer, spec),
        agent_tokens=episode.agent_tokens,
        response_tokens=episode.response_tokens,
        extra_info=task.extra_info,
        answer_alone=True,
    )


def answer_segments(answer: str | None, spec: AgentSpec) -> tuple[Segment, ...]:
    """A program's answer as the agent would have given it; nothing without one."""
    if answer is None:
        return ()
    text = f"<{spec.answer_role}>{dressed_answer(answer, spec)}</{spec.answer_role}>"
    return author_segments(text, spec)


def _own_verdict(run: ProgramRun, session: Session) -> tuple[OwnVerdict, str]:
    """What the program says of itself, and what is wrong with that."""
    reported = OwnVerdict(score=session.reward)
    if run.verdict is None:
        return reported, run.verdict_fault
    try:
        own = OwnVerdict.model_validate_json(run.verdict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the object"
        return reported, f"the verdict file is wrong: {where}: {first['msg']}"
    return own if own.score is not None else own.model_copy(update={"score": session.reward}), ""


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None
