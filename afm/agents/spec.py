"""The declaration of an agent: roles, what may follow what, tools, limits and prompt text.

Everything that depends on tag names is derived from an :class:`AgentSpec`: the system prompt, the
parser, the stop strings, the validator, the format verdict, the masks and the rollout loop. No other
module knows a tag name. Rules of the shipped agents: AFM paper (arXiv 2508.13167), section 3.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from afm.configuration import Settings
from afm.errors import suggestion

START = "start"
"""The pseudo role from which every trajectory begins, as a key of ``transitions``."""


class RoleKind(StrEnum):
    """What a role does in a trajectory."""

    THOUGHT = "thought"
    """Free reasoning; may precede other roles and does not count in ``transitions``."""
    TEXT = "text"
    """A function the agent writes for itself: plan, reflection, double check and so on."""
    TOOL = "tool"
    """Content is a tool's argument; the environment answers with an observation."""
    OBSERVATION = "observation"
    """Written by the environment only."""
    ANSWER = "answer"
    """Ends the trajectory."""


class AnswerFormat(StrEnum):
    """The form of the final answer inside the answer role."""

    TEXT = "text"
    BOXED = "boxed"
    FENCE = "fence"


def _is_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"{value!r} has {groups} groups, expected exactly one around the grade")
    return value


class Grade(Settings):
    """A grade that a role gives itself and what its value permits next.

    ``pattern`` has one group; every match in the content is a grade. One match in ``reject`` (letter
    case aside) rejects. Without any match, or where a list is empty, the plain transitions hold.
    """

    pattern: Annotated[str, AfterValidator(_is_pattern)]
    reject: tuple[str, ...]
    when_rejected: tuple[str, ...] = ()
    when_accepted: tuple[str, ...] = ()

    def rejects(self, content: str) -> bool | None:
        """Whether ``content`` holds a grade that rejects; ``None`` when it holds no grade at all."""
        grades = re.findall(self.pattern, content)
        if not grades:
            return None
        reject = {value.casefold() for value in self.reject}
        return any(value.casefold() in reject for value in grades)


class RoleSpec(Settings):
    """One role (tag) of an agent."""

    kind: RoleKind = RoleKind.TEXT
    """``text``, ``thought``, ``tool``, ``observation`` or ``answer``."""
    purpose: str = ""
    """What the role is for. The model reads it."""
    format: str = ""
    """How to write its content. The model reads it."""
    tool: str | None = None
    """Name of the tool that a tool role calls."""
    needs_thought: bool = False
    """Whether a thought must come directly before this role."""
    no_thought: bool = False
    """Whether a thought before this role is forbidden."""
    max_count: int | None = Field(default=None, ge=1)
    """How often the role may occur."""
    grade: Grade | None = None
    """A pattern that finds the role's grade of itself, and what a rejecting or accepting grade allows
    next."""


