"""Prompts of a team's members (templates), their replies (JSON, read leniently, checked strictly), calls of their models."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from afm.configuration import Settings, read_file, validated
from afm.distill.event_log import ESTIMATED, TOKENS, Recorder, explain
from afm.distill.model_team.settings import TeacherEndpoint, TeacherSettings, TeamModel
from afm.endpoints.budget import Budget
from afm.endpoints.chat import CallReport, ChatEndpoint, objects_in, without_reasoning
from afm.errors import BudgetSpentError, ConfigError, EngineError
from afm.settings import load_settings

if TYPE_CHECKING:
    from jinja2 import Environment

_SHIPPED = Path(__file__).parent / "prompts"
_FENCED = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)


def digest_of(content: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> str:
    """Identifies what the work of members depends on: their settings, and their templates."""
    whole = {**content, "prompts": {name: prompt.file.model_dump() for name, prompt in prompts.items()}}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]


class PromptFile(Settings):
    """A YAML of Jinja templates: system and user message, and what of the reply becomes the member's message."""

    system: str
    user: str
    says: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A member's templates; errors in them name ``label``."""

    label: str
    file: PromptFile

    def fill(self, part: str, view: Mapping[str, Any]) -> str:
        """The text of ``system``, ``user`` or ``says``."""
        return filled(getattr(self.file, part), view, f"{self.label}: {part}").strip()


def read_prompt(name: str, path: Path | None = None, says: str | None = None) -> Prompt:
    """The templates in ``path``, or the shipped ones called ``name``; ``says`` replaces theirs.

    Raises:
        ConfigError: No such file, an unknown key, or a template that cannot be read.
    """
    file = path or _SHIPPED / f"{name}.yaml"
    read = validated(PromptFile, read_file(file, "prompt templates"), str(file))
    if says is not None:
        read = read.model_copy(update={"says": says})
    prompt = Prompt(str(file), read)
    for key in PromptFile.model_fields:
        _compiled(getattr(read, key), f"{prompt.label}: {key}")
    return prompt


def filled(template: str, view: Mapping[str, Any], where: str) -> str:
    """A template with its names replaced.

    Raises:
        ConfigError: It is no template, or names something unknown.
    """
    from jinja2 import TemplateError

    try:
        return str(_compiled(template, where).render(view))
    except TemplateError as error:
        raise ConfigError(f"{where}: {error}") from None


@lru_cache(maxsize=256)
def _compiled(template: str, where: str) -> Any:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(template)
    except TemplateError as error:
        raise ConfigError(f"{where}: no template: {error}") from None


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["unfenced"] = unfenced
    return environment


def unfenced(text: str) -> str:
    """The inside of a text that is one code fence; any other text without blanks around it."""
    fence = _FENCED.fullmatch(text)
    return fence[1] if fence else text.strip()


ReplyT = TypeVar("ReplyT", bound="MemberReply")

_SHOWN = 160


class ReflectionGrade(StrEnum):
    """A reflection's grade of one criterion."""

    GOOD = "good"
    AVERAGE = "average"
    POOR = "poor"


