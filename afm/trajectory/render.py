"""Steps to text, and untrusted text made harmless before it enters a trajectory."""

from __future__ import annotations

import re
from functools import lru_cache

from afm.agents.spec import AgentSpec
from afm.trajectory.types import Trajectory

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TEMPLATE_TOKEN = r"<([|｜][^<>\s]{1,64}[|｜])>"
_MIN_EDGE_CHARS = 8


def render(trajectory: Trajectory) -> str:
    """The text of a trajectory; ``parse(render(t)) == t`` and ``render(parse(text)) == text``."""
    parts = [f"{step.prefix}<{step.role}>{step.content}</{step.role}>" for step in trajectory.steps]
    return "".join(parts) + trajectory.tail


def neutralise(text: str, spec: AgentSpec) -> str:
    """Make untrusted text unable to open or close a role, however it is written around.

    ``<role>`` becomes ``[role]``, in any letter case and with blanks inside, and so do chat template
    tokens such as ``<|im_end|>``. Terminal sequences and control characters other than line feed and
    tab are removed, carriage returns become line feeds, lone surrogates are replaced. The result is never longer than ``text``.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", _ANSI.sub("", text))
    text = _LONE_SURROGATE.sub("\ufffd", text)
    return _untrusted_tag(tuple(spec.roles)).sub(_bracketed, text)


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


@lru_cache(maxsize=64)
def _untrusted_tag(roles: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(roles)
    return re.compile(
        rf"<([^\S\n]{{0,8}}/?[^\S\n]{{0,8}}(?:{names})[^\S\n]{{0,8}})>|{_TEMPLATE_TOKEN}", re.IGNORECASE
    )


def _bracketed(match: re.Match[str]) -> str:
    return f"[{match[1] or match[2]}]"


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
