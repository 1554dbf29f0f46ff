"""Untrusted text of tools as an observation: neutralised, shortened, and in its tags."""

from __future__ import annotations

import re
from functools import lru_cache

from afm.agents.spec import AgentSpec
from afm.terminal import ESCAPE
from afm.trajectory.tags import Trajectory

_LINE_END = re.compile(r"\r\n?|[\x0b\x0c\u2028\u2029]")
# Control characters except tab and line feed, characters without width, changes of the writing direction, annotation
# marks, and "tag" characters and supplementary selectors, which can hide whole sentences.
_HIDDEN = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Joiners and variation selectors serve emoji and some scripts. Inside words of Latin letters they only hide text.
_JOINER = re.compile(
    r"(?<=[!-~\uff01-\uff5e])"
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u200c\u200d\u3164\ufe00-\ufe0f\uffa0]+"
    r"(?=[!-~\uff01-\uff5e])"
)
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NOT_PLAIN = re.compile(r"[^\t\n -~]")
"""If it matches nothing, none of the patterns above matches."""
_OPENING, _CLOSING = "<＜﹤‹〈⟨", ">＞﹥›〉⟩"
_OPEN, _CLOSE = f"[{_OPENING}]", f"[{_CLOSING}]"
_TEMPLATE_TOKEN = rf"{_OPEN}([|｜][^<>\s]{{1,64}}[|｜]){_CLOSE}"
_INSTRUCTION = r"\[(/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS))\]"
_TEMPLATE_TAGS = (
    *("s", "bos", "eos", "pad", "unk", "start_of_turn", "end_of_turn", "sys", "system", "user", "assistant"),
    *(
        "tools",
        "tool_call",
        "tool_calls",
        "tool_response",
        "function_call",
        "function_calls",
        "function_results",
    ),
    *("think", "image", "video", "audio"),
)
"""Tags with a meaning in chat templates and trainers of common models, independent of the agent's roles."""
_MOST_NESTED = 20
"""Depth of nested tags from which a text loses all its opening brackets."""


def readable(text: str) -> str:
    """Return ``text`` without terminal sequences, control characters and hidden characters.

    Line ends become line feeds, and lone surrogates U+FFFD. The result is never longer than ``text``.
    """
    if _NOT_PLAIN.search(text) is None:
        return text
    text = _LINE_END.sub("\n", ESCAPE.sub("", text))
    text = _JOINER.sub("", _HIDDEN.sub("", text))
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """Return ``text`` with U+FFFD for each lone surrogate, which JSON can express but UTF-8 cannot encode."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def neutralise(text: str, spec: AgentSpec | None = None) -> str:
    """Return untrusted text that cannot open or close a role of ``spec``.

    ``<role>`` becomes ``[role]``, in upper or lower case, with blanks or attributes inside, in full-width letters, and
    with brackets that only look like ``<``. Tokens and tags of chat templates, such as ``<|im_end|>``, change in the same
    way. :func:`readable` removes hidden characters first. The result is never longer than ``text``.
    """
    text = readable(text)
    if text.isascii() and "<" not in text and "[" not in text:
        return text
    untrusted = _untrusted(() if spec is None else tuple(spec.roles))
    for _ in range(_MOST_NESTED):  # once the inner one of two nested tags is gone, the outer one is a tag
        before, text = text, untrusted.sub(_bracketed, text)
        if text == before:
            return text
    return re.sub(_OPEN, "(", text)


@lru_cache(maxsize=64)
def _untrusted(roles: tuple[str, ...]) -> re.Pattern[str]:
    names = sorted({*roles, *_TEMPLATE_TAGS}, key=lambda name: (-len(name), name))
    name = "|".join("".join(map(_either_width, word)) for word in names)
    attributes = rf"\s[^{_OPENING}{_CLOSING}]*"  # without brackets, which keeps matching linear
    tag = rf"{_OPEN}(\s{{0,8}}[\\/／]{{0,2}}\s{{0,8}}(?:{name})(?:{attributes})?[/／]?){_CLOSE}"
    return re.compile(f"{tag}|{_TEMPLATE_TOKEN}|{_INSTRUCTION}", re.IGNORECASE)


def _either_width(letter: str) -> str:
    """Return a pattern that matches an ASCII letter or its full-width form."""
    return f"[{re.escape(letter)}{chr(ord(letter) + 0xFEE0)}]" if "!" <= letter <= "~" else re.escape(letter)


def _bracketed(match: re.Match[str]) -> str:
    if match[3]:
        return f"({match[3]})"
    return f"[{match[1] or match[2]}]"


_MIN_EDGE_CHARS = 8


def render(trajectory: Trajectory) -> str:
    """Return the text of a trajectory: ``parse(render(t)) == t`` and ``render(parse(text)) == text``."""
    parts = [f"{step.prefix}<{step.role}>{step.content}</{step.role}>" for step in trajectory.steps]
    return "".join(parts) + trajectory.tail


def observation_content(result_text: str, spec: AgentSpec, max_chars: int) -> str:
    """Return the content of an observation for a tool's result, without tags.

    The result is stripped, shortened to ``max_chars`` characters and neutralised. Shortening keeps head and tail, and
    the mark of the cut counts towards ``max_chars``.
    """
    return neutralise(_cut(result_text.strip(), max_chars), spec)


def tagged_observation(content: str, spec: AgentSpec) -> str:
    """Return the text that the environment appends: ``content`` between tags on separate lines.

    Raises:
        ValueError: The agent has no observation role.
    """
    role = spec.observation_role
    if role is None:
        raise ValueError(f"agent {spec.name!r} has no observation role; expected an agent with tools")
    return f"\n<{role}>\n{content}\n</{role}>\n"


def observation_text(result_text: str, spec: AgentSpec, max_chars: int) -> str:
    """Return the text that the environment appends after a tool call: :func:`observation_content` in its tags."""
    return tagged_observation(observation_content(result_text, spec, max_chars), spec)


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
