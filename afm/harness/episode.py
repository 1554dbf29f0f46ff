"""Play one episode of a harness: run its program against a session of the gateway, and read its answer.

A program gets the task as one JSON object on standard input, and in a file. Its environment is that of
:func:`afm.processes.program_environment` and these variables:

``OPENAI_BASE_URL``, ``OPENAI_API_KEY``
    Address of the episode's session, ``http://HOST:PORT/s/KEY/v1``, and its key.
``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``
    The same for Anthropic's clients. The address has no ``/v1``.
``AFM_MODEL``
    Name of the model in requests.
``AFM_TASK``
    File with the task: ``id``, ``question``, ``data_source``, ``messages`` (the agent's prompt), ``seed``.
``AFM_VERDICT``
    File that the program may write. See :class:`OwnVerdict`.

The answer is ``answer`` of that file, or the last line of standard output. Each program starts in a new, empty folder.
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
from afm.errors import first_fault
from afm.harness.credit import MemberCredit
from afm.harness.history import Sampled
from afm.harness.jail import ORIGIN, HarnessJail
from afm.harness.program import ProgramEnd, ProgramRun, ProgramStarter
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
"""An end in addition to :class:`~afm.harness.program.ProgramEnd`: the program ended well but never asked the model."""

OpenSession = Callable[[str, int], Session]
"""Returns the session of an attempt for a key and a seed."""


class OwnVerdict(Settings):
    """Contents of a program's verdict file."""

    answer: str | None = None
    """Final answer, in place of the last line of standard output."""
    score: float | None = None
    """The program's own reward."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Further numbers for metrics. ``correct`` tells whether the question is solved (default: ``score``)."""
    evidence: str = ""
    """Reason for the score, as text."""
    members: dict[str, float] = Field(default_factory=dict)
    """Verdicts of a team's members, by name (``by_member: own``)."""

    @field_validator("score", "parts", "members")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(number is not None and not math.isfinite(number) for number in numbers):
            raise ValueError("expected a finite number")
        return value


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer that a team's member suggested, and the judgement of the member that checked it."""

    author: str
    answer: str
    checker: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class HarnessEpisode:
    """Result of an episode.

    Attributes:
        trajectories: Trajectories of the last attempt, in the order in which they began.
        verdict: The program's own verdict.
        answer: Final answer, ``None`` without one.
        failure: Why the episode has no score. Empty if the program ended well.
        ends: Number of attempts by the way in which they ended.
        left_behind: Number of processes that outlived their program.
        seconds: Time of all attempts.
        claims: Suggested answers of a team.
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
        """Number of sampled tokens, each counted once."""
        return sum(sum(trajectory.response_mask) for trajectory in self.trajectories)

    @property
    def response_tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(len(trajectory.response_ids) for trajectory in self.trajectories)

    @property
    def turns(self) -> list[int]:
        """Number of sampled turns of each trajectory, without the turns of earlier trajectories."""
        return [sum(turn.trained for turn in trajectory.turns) for trajectory in self.trajectories]

    @property
    def last(self) -> int:
        """Index of the trajectory with the episode's last generation."""
        calls = [trajectory.turns[-1].call for trajectory in self.trajectories]
        return max(range(len(calls)), key=calls.__getitem__)

    def said_by(self, member: str) -> list[tuple[int, ...]]:
        """Return the ids that were sampled for a member, by turn, each turn once."""
        return [
            trajectory.response_ids[turn.begin : turn.end]
            for trajectory in self.trajectories
            if trajectory.member == member
            for turn in trajectory.turns
            if turn.trained
        ]

    @property
    def facts(self) -> dict[str, float]:
        """Numbers for metrics: failures, and branches of the history."""
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
    """Runner of episodes with one program, for a single event loop.

    Args:
        settings: The section ``harness``.
    """

    def __init__(self, settings: HarnessSettings) -> None:
        self.settings = settings
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._server: HarnessServer | None = None
        self._jail: HarnessJail | None = None
        self._starter: ProgramStarter | None = None
        self._place: TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()

    async def play(
        self, task: Task, messages: Sequence[Mapping[str, str]], open_session: OpenSession, seed: int
    ) -> HarnessEpisode:
        """Play one episode. Retry if the program hung, crashed or never asked, or if a generation was aborted.

        Args:
            task: The task.
            messages: The agent's prompt, which the program may use.
            open_session: Called for each attempt.
            seed: Seed of the first attempt. Each retry derives another one.

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
                failure = "the program never asked the model" if silent else run.failure
                if any(turn.finish is FinishReason.ABORTED for each in trajectories for turn in each.turns):
                    failure = "the engine aborted a generation"
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
        """Stop the gateway and the programs in the jail."""
        server, self._server = self._server, None
        jail, self._jail = self._jail, None
        starter, self._starter = self._starter, None
        if jail is not None:
            await jail.close()
        if starter is not None:
            await starter.close()
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
                usual = program_environment(self.settings.environment, "harness")
                own = {"AFM_TASK": str(file), "AFM_VERDICT": str(verdict)}
                if self._starter is None:
                    self._starter = ProgramStarter(self.settings.words, usual, self.settings.preload)
                return await self._starter.run(
                    episode=session.key,
                    folder=work,
                    env=usual | environment(session, url) | own,
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
        """Return a gateway that listens only on a Unix socket. Every user may connect, but needs a session's key."""
        self._place = TemporaryDirectory(prefix="afm-gateway-", ignore_cleanup_errors=True)
        folder = Path(self._place.name)
        folder.chmod(0o711)
        server = HarnessServer(host=None, unix_socket=folder / "gateway.sock")
        (folder / "gateway.sock").chmod(0o666)
        self._jail = HarnessJail(self.settings, folder / "gateway.sock")
        return server


