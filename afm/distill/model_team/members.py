"""Members of a team: prompts (templates), replies (JSON, read leniently, checked strictly) and calls of their models."""

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
from afm.distill.event_log import ESTIMATED, TOKENS, Recorder
from afm.distill.model_team.settings import TeacherEndpoint, TeacherSettings, TeamModel
from afm.endpoints.budget import Budget
from afm.endpoints.chat import CallReport, ChatEndpoint, objects_in, without_reasoning
from afm.errors import BudgetSpentError, ConfigError, EngineError, first_fault
from afm.settings import load_settings

if TYPE_CHECKING:
    from jinja2 import Environment

_SHIPPED = Path(__file__).parent / "prompts"
_FENCED = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)


def digest_of(content: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> str:
    """Return a digest of everything that the members' work depends on: settings and templates."""
    whole = {**content, "prompts": {name: prompt.file.model_dump() for name, prompt in prompts.items()}}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]


class PromptFile(Settings):
    """A YAML of Jinja templates for the system message, the user message, and the member's message from its reply."""

    system: str
    user: str
    says: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A member's templates. Errors in them name ``label``."""

    label: str
    file: PromptFile

    def fill(self, part: str, view: Mapping[str, Any]) -> str:
        """Return the text of ``system``, ``user`` or ``says``."""
        return filled(getattr(self.file, part), view, f"{self.label}: {part}").strip()


def read_prompt(name: str, path: Path | None = None, says: str | None = None) -> Prompt:
    """Read the templates in ``path``, or the shipped ones called ``name``. ``says`` replaces their template of that name.

    Raises:
        ConfigError: The file is missing, has an unknown key, or holds an invalid template.
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
    """Render a template.

    Raises:
        ConfigError: The template is invalid, or uses an unknown name.
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
        raise ConfigError(f"{where}: invalid template: {error}") from None


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
    """Return the content of a text that is a single code fence. Any other text is stripped of surrounding whitespace."""
    fence = _FENCED.fullmatch(text)
    return fence[1] if fence else text.strip()


ReplyT = TypeVar("ReplyT", bound="MemberReply")

_SHOWN = 160


class ReflectionGrade(StrEnum):
    """Grade of one criterion of a reflection."""

    GOOD = "good"
    AVERAGE = "average"
    POOR = "poor"


def _lowered(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _stepped(value: Any) -> Any:
    return {"goal": value} if isinstance(value, str) else value


class Lenient(BaseModel):
    """A part of a reply. Unknown keys are ignored, numbers become text, and ``null`` counts as missing for optional values."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {key: value for key, value in data.items() if value is not None or key in needed}


class MemberReply(Lenient):
    """A reply of any member. ``thought`` is its reasoning before it acts."""

    thought: str = ""


class SubTask(Lenient):
    """One step of a plan: a goal, and the tool agent that works on it."""

    goal: str = Field(min_length=1)
    agent: str = ""


class PlanReply(MemberReply):
    """The planner's reply: sub-tasks in order."""

    steps: list[Annotated[SubTask, BeforeValidator(_stepped)]] = Field(min_length=1)


class ToolAgentReply(MemberReply):
    """A tool agent's reply: a tool call, or its finding once it needs no more tools."""

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
        """Whether the reply is a tool call."""
        return bool(self.argument.strip())


class Judged(Lenient):
    """Grade of one criterion, with the reason."""

    grade: Annotated[ReflectionGrade, BeforeValidator(_lowered)]
    why: str = ""


class Reflection(MemberReply):
    """The reflector's reply: three criteria (AFM, arXiv 2508.13167, section 3), advice, and whether to answer now."""

    information_conflict: Judged
    tool_effectiveness: Judged
    trajectory_monitoring: Judged
    advice: str = ""
    ready: bool = False

    @property
    def poor(self) -> bool:
        """Whether any criterion is poor, so that the team needs a new plan."""
        grades = (self.information_conflict, self.tool_effectiveness, self.trajectory_monitoring)
        return any(judged.grade is ReflectionGrade.POOR for judged in grades)


class Suggestion(MemberReply):
    """The writer's reply: a final answer, and the facts that support it."""

    answer: str = Field(min_length=1)
    facts: str = ""


class Check(MemberReply):
    """The verifier's reply: findings, a score from 1 (wrong) to 4 (certain), and a conclusion."""

    findings: str = Field(min_length=1)
    score: int = Field(ge=1, le=4)
    conclusion: str = ""


def read_reply_as(kind: type[ReplyT], text: str) -> ReplyT:
    """Return the JSON object in ``text`` that is a reply. Anything around it (words, a fence) is skipped.

    Objects within reasoning (``<think>...</think>``, or everything before a single ``</think>``) are ignored. Of several
    objects a tool call takes precedence. The model made up what follows it, instead of waiting for the tool.

    Raises:
        ValueError: There is no reply, or several replies that differ. The message explains what is wrong with the last
            object, or that the reasoning is not finished.
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
            problem = first_fault(error)[:_SHOWN]
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
"""Returns what is wrong with a well-formed reply. Empty if nothing is wrong."""


class NoUsableReplyError(EngineError):
    """A member's model gave no usable reply in all attempts."""


class MemberVoices(ABC):
    """Asks a team's members, and asks again if a reply cannot be used.

    Args:
        prompts: The templates of each member.
        asks: Maximum number of requests to a member for one usable reply.
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
        """Return a member's reply of the given kind. The member is asked again if the reply cannot be used.

        Args:
            view: Names for the member's templates.
            problem: Returns what makes a well-formed reply useless. The member reads the text.

        Raises:
            NoUsableReplyError: No attempt gave a usable reply.
            EngineError: The server failed permanently.
            BudgetSpentError: The budget of the run is spent.
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
        """Return the reply of a member's model."""


class MemberModels(MemberVoices):
    """Members whose models run on servers. Respects rates and budget, retries failed requests and logs every request.

    Raises:
        ConfigError: Neither the file nor the environment has the address of an endpoint or the name of a model.
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
    """Log one request, whether it succeeded or failed."""
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