class Limits(Settings):
    """Bounds of one episode; ``None`` means unbounded. Tokens are counted after the prompt."""

    max_turns: int | None = Field(default=None, ge=0)
    """Tool calls per episode."""
    max_agent_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the model may sample per episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one generation, up to a tool call or the answer."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Sampled and observed tokens of an episode together."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time of the episode."""
    max_tool_seconds: float | None = Field(default=None, gt=0)
    """Time in tools, summed over all calls."""
    max_observation_chars: int = Field(default=16_000, ge=16)
    """Longest observation. The middle of a longer one is cut out."""
    duplicate_calls: Literal["notice", "execute"] = "notice"
    """What a repeated call gets: a ``notice`` that it was answered before, or a new result (``execute``)."""

    @classmethod
    def check_overrides(cls, value: dict[str, Any]) -> dict[str, Any]:
        """The same mapping, once each key is a limit and each value fits it; for pydantic's validators.

        Raises:
            ValueError: One does not.
        """
        for key in value:
            if key not in cls.model_fields:
                raise ValueError(f"a limit, but {key!r} is unknown; {suggestion(key, cls.model_fields)}")
        cls.model_validate(value)
        return value


class AgentSpec(Settings):
    """A complete agent. Load one with :func:`afm.agents.load_agent`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the agent."""
    description: str = ""
    """One line for people."""
    roles: dict[str, RoleSpec]
    """Maps each tag to its role, in the order of the prompt."""
    transitions: dict[str, tuple[str, ...]]
    """What may follow what, thoughts aside; ``start`` is the beginning. An observation always follows a
    tool. The word ``any`` in place of the table lets every role follow every other."""
    answer_format: AnswerFormat = AnswerFormat.TEXT
    """``text``, ``boxed`` or ``fence``."""
    answer_separator: str | None = None
    """Text that separates several answers."""
    prompt: str = "{roles}\n\n{rules}"
    """Instruction text with ``{roles}`` and ``{rules}``."""
    question_format: str = "Question: {question}"
    """How the question is asked."""
    rules: tuple[str, ...] = ()
    """Further rules, one per line."""
    limits: Limits = Limits()
    """Bounds of an episode: see below."""

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Name, roles and tools; :meth:`dump` has everything."""
        return [("name", self.name), ("roles", list(self.roles)), ("tools", list(self.tool_roles.values()))]

    @model_validator(mode="before")
    @classmethod
    def _in_any_order(cls, data: Any) -> Any:
        """Write out ``transitions: any``; what is wrong with the roles is found later."""
        roles = data.get("roles") if isinstance(data, dict) else None
        if not isinstance(roles, dict) or data.get("transitions") != "any":
            return data
        kinds = {tag: role.get("kind", "text") for tag, role in roles.items() if isinstance(role, dict)}
        movable = [tag for tag, kind in kinds.items() if kind in ("text", "tool", "answer")]
        sources = [START, *(tag for tag in movable if kinds[tag] != "answer")]
        return data | {"transitions": dict.fromkeys(sources, movable)}

    @model_validator(mode="after")
    def _check(self) -> AgentSpec:
        for tag in self.roles:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", tag):
                raise ValueError(f"role {tag!r}: expected lower-case letters, digits and underscores")
        if START in self.roles:
            raise ValueError(f"role {START!r} is reserved for the beginning of a trajectory")
        for kind in (RoleKind.ANSWER, RoleKind.OBSERVATION):
            tags = self._tags(kind)
            needed = kind is RoleKind.ANSWER or bool(self.tool_roles)
            if len(tags) > 1 or (needed and not tags):
                raise ValueError(f"expected exactly one role of kind {kind.value!r}, got {list(tags)}")
        for tag, role in self.roles.items():
            if (role.kind is RoleKind.TOOL) != (role.tool is not None):
                raise ValueError(f"role {tag!r}: `tool` is required for kind 'tool' and only there")
            if role.needs_thought and (role.no_thought or not self.thought_roles):
                raise ValueError(f"role {tag!r}: needs_thought needs a thought role and excludes no_thought")
        self._check_transitions()
        if "{question}" not in self.question_format:
            raise ValueError("question_format lacks the placeholder {question}")
        return self

    def _check_transitions(self) -> None:
        movable = {
            tag
            for tag, role in self.roles.items()
            if role.kind in (RoleKind.TEXT, RoleKind.TOOL, RoleKind.ANSWER)
        }
        sources = (movable - {self.answer_role}) | {START}
        if set(self.transitions) != sources:
            missing = sorted(sources - set(self.transitions))
            extra = sorted(set(self.transitions) - sources)
            raise ValueError(f"transitions: missing {missing}, not expected {extra}")
        grades = {
            f"{tag}.grade": grade.when_rejected + grade.when_accepted
            for tag, role in self.roles.items()
            if (grade := role.grade)
        }
        for source, targets in {**self.transitions, **grades}.items():
            if unknown := sorted(set(targets) - movable):
                raise ValueError(f"transitions.{source}: {unknown} cannot follow; known: {sorted(movable)}")

    def _tags(self, kind: RoleKind) -> tuple[str, ...]:
        return tuple(tag for tag, role in self.roles.items() if role.kind is kind)

    @cached_property
    def answer_role(self) -> str:
        """Tag whose closing ends the trajectory."""
        return self._tags(RoleKind.ANSWER)[0]

    @cached_property
    def observation_role(self) -> str | None:
        """Tag the environment writes, ``None`` for an agent without tools."""
        tags = self._tags(RoleKind.OBSERVATION)
        return tags[0] if tags else None

    @cached_property
    def thought_roles(self) -> tuple[str, ...]:
        """Tags of free reasoning."""
        return self._tags(RoleKind.THOUGHT)

    @cached_property
    def tool_roles(self) -> dict[str, str]:
        """Tool tag to the name of the tool it calls."""
        return {tag: role.tool for tag, role in self.roles.items() if role.tool is not None}

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts at which a generation pauses: closed tool calls, the answer, a forged observation."""
        closing = tuple(f"</{tag}>" for tag in (*self.tool_roles, self.answer_role))
        forged = (f"<{self.observation_role}>",) if self.observation_role else ()
        return closing + forged

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the declaration; equal specs have equal digests."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def allowed_next(self, role: str, content: str = "") -> tuple[str, ...]:
        """Roles that may follow ``role`` (thoughts aside), given the grade in its ``content``."""
        targets = self.transitions.get(role, ())
        grade = self.roles[role].grade if role in self.roles else None
        if grade is None:
            return targets
        rejected = grade.rejects(content)
        if rejected is None:
            return targets
        return (grade.when_rejected if rejected else grade.when_accepted) or targets

    def system_prompt(self) -> str:
        """The instruction text, with the role list and the rules filled in."""
        text = self.prompt.replace("{roles}", roles_text(self))
        return text.replace("{rules}", rules_text(self)).strip()

    def user_message(self, question: str) -> str:
        """The whole user turn: instruction, blank line, question (RL row layout of AFM)."""
        asked = self.question_format.replace("{question}", question)
        instruction = self.system_prompt()
        return f"{instruction}\n\n{asked}" if instruction else asked

    def prompt_messages(self, question: str) -> list[dict[str, str]]:
        """Chat messages for one question: ``[{"role": "user", "content": ...}]``."""
        return [{"role": "user", "content": self.user_message(question)}]

    def dump(self) -> dict[str, Any]:
        """JSON-ready form that :func:`afm.agents.load_agent` reads back."""
        return self.model_dump(mode="json", exclude_defaults=True)


def roles_text(spec: AgentSpec) -> str:
    """A numbered list of the roles: tag, purpose, format, and who writes it."""
    entries = [_role_entry(number, tag, spec) for number, tag in enumerate(spec.roles, start=1)]
    return "\n".join(entries)


def rules_text(spec: AgentSpec) -> str:
    """What may follow what, thoughts, counts, tool calls and the answer, one rule a line."""
    rules = [
        *_order_rules(spec),
        *_thought_rules(spec),
        *_count_rules(spec),
        *_writing_rules(spec),
        *_answer_rules(spec),
        *spec.rules,
    ]
    return "\n".join(f"- {rule}" for rule in rules)


def _role_entry(number: int, tag: str, spec: AgentSpec) -> str:
    role = spec.roles[tag]
    lines = [f"{number}. <{tag}>...</{tag}>"]
    if role.purpose:
        lines.append(_indented("Purpose", role.purpose))
    if role.format:
        lines.append(_indented("Format", role.format))
    if tag == spec.observation_role:
        lines.append("   Written by the environment only. Never write it yourself.")
    elif tag in spec.tool_roles:
        lines.append(f"   The environment runs it and answers in <{spec.observation_role}>.")
    return "\n".join(lines)


def _indented(title: str, text: str) -> str:
    lines = text.strip().splitlines()
    if len(lines) == 1:
        return f"   {title}: {lines[0]}"
    return "\n".join([f"   {title}:", *(f"   {line}".rstrip() for line in lines)])


def _order_rules(spec: AgentSpec) -> Iterable[str]:
    for source, targets in spec.transitions.items():
        if source not in spec.roles:
            yield f"Begin with {_either(targets)}."
            continue
        yield f"After <{source}>{_observed(source, spec)}: {_either(targets)}."
        yield from _grade_rules(source, spec.roles[source])


def _observed(tag: str, spec: AgentSpec) -> str:
    return f" and its <{spec.observation_role}>" if tag in spec.tool_roles else ""


def _grade_rules(tag: str, role: RoleSpec) -> Iterable[str]:
    if role.grade is None:
        return
    bad = " or ".join(role.grade.reject)
    if role.grade.when_rejected:
        yield f"If <{tag}> gives any grade of {bad}: {_either(role.grade.when_rejected)}."
    if role.grade.when_accepted:
        yield f"If <{tag}> gives only better grades: {_either(role.grade.when_accepted)}."


def _thought_rules(spec: AgentSpec) -> Iterable[str]:
    thought = _either(spec.thought_roles)
    needing = [tag for tag, role in spec.roles.items() if role.needs_thought]
    without = [tag for tag, role in spec.roles.items() if role.no_thought]
    if needing:
        yield f"Write one {thought} directly before every {_listed(needing)}; it does not count in the order above."
    if without:
        yield f"Write no {thought} before {_listed(without)}."


def _count_rules(spec: AgentSpec) -> Iterable[str]:
    for tag, role in spec.roles.items():
        if role.max_count is not None:
            times = "once" if role.max_count == 1 else f"{role.max_count} times"
            yield f"Write <{tag}> at most {times}."


def _writing_rules(spec: AgentSpec) -> Iterable[str]:
    yield "Write nothing outside the tags, close every tag you open, and never write a tag inside another."
    if spec.tool_roles:
        yield f"After {_either(spec.tool_roles)} stop and wait for <{spec.observation_role}>."


def _answer_rules(spec: AgentSpec) -> Iterable[str]:
    yield f"End with exactly one <{spec.answer_role}>; nothing follows it."
    if spec.answer_separator is not None:
        yield f"If the question has several answers, separate them with {spec.answer_separator!r}."


def _either(tags: Iterable[str]) -> str:
    return _joined(tags, "or")


def _listed(tags: Iterable[str]) -> str:
    return _joined(tags, "and")


def _joined(tags: Iterable[str], word: str) -> str:
    names = [f"<{tag}>" for tag in tags]
    if len(names) < 2:
        return "".join(names) or "nothing"
    return f"{', '.join(names[:-1])} {word} {names[-1]}"