def environment(session: Session, url: str) -> dict[str, str]:
    """Return the variables with the address, key and name of the model."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.key,
        "AFM_MODEL": session.model.name,
    }


def describe_task(task: Task, messages: Sequence[Mapping[str, str]], seed: int) -> bytes:
    """Return a task as the JSON that a program gets, without the gold answer."""
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
    """Return the verdict of an episode. A failed episode has no score, never 0."""
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
    """Return why ``by_member`` cannot be applied to an episode. Empty if it can."""
    if settings.by_member is MemberCredit.SHARED:
        return ""
    if not all(trajectory.member for trajectory in episode.trajectories):
        return "a request has no member; use ADDRESS/s/KEY/agent/NAME/v1 in place of ADDRESS/s/KEY/v1"
    if settings.by_member is MemberCredit.OWN and settings.command and not episode.verdict.members:
        return "the program gave no `members` (AFM_VERDICT)"
    return ""


async def member_verdicts(
    episode: HarnessEpisode, spec: AgentSpec, task: Task, reward: Reward
) -> dict[str, float]:
    """Return the own verdict of each member that has one.

    A program's verdict file contains them (``members``). In a team they are computed from its suggested answers. ``c`` is
    the scorer's ``correct`` for an answer, or ``score`` without it. The writer gets the mean of ``c``. The verifier gets
    the mean of ``c`` for accepted and ``1 - c`` for rejected answers.
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
    """Return a program's answer in the agent's form. Empty without an answer."""
    if answer is None:
        return ()
    text = f"<{spec.answer_role}>{dressed_answer(answer, spec)}</{spec.answer_role}>"
    return author_segments(text, spec)


def _own_verdict(run: ProgramRun, session: Session) -> tuple[OwnVerdict, str]:
    """Return the program's own verdict, and the error in it if there is one."""
    reported = OwnVerdict(score=session.reward)
    if run.verdict is None:
        return reported, run.verdict_fault
    try:
        own = OwnVerdict.model_validate_json(run.verdict)
    except ValidationError as error:
        return reported, f"the verdict file (AFM_VERDICT) is invalid: {first_fault(error)}"
    return own if own.score is not None else own.model_copy(update={"score": session.reward}), ""


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None
