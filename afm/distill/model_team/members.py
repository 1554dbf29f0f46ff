"""What each member of a team is told (templates), what it replies (one JSON object, read leniently, checked strictly), and what the team remembers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from afm.configuration import Settings, read_file, validated
from afm.distill.event_log import explain
from afm.endpoints.chat import objects_in, without_reasoning
from afm.errors import ConfigError
from afm.trajectory.programs import call_form

if TYPE_CHECKING:
    from jinja2 import Environment

_SHIPPED = Path(__file__).parent / "prompts"
_FENCED = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)


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

    def system(self, view: Mapping[str, Any]) -> str:
        """The system message."""
        return filled(self.file.system, view, f"{self.label}: system").strip()

    def user(self, view: Mapping[str, Any]) -> str:
        """The user's message."""
        return filled(self.file.user, view, f"{self.label}: user").strip()

    def says(self, view: Mapping[str, Any]) -> str:
        """The member's message in the trajectory."""
        return filled(self.file.says, view, f"{self.label}: says").strip()


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
    """A tool agent's: a tool call, or what it found when it needs none (any more)."""

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
    """The JSON object in ``text`` that is such a reply; what stands around it (words, a fence) is passed over.

    Reasoning (``<think>...</think>``, or all before a ``</think>`` alone) is no reply, whatever objects it holds. Of several
    objects a tool call comes first: what follows it, the model made up instead of waiting for the tool.

    Raises:
        ValueError: There is none; the message says what is wrong with the last object, or that the reasoning is not finished.
            Or there are several that differ, and nobody knows which is meant.
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
    if (
        call := next(
            (candidate for candidate in replies if isinstance(candidate, ToolAgentReply) and candidate.calls),
            None,
        )
    ) is not None:
        return call
    if any(candidate != replies[0] for candidate in replies):
        raise ValueError(f"it holds {len(replies)} JSON objects that differ; expected the reply alone")
    return replies[0]


_CUT = "\n[... {count} characters left out ...]\n"


@dataclass(frozen=True, slots=True)
class SubTaskFinding:
    """What came of a sub-task, as the members see it."""

    goal: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returned, as the members see it."""

    tool: str
    argument: str
    text: str


@dataclass(slots=True)
class Memory:
    """One task's.

    What every member sees is made from this anew each time (:meth:`view`): the finished sub-tasks in a line each and the
    last results whole. Earlier results are there as what was found in them, earlier calls by their arguments, so that
    no text stands in a request twice.

    Attributes:
        shown_results: How many of the last results are shown whole.
        plan: Sub-tasks of the current plan.
        done: How many of them are finished.
        criticism: What was wrong since the last plan.
        refused: Suggested answers that the verifier refused.
    """

    question: str
    shown_results: int
    plan: tuple[SubTask, ...] = ()
    done: int = 0
    findings: list[SubTaskFinding] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    criticism: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def start(self, plan: tuple[SubTask, ...]) -> None:
        """Work by a new plan; what was wrong before is dealt with."""
        self.plan, self.done = plan, 0
        self.criticism.clear()

    def called(self, tool: str, argument: str) -> bool:
        """Whether this call was made already: blanks and letter case aside, but for programs."""
        wanted = (tool, call_form(tool, argument))
        return any((result.tool, call_form(tool, result.argument)) == wanted for result in self.results)

    def note(self, goal: str, text: str) -> None:
        """Note what came of a sub-task; the same one twice counts once, with its last result."""
        self.findings = [finding for finding in self.findings if finding.goal != goal]
        self.findings.append(SubTaskFinding(goal, text))

    def view(self) -> dict[str, Any]:
        """Names for the templates."""
        recent = self.results[-self.shown_results :]
        return {
            "question": self.question,
            "plan": self.plan,
            "done": self.done,
            "findings": tuple(self.findings),
            "results": tuple(recent),
            "calls": tuple(self.results[: len(self.results) - len(recent)]),
            "criticism": tuple(dict.fromkeys(self.criticism)),
            "refused": tuple(dict.fromkeys(self.refused)),
        }


def shortened(text: str, most: int) -> str:
    """``text`` without its middle when it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return f"{text[:half]}{_CUT.format(count=len(text) - 2 * half)}{text[-half:]}"
