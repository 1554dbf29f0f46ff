"""Recognition of tool calls in a model's text: in the form of its agent, and in other known forms."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.trajectory.tags import ANY_TAG, Segment, split

_TOKEN = re.compile(r"<[|｜][^<>|｜\s]*(?:tool|function|python_tag)[^<>|｜\s]*[|｜]>|\[TOOL_CALLS\]")
_REACT = re.compile(
    r"^[ \t]*\**Action(?:[ \t]*\d+)?\**[ \t]*:\**[ \t]*"
    r"(?:(?!Finish\[)(?P<tool>\w[\w .-]{0,80})\[[^\n]*\]\**[ \t]*$"
    r"|(?P<name>\S[^\n]{0,200}?)\**[ \t]*\n\s*\**Action[ \t]*Input(?:[ \t]*\d+)?\**[ \t]*:)",
    re.MULTILINE,
)
"""``Action 1: Search[x]`` and ``Action:`` with ``Action Input:``, bold or not. ReAct's ``Finish[x]`` is an answer."""
_STRING = r'"(?:[^"\\\n]|\\.){0,400}"'
_GIVEN = r'"(?:arguments|parameters|action_input)"\s*:\s*'
_NAMED = r'"(?:name|action)"\s*:\s*"(?P<{}>[^"\n]{{1,200}})"'
_JSON = re.compile(
    rf'{_NAMED.format("name")}\s*,(?:[^{{}}"]|{_STRING}){{0,60}}?{_GIVEN}["{{]'
    rf'|{_GIVEN}(?:{_STRING}|\{{[^{{}}]{{0,400}}\}})\s*,(?:[^{{}}"]|{_STRING}){{0,60}}?{_NAMED.format("last")}'
)
"""An object with a name and arguments in either order, with other keys between them."""
_REACH = 400
_NAME_ATTRIBUTE = re.compile(r"""\bname\s*=\s*["']?([\w.-]+)|^\s*=\s*["']?([\w.-]+)""")
_CONTAINERS = frozenset(("tool_call", "tool_calls", "tool_use", "function_call", "function_calls"))
"""Tags around a call in formats of other models, with the tool's name inside."""
_HTML = frozenset(
    re.findall(
        r"\w+",
        "a abbr article aside b bdi bdo blockquote body br button caption center cite col colgroup dd del details dfn div "
        "dl dt em figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins kbd "
        "label li link main mark math meta nav ol option p path pre q rp rt ruby s samp script section select small span "
        "strike strong style sub summary sup svg table tbody td textarea tfoot th thead time title tr tt u ul var video",
    )
)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One tool call in a response. ``name`` is the tag or the tool's name as written, empty if the form has no name."""

    name: str
    offered: bool
    """Whether the tool is one of the agent's."""


def written_calls(
    segments: Sequence[Segment], spec: AgentSpec, *, original: AgentSpec | None = None
) -> tuple[WrittenCall, ...]:
    """Return everything in a response that is a tool call or looks like one, in the order of the text.

    The inside of a closed role is content, so a tag in a thought is not a call. Outside of closed roles, these look like
    calls:

    - a tool tag of any shipped agent, or a tag that other models write around calls;
    - any other closed tag, except HTML and text roles of known agents;
    - the tokens of chat templates;
    - ReAct's ``Action:`` with ``Action Input:``, or ``Action: tool[input]``;
    - JSON with ``name`` and ``arguments``.

    Args:
        original: The agent from which the tools of ``spec`` were removed. Its tags are known too.
    """
    known = _Known.of(spec, original)
    parts = split("".join(segment.text for segment in segments), spec)
    calls: list[WrittenCall] = []
    for step in parts.steps:
        calls += _calls_in(step.prefix, known)
        if step.role in spec.tool_roles:
            calls.append(WrittenCall(step.role, offered=True))
    if parts.open_role not in spec.tool_roles:
        calls += _calls_in(parts.tail, known)
    return tuple(calls)


@dataclass(frozen=True, slots=True)
class _Known:
    """The names of tools and text roles of an agent and of the shipped agents."""

    offered: frozenset[str]
    tools: frozenset[str]
    text: frozenset[str]

    @classmethod
    def of(cls, spec: AgentSpec, original: AgentSpec | None) -> _Known:
        tools, text = _shipped_names()
        for agent in (original, spec):  # the agent's own declaration takes precedence
            if agent is not None:
                own_tools, own_text = _names(agent)
                tools, text = (tools - own_text) | own_tools, (text - own_tools) | own_text
        return cls(_names(spec)[0], tools, text)


@lru_cache(maxsize=1)
def _shipped_names() -> tuple[frozenset[str], frozenset[str]]:
    names = [_names(load_agent(name)) for name in shipped_agents()]
    tools = frozenset[str]().union(*(own for own, _ in names))
    return tools, frozenset[str]().union(*(text for _, text in names)) - tools


def _names(spec: AgentSpec) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tags and names of an agent's tools, and its other tags."""
    tags = frozenset(spec.tool_roles)
    return tags | frozenset(spec.tool_roles.values()), frozenset(spec.roles) - tags


def _calls_in(text: str, known: _Known) -> Iterator[WrittenCall]:
    """Yield the calls in text outside of closed roles. A form inside another is the same call."""
    if not text or text.isspace():
        return
    forms = sorted((*_tags(text, known), *_other_forms(text)), key=lambda form: (form[0].start(), -form[1]))
    done = -1
    for begun, end in forms:
        if begun.start() >= done:
            name = _name(text, begun, end, known)
            yield WrittenCall(name, offered=name in known.offered)
            done = end


def _other_forms(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield every call that is not a tag, and its end."""
    for token in _TOKEN.finditer(text):
        inner = _JSON.search(text, token.end(), token.end() + _REACH)
        yield token, inner.end() if inner else token.end()
    for pattern in (_REACT, _JSON):
        for form in pattern.finditer(text):
            yield form, form.end()


def _tags(text: str, known: _Known) -> Iterator[tuple[re.Match[str], int]]:
    """Yield every tag that looks like a call, and its end at the first closing tag."""
    tags = list(ANY_TAG.finditer(text))
    closings: defaultdict[str, list[int]] = defaultdict(list)
    for tag in tags:
        if tag[1]:
            closings[tag[2]].append(tag.end())
    for tag in tags:
        name = tag[2].lower()
        if tag[1] or name in known.text:
            continue
        ends = closings.get(tag[2], [])
        index = bisect_right(ends, tag.end())
        closed = index < len(ends)
        if name in known.tools or name in _CONTAINERS or (name not in _HTML and (closed or tag[4])):
            yield tag, ends[index] if closed and not tag[4] else tag.end()


def _name(text: str, begun: re.Match[str], end: int, known: _Known) -> str:
    """Return the name of the tool that a form calls, if it has one."""
    if begun.re in (_REACT, _JSON):
        return _named(begun)
    inner = _JSON.search(text, begun.end(), end)
    if begun.re is _TOKEN:
        return _named(inner) if inner else ""
    if begun[2].lower() in known.tools:
        return begun[2].lower()
    tags = (begun, *ANY_TAG.finditer(text, begun.end(), end))
    attribute = next(filter(None, (_NAME_ATTRIBUTE.search(tag[3]) for tag in tags)), None)
    if attribute:
        return attribute[1] or attribute[2]
    return _named(inner) if inner else begun[2]


def _named(form: re.Match[str]) -> str:
    """Return the name in a text form, whose alternatives have a group each."""
    return next(name for name in form.groups() if name is not None).strip()
