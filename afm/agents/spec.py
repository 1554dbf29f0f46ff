"""The declaration of an agent: roles, transitions, tools, limits and prompt text.

Everything that depends on tag names is derived from an :class:`AgentSpec`: the system prompt, the parser, the stop
strings, the validator, the format verdict, the masks and the rollout loop. No other module contains a tag name.
The rules of the shipped agents come from the AFM paper (arXiv 2508.13167), section 3.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from afm.configuration import Settings
from afm.errors import suggestion

START = "start"
"""The key of ``transitions`` that lists the roles with which a trajectory may begin."""


class RoleKind(StrEnum):
    """The function of a role in a trajectory."""

    THOUGHT = "thought"
    """Free reasoning. It may precede other roles and does not appear in ``transitions``."""
    TEXT = "text"
    """Text that the agent writes for itself, such as a plan, a reflection or a double check."""
    TOOL = "tool"
    """A tool call. The content is the tool's argument, and the environment answers with an observation."""
    OBSERVATION = "observation"
    """A tool's result. Only the environment writes it."""
    ANSWER = "answer"
    """The final answer. It ends the trajectory."""


class AnswerFormat(StrEnum):
    """The form of the final answer inside the answer role."""

    TEXT = "text"
    BOXED = "boxed"
    FENCE = "fence"


def _is_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"{value!r} has {groups} groups, expected exactly one around the grade")
    return value


class Grade(Settings):
    """A grade that a role gives itself, and the roles that each grade permits next.

    ``pattern`` has one group, and every match in the content is a grade. The content is rejected if one of them is in
    ``reject``, ignoring case. The plain transitions apply if the content holds no grade or the list is empty.
    """

    pattern: Annotated[str, AfterValidator(_is_pattern)]
    reject: tuple[str, ...]
    when_rejected: tuple[str, ...] = ()
    when_accepted: tuple[str, ...] = ()

    def rejects(self, content: str) -> bool | None:
        """Return whether a grade in ``content`` rejects it, or ``None`` if it holds no grade."""
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
    """A pattern that finds the grade that the role gives itself, and the roles that each grade permits next."""


class Limits(Settings):
    """Limits of one episode. ``None`` means unlimited. Tokens are counted after the prompt."""

    max_turns: int | None = Field(default=None, ge=0)
    """Tool calls per episode."""
    max_agent_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the model samples per episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one generation, up to a tool call or the answer."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Sampled and observed tokens of an episode together."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time of the episode."""
    max_tool_seconds: float | None = Field(default=None, gt=0)
    """Time in tools, summed over all calls."""
    max_observation_chars: int = Field(default=16_000, ge=16)
    """Longest observation, in characters. The middle of a longer one is removed."""
    duplicate_calls: Literal["notice", "execute"] = "notice"
    """Result of a repeated call: a ``notice`` that it was answered before, or a new result (``execute``)."""


def _check_limits(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if key not in Limits.model_fields:
            raise ValueError(f"a limit, but {key!r} is unknown; {suggestion(key, Limits.model_fields)}")
    Limits.model_validate(value)
    return value


LimitOverrides = Annotated[dict[str, Any], AfterValidator(_check_limits)]
"""Some of the limits, to replace an agent's own."""


