"""The same agent without its tools: what it is asked as where nothing can be looked up or run."""

from __future__ import annotations

from afm.agents.spec import START, AgentSpec, RoleKind, RoleSpec

SUFFIX = "_without_tools"
"""What the name of an agent gets when its tools are taken away."""

_PROMPT = """\
Answer the question below. You have no tools here: nothing can be looked up, read or run, and no call is answered.
Work in the tagged functions listed here and in nothing else, whatever other format the question asks for.

Functions:
{roles}

Rules:
{rules}
"""
_THOUGHT_PURPOSE = "Reason about what is asked and what you know about it."


def without_tools(spec: AgentSpec) -> AgentSpec:
    """``spec`` with its thoughts and its answer alone, and a prompt that says so; an agent without tools as it is.

    Other functions go with the tools, since they plan, judge and check the use of tools. The thoughts' purpose and
    the instruction are neutral, because an agent's own may speak of its tools. The answer, its format, how the
    question is put and further rules stay, and so do the limits, with no call at all.
    """
    if not spec.tool_roles:
        return spec
    roles = {tag: _role(role) for tag, role in spec.roles.items() if _stays(role)}
    data = spec.model_dump(exclude={"roles", "transitions"}) | {
        "name": f"{spec.name}{SUFFIX}",
        "description": f"The agent {spec.name} without its tools.",
        "roles": roles,
        "transitions": {START: (spec.answer_role,)},
        "prompt": _PROMPT,
        "limits": spec.limits.model_copy(update={"max_turns": 0}),
    }
    return AgentSpec.model_validate(data)


def _stays(role: RoleSpec) -> bool:
    return role.kind in (RoleKind.THOUGHT, RoleKind.ANSWER)


def _role(role: RoleSpec) -> RoleSpec:
    if role.kind is not RoleKind.THOUGHT:
        return role
    return role.model_copy(update={"purpose": _THOUGHT_PURPOSE, "format": "Plain text."})