def _lowered(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _stepped(value: Any) -> Any:
    return {"goal": value} if isinstance(value, str) else value


class Lenient(BaseModel):
    """A part of a reply: further keys are ignored, numbers stand for their text, ``null`` for a value that may be missing."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {key: value for key, value in data.items() if value is not None or key in needed}


class MemberReply(Lenient):
    """Any member's. ``thought`` is what it considered before it acted."""

    thought: str = ""


class SubTask(Lenient):
    """One step of a plan: what to find out or compute, and which tool agent does it."""

    goal: str = Field(min_length=1)
    agent: str = ""


class PlanReply(MemberReply):
    """The planner's: sub-tasks in order."""

    steps: list[Annotated[SubTask, BeforeValidator(_stepped)]] = Field(min_length=1)


class ToolAgentReply(MemberReply):
    """A tool agent's: a tool call, or what it found when it needs no (more) tools."""

    tool: str = ""
    argument: str = ""
    finding: str = ""

    @model_validator(mode="after")
    def _check(self) -> ToolAgentReply:
        if not self.finding.strip() and not self.argument.strip():
            raise ValueError("expected either `tool` with `argument`, or `finding`")
        return self

    @property
    def calls(self) -> bool:
        """Whether it is a tool call."""
        return bool(self.argument.strip())


class Judged(Lenient):
    """One criterion's grade and why."""

    grade: Annotated[ReflectionGrade, BeforeValidator(_lowered)]
    why: str = ""


class Reflection(MemberReply):
    """The reflector's: three criteria (AFM, arXiv 2508.13167, section 3), what must change, and whether to answer."""

    information_conflict: Judged
    tool_effectiveness: Judged
    trajectory_monitoring: Judged
    advice: str = ""
    ready: bool = False

    @property
    def poor(self) -> bool:
        """Whether any criterion is: the team needs a new plan."""
        grades = (self.information_conflict, self.tool_effectiveness, self.trajectory_monitoring)
        return any(judged.grade is ReflectionGrade.POOR for judged in grades)


class Suggestion(MemberReply):
    """The writer's: a final answer, and the facts that it rests on."""

    answer: str = Field(min_length=1)
    facts: str = ""


class Check(MemberReply):
    """The verifier's: what was tested, a score from 1 (wrong) to 4 (certain), and what follows from it."""

    findings: str = Field(min_length=1)
    score: int = Field(ge=1, le=4)
    conclusion: str = ""


def read_reply_as(kind: type[ReplyT], text: str) -> ReplyT:
    """The JSON object in ``text`` that is a reply; anything around it (words, a fence) is skipped.

    Reasoning (``<think>...</think>``, or all before a ``</think>`` alone) is no reply, whatever objects it holds. Of
    several objects a tool call comes first: what follows it, the model made up instead of waiting for the tool.

    Raises:
        ValueError: No reply was found, or several that differ. The message says what is wrong with the last object, or that the
            reasoning is not finished.
    """
    problem = "it holds no JSON object"
    replies: list[ReplyT] = []
    for data in objects_in(without_reasoning(text)):
        if data is None:
            problem = "its JSON object is not complete or not valid"
            continue
        try:
            replies.append(kind.model_validate(data))
        except ValidationError as error:
            problem = explain(error)[:_SHOWN]
    if not replies:
        raise ValueError(problem)
    for reply in replies:
        if isinstance(reply, ToolAgentReply) and reply.calls:
            return reply
    if any(reply != replies[0] for reply in replies):
        raise ValueError(f"it holds {len(replies)} JSON objects that differ; expected the reply alone")
    return replies[0]


_ADVICE = "raise `budget` in the team's file and run the same command again"
_AGAIN = "\n\nYour last reply could not be used: {problem}. Reply again, with one JSON object of the form asked for and nothing else."

Problem = Callable[[ReplyT], str]
"""What is wrong with a reply that is well formed; empty when nothing is."""


class NoUsableReplyError(EngineError):
    """A member's model said nothing that can be used, however often it was asked."""


class MemberVoices(ABC):
    """Asks a team's members, again where a reply cannot be used.

    Args:
        prompts: The templates of each member.
        asks: How often a member is asked when its replies cannot be used.
    """

    def __init__(self, settings: TeacherSettings, prompts: Mapping[str, Prompt], asks: int) -> None:
        self._models, self._members = settings.models, settings.all_members
        self._prompts = prompts
        self._asks = asks

    async def ask(
        self,
        recorder: Recorder,
        member: str,
        kind: type[ReplyT],
        view: Mapping[str, Any],
        problem: Problem[ReplyT] | None = None,
    ) -> ReplyT:
        """A member's reply of the right kind; it is asked again when it says something else.

        Args:
            view: Names for the member's templates.
            problem: What makes a well-formed reply useless; the member gets it.

        Raises:
            NoUsableReplyError: None came.
            EngineError: The server failed for good.
            BudgetSpentError: The run has nothing left.
        """
        prompt, complaint = self._prompts[member], ""
        system, user = prompt.fill("system", view), prompt.fill("user", view)
        for _ in range(self._asks):
            message = user + (_AGAIN.format(problem=complaint) if complaint else "")
            text = await self._reply(recorder, member, system, message)
            try:
                reply = read_reply_as(kind, text)
            except ValueError as error:
                complaint = str(error)
                continue
            complaint = problem(reply) if problem is not None else ""
            if not complaint:
                return reply
        raise NoUsableReplyError(
            f"{member}: no usable reply in {self._asks} attempts, the last one: {complaint}"
        )

    @abstractmethod
    async def _reply(self, recorder: Recorder, member: str, system: str, user: str) -> str:
        """What a member's model says."""


class MemberModels(MemberVoices):
    """Members with models behind servers: within rate and budget, again when a request fails, every request logged.

    Raises:
        ConfigError: An endpoint has no address, or a model no name, in the file and in the environment.
    """

    def __init__(self, settings: TeacherSettings, prompts: Mapping[str, Prompt], asks: int) -> None:
        super().__init__(settings, prompts, asks)
        environment = load_settings()
        self._default_name = environment.teacher_model_name
        budget = Budget(settings.budget, _ADVICE)
        self._servers = {
            name: _server(name, endpoint, environment.teacher_base_url, budget)
            for name, endpoint in settings.endpoints.items()
        }
        self.names = {key: self._name_of(key, model) for key, model in settings.models.items()}

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.close()

    async def _reply(self, recorder: Recorder, member: str, system: str, user: str) -> str:
        key = self._members[member].model
        model = self._models[key]
        body = _request(self.names[key], model, system, user)
        try:
            return await self._servers[model.endpoint].ask(
                body,
                lambda reply: reply.text,
                price=model.price,
                log=recorder.spent,
                on_call=lambda report: _record(recorder, member, body["model"], report),
            )
        except BudgetSpentError:
            raise
        except EngineError as error:
            raise type(error)(f"{member}: {error}") from error

    def _name_of(self, key: str, model: TeamModel) -> str:
        name = model.name or self._default_name
        if name is None:
            raise ConfigError(f"models.{key}.name: missing; set it, or the variable TEACHER_MODEL_NAME")
        return name


def _server(name: str, endpoint: TeacherEndpoint, default_url: str | None, budget: Budget) -> ChatEndpoint:
    url = endpoint.url or default_url
    if url is None:
        raise ConfigError(f"endpoints.{name}.url: missing; set it, or the variable TEACHER_BASE_URL")
    return ChatEndpoint(endpoint, url, budget)


def _record(recorder: Recorder, member: str, model: str, report: CallReport) -> None:
    """The event of one request, whatever came of it."""
    estimated = report.reply is not None and not report.reply.metered
    recorder.call(
        member,
        ok=not report.fault,
        content=report.fault,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.completion_tokens,
        cost_usd=report.usd,
        seconds=report.seconds,
        meta={"model": model} | ({TOKENS: ESTIMATED} if estimated else {}),
    )


def _request(name: str, model: TeamModel, system: str, user: str) -> dict[str, Any]:
    body = {
        "model": name,
        "temperature": model.temperature,
        "max_tokens": model.max_tokens,
        **model.request,
        "messages": model.messages(system, user),
    }
    return {key: value for key, value in body.items() if value is not None}