class AgentSpec(Settings):
    """A complete agent. Load one with :func:`afm.agents.load_agent`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the agent."""
    description: str = ""
    """One line for people."""
    roles: dict[str, RoleSpec]
    """Maps each tag to its role, in the order of the prompt."""
    transitions: dict[str, tuple[str, ...]]
    """Maps each role to the roles that may follow it. ``start`` lists the first ones. Thoughts and observations do not
    appear here. ``any`` in place of the table lets every role follow every other."""
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
    """Limits of an episode, listed below."""

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Return the name, roles and tools. :meth:`dump` returns everything."""
        return [("name", self.name), ("roles", list(self.roles)), ("tools", list(self.tool_roles.values()))]

    @model_validator(mode="before")
    @classmethod
    def _in_any_order(cls, data: Any) -> Any:
        """Expand ``transitions: any``. :meth:`_check` finds faults in the roles later."""
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
            if len(tags) > 1 or (not tags and (kind is RoleKind.ANSWER or self.tool_roles)):
                raise ValueError(f"expected exactly one role of kind {kind.value!r}, got {list(tags)}")
        for tag, role in self.roles.items():
            if (role.kind is RoleKind.TOOL) != (role.tool is not None):
                got = f"kind {role.kind.value!r} and tool {role.tool!r}; write `kind: tool` and `tool: NAME`, or neither"
                raise ValueError(f"role {tag!r}: got {got}")
            if role.needs_thought and (role.no_thought or not self.thought_roles):
                raise ValueError(f"role {tag!r}: needs_thought needs a thought role and excludes no_thought")
        self._check_transitions()
        if "{question}" not in self.question_format:
            raise ValueError("question_format: the placeholder {question} is missing")
        return self

    def _check_transitions(self) -> None:
        movable = [*self._tags(RoleKind.TEXT), *self.tool_roles, self.answer_role]
        sources = [START, *movable[:-1]]
        for source in self.transitions:
            if source not in sources:
                raise ValueError(f"transitions.{source}: nothing follows it; {self._hint(source, sources)}")
        if missing := [source for source in sources if source not in self.transitions]:
            raise ValueError(f"transitions: missing {missing}, expected a list of followers for each role")
        places = {f"transitions.{source}": (source, targets) for source, targets in self.transitions.items()}
        for tag, role in self.roles.items():
            if (grade := role.grade) is not None:
                places[f"roles.{tag}.grade"] = (tag, grade.when_rejected + grade.when_accepted)
        following: dict[str, set[str]] = {}
        for place, (source, targets) in places.items():
            for target in targets:
                if target not in movable:
                    raise ValueError(f"{place}: {target!r} cannot follow; {self._hint(target, movable)}")
            following.setdefault(source, set()).update(targets)
        reached = _reachable(START, following)
        if self.answer_role not in reached:
            leading = [tag for tag in movable if self.answer_role in _reachable(tag, following)]
            raise ValueError(
                f"transitions: no path leads from {START!r} to the answer role {self.answer_role!r}; "
                f"let one of {leading} follow one of {[tag for tag in sources if tag in reached]}"
            )

    def _hint(self, tag: str, known: Iterable[str]) -> str:
        role = self.roles.get(tag)
        return f"it is of kind {role.kind.value!r}" if role else suggestion(tag, known)

    def _tags(self, kind: RoleKind) -> tuple[str, ...]:
        return tuple(tag for tag, role in self.roles.items() if role.kind is kind)

    @cached_property
    def answer_role(self) -> str:
        """The tag of the final answer. Its closing tag ends the trajectory."""
        return self._tags(RoleKind.ANSWER)[0]

    @cached_property
    def observation_role(self) -> str | None:
        """The tag that the environment writes, or ``None`` for an agent without tools."""
        tags = self._tags(RoleKind.OBSERVATION)
        return tags[0] if tags else None

    @cached_property
    def thought_roles(self) -> tuple[str, ...]:
        """The tags of free reasoning."""
        return self._tags(RoleKind.THOUGHT)

    @cached_property
    def tool_roles(self) -> dict[str, str]:
        """Maps each tool tag to the name of the tool that it calls."""
        return {tag: role.tool for tag, role in self.roles.items() if role.tool is not None}

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that stop a generation: closed tool calls, the closed answer, a forged observation."""
        closing = tuple(f"</{tag}>" for tag in (*self.tool_roles, self.answer_role))
        forged = (f"<{self.observation_role}>",) if self.observation_role else ()
        return closing + forged

    @cached_property
    def digest(self) -> str:
        """The first 16 hex digits of the declaration's SHA-256. Equal specs have equal digests."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def allowed_next(self, role: str, content: str = "") -> tuple[str, ...]:
        """Return the roles, except thoughts, that may follow ``role`` given the grade in its ``content``."""
        targets = self.transitions.get(role, ())
        grade = self.roles[role].grade if role in self.roles else None
        if grade is None:
            return targets
        rejected = grade.rejects(content)
        if rejected is None:
            return targets
        return (grade.when_rejected if rejected else grade.when_accepted) or targets

    def system_prompt(self) -> str:
        """Return the instruction text with the role list and the rules filled in."""
        text = self.prompt.replace("{roles}", roles_text(self))
        return text.replace("{rules}", rules_text(self)).strip()

    def user_message(self, question: str) -> str:
        """Return the whole user turn: instruction, blank line, question (the layout of AFM's RL rows)."""
        asked = self.question_format.replace("{question}", question)
        instruction = self.system_prompt()
        return f"{instruction}\n\n{asked}" if instruction else asked

    def prompt_messages(self, question: str) -> list[dict[str, str]]:
        """Return the chat messages for one question: ``[{"role": "user", "content": ...}]``."""
        return [{"role": "user", "content": self.user_message(question)}]

    def dump(self) -> dict[str, Any]:
        """Return a JSON-ready form that :func:`afm.agents.load_agent` reads back."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _reachable(role: str, following: Mapping[str, Iterable[str]]) -> set[str]:
    """Return ``role`` and every role that transitions lead to from it."""
    reached, open_roles = {role}, [role]
    while open_roles:
        new = set(following.get(open_roles.pop(), ())) - reached
        reached |= new
        open_roles += new
    return reached


def roles_text(spec: AgentSpec) -> str:
    """Return a numbered list of the roles with tag, purpose, format and author."""
    return "\n".join(_role_entry(number, tag, spec) for number, tag in enumerate(spec.roles, start=1))


def rules_text(spec: AgentSpec) -> str:
    """Return the rules of order, thoughts, counts, tool calls and the answer, one per line."""
    sections = (_order_rules, _thought_rules, _count_rules, _writing_rules, _answer_rules)
    rules = [*(rule for section in sections for rule in section(spec)), *spec.rules]
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
        seen = f" and its <{spec.observation_role}>" if source in spec.tool_roles else ""
        yield f"After <{source}>{seen}: {_either(targets)}."
        yield from _grade_rules(source, spec.roles[source])


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
    others = {*needing, *without, *spec.thought_roles, spec.observation_role}
    optional = [tag for tag in spec.roles if tag not in others and spec.thought_roles]
    if needing:
        yield f"Write one {thought} directly before every {_joined(needing, 'and')}; it does not count in the order above."
    if without:
        yield f"Write no {thought} before {_joined(without, 'and')}."
    if optional:
        yield f"You may write one {thought} directly before {_either(optional)}; it does not count in the order above."


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


def _joined(tags: Iterable[str], word: str) -> str:
    names = [f"<{tag}>" for tag in tags]
    several = f"{', '.join(names[:-1])} {word} {names[-1]}" if names[1:] else ""
    return several or "".join(names) or "nothing"
