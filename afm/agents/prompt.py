"""The role list and the rules of an agent in plain words, generated from its declaration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afm.agents.spec import AgentSpec, RoleSpec


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
