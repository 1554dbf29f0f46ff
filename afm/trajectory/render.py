"""Steps to text, and what a tool returned to the text of an observation."""

from __future__ import annotations

from afm.agents.spec import AgentSpec
from afm.trajectory.hygiene import neutralise
from afm.trajectory.types import Trajectory

_MIN_EDGE_CHARS = 8


def render(trajectory: Trajectory) -> str:
    """The text of a trajectory; ``parse(render(t)) == t`` and ``render(parse(text)) == text``."""
    parts = [f"{step.prefix}<{step.role}>{step.content}</{step.role}>" for step in trajectory.steps]
    return "".join(parts) + trajectory.tail


def observation_text(result_text: str, spec: AgentSpec, max_chars: int) -> str:
    """What the environment appends after a tool call, white space around the tags included.

    The result is stripped of blank edges, cut to ``max_chars`` characters (head and tail are kept, the cut is
    marked and counted within the bound) and neutralised.

    Raises:
        ValueError: The agent has no observation role.
    """
    role = spec.observation_role
    if role is None:
        raise ValueError(f"agent {spec.name!r} has no observation role; expected an agent with tools")
    content = neutralise(_cut(result_text.strip(), max_chars), spec)
    return f"\n<{role}>\n{content}\n</{role}>\n"


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_cut_mark(len(text)))
    if room < 2 * _MIN_EDGE_CHARS:
        return text[: max_chars - 1] + "…"
    head, tail = (room + 1) // 2, room // 2
    return f"{text[:head]}{_cut_mark(len(text) - room)}{text[len(text) - tail :]}"


def _cut_mark(characters: int) -> str:
    return f"\n[... {characters} characters cut ...]\n"
