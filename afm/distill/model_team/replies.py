"""What each member of a team replies: one JSON object, read leniently and checked strictly."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

ReplyT = TypeVar("ReplyT", bound="Reply")

_MOST_BRACES = 200
_SHOWN = 160


class Grade(StrEnum):
    """A reflection's grade of one criterion."""

    GOOD = "good"
    AVERAGE = "average"
    POOR = "poor"


def _lowered(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _stepped(value: Any) -> Any:
    return {"goal": value} if isinstance(value, str) else value


class Reply(BaseModel):
    """Any member's. ``thought`` is what it considered before it acted."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    thought: str = ""


class SubTask(BaseModel):
    """One step of a plan: what to find out or compute, and which tool agent does it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    goal: str = Field(min_length=1)
    agent: str = ""


class Plan(Reply):
    """The planner's: sub-tasks in order."""

    steps: list[Annotated[SubTask, BeforeValidator(_stepped)]] = Field(min_length=1)


class Action(Reply):
    """A tool agent's: a tool call, or what it found when it needs none (any more)."""

    tool: str = ""
    argument: str = ""
    finding: str = ""

    @model_validator(mode="after")
    def _check(self) -> Action:
        if not self.finding.strip() and not self.argument.strip():
            raise ValueError("expected either `tool` with `argument`, or `finding`")
        return self

    @property
    def calls(self) -> bool:
        """Whether it is a tool call."""
        return bool(self.argument.strip())


class Judged(BaseModel):
    """One criterion's grade and why."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    grade: Annotated[Grade, BeforeValidator(_lowered)]
    why: str = ""


class Reflection(Reply):
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
        return any(judged.grade is Grade.POOR for judged in grades)


class Suggestion(Reply):
    """The writer's: a final answer, and the facts that it rests on."""

    answer: str = Field(min_length=1)
    facts: str = ""


class Check(Reply):
    """The verifier's: what was tested, a score from 1 (wrong) to 4 (certain), and what follows from it."""

    findings: str = Field(min_length=1)
    score: int = Field(ge=1, le=4)
    conclusion: str = ""


def read_reply_as(kind: type[ReplyT], text: str) -> ReplyT:
    """The first JSON object in ``text`` that is such a reply; what stands around it (reasoning, a fence) is passed over.

    Raises:
        ValueError: There is none; the message says what is wrong with the last object found.
    """
    problem, place = "it holds no JSON object", -1
    decoder = json.JSONDecoder(strict=False)
    for _ in range(_MOST_BRACES):
        place = text.find("{", place + 1)
        if place < 0:
            break
        try:
            data, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            problem = "its JSON object is not complete or not valid"
            continue
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            problem = _explained(error)
            place = end - 1
    raise ValueError(problem)


def _explained(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"])) or "the object"
    return f"{key}: {first['msg'].removeprefix('Value error, ')}"[:_SHOWN]
