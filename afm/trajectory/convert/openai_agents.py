"""Reading of traces of the OpenAI Agents SDK, as its exporters write them: one ``trace`` or ``trace.span`` per row.

Spans of one trace may be anywhere in the file. Text comes from ``generation`` and ``response`` spans, results of tools
from ``function`` spans. ``ResponseSpanData.export()`` of the SDK (0.24.0) writes only the id of a response. A trace
processor of the user's own can add the span's ``input`` and ``response``. Without them a trace is refused.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from afm.errors import DataError
from afm.trajectory.chat import called_function, chat_of_items, content_text, hidden_reasoning
from afm.trajectory.convert.base import DialogueFormat, Item
from afm.trajectory.convert.dialogue import AgentTurn, Dialogue, Use, Walk, second_question
from afm.trajectory.record import Cost, StopReason

_NO_WORDS = (
    "`response` spans hold no text. Write `json.dumps(result.to_input_list())` of each run to a line, and convert that file "
    "with --from messages; or let your trace processor add `input` and `response` to the span_data"
)


def _gathered(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the spans of each trace. All spans of the file are in memory."""
    lines: dict[str, int] = {}
    spans: defaultdict[str, list[Any]] = defaultdict(list)
    for line, row in items:
        if isinstance(row, DataError) or not isinstance(row, dict):
            yield line, row
            continue
        parts = row["data"] if isinstance(row.get("data"), list) else [row]  # as they are sent to the server
        for part in parts:
            if not isinstance(part, dict):
                yield line, part
                continue
            name = str(part.get("trace_id") or part.get("id"))
            lines.setdefault(name, line)
            spans[name].append(part)
    for name, line in lines.items():
        yield line, spans[name]


def _parse(row: Any) -> Dialogue:
    if not isinstance(row, list):
        raise DataError("expected the spans of a trace")
    spans = [span for span in row if isinstance(span.get("span_data"), dict)]
    spans.sort(key=lambda span: str(span.get("started_at") or ""))
    kinds = {span["span_data"].get("type") for span in spans}
    if not kinds & {"generation", "response"}:
        raise DataError("the trace has no generation span and no response span")
    walk = _SpanWalk({str(span.get("id")): span for span in spans})
    for number, span in enumerate(spans):
        try:
            walk.take(span)
        except DataError as error:
            raise DataError(f"span {span.get('id') or number}: {error.message}") from None
    trace: dict[str, Any] = next((part for part in row if part.get("object") == "trace"), {})
    identity = str(trace.get("id") or spans[0].get("trace_id") or "")
    facts: dict[str, Any] = {"id": identity, "model": walk.model}
    if walk.cost != Cost():
        facts["cost"] = walk.cost
    if walk.failure:
        stop = StopReason.TURNS if walk.failure == "Max turns exceeded" else StopReason.ERROR
        facts |= {"kept": False, "stop": stop, "reason": f"openai_agents: the run failed: {walk.failure}"}
    return walk.dialogue("no generation was asked by a user", facts)


OPENAI_AGENTS = DialogueFormat(
    "openai_agents",
    lambda row: (
        isinstance(row, dict) and (row.get("object") in ("trace", "trace.span") or "span_data" in row)
    ),
    parse=_parse,
    show=None,
    gathered=_gathered,
)
"""A trace becomes one trajectory with the texts and calls of all its agents in order of time."""


class _SpanWalk(Walk):
    """A trace while it is read."""

    def __init__(self, spans: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.model = ""
        self.cost = Cost()
        self.failure = ""
        self._spans = spans
        self._asked: list[str] = []

    def take(self, span: Mapping[str, Any]) -> None:
        data = span["span_data"]
        kind, above = data.get("type"), self._above(span)
        inner = "function" in above
        if "guardrail" in above:  # its agent is asked about the conversation and takes no part in it
            return
        if kind == "agent" and not inner and isinstance(error := span.get("error"), Mapping):
            self.failure = str(error.get("message"))
        elif kind == "generation":
            self._generation(data, inner=inner)
        elif kind == "response" and isinstance(data.get("response"), dict):
            self._generation(_generation_of(data), inner=inner)
        elif kind == "response" and not (inner or span.get("error")):
            raise DataError(_NO_WORDS)
        elif kind == "function":
            self._function(data, failed=bool(span.get("error")))
        elif kind in ("handoff", "guardrail", "response"):
            self.lost.append(f"{kind} spans")

    def _above(self, span: Mapping[str, Any]) -> set[Any]:
        """The kinds of all spans above: below a function is an agent that another one called as its tool, and asks something else."""
        seen: set[str] = set()
        above = str(span.get("parent_id"))
        while above in self._spans and above not in seen:
            seen.add(above)
            above = str(self._spans[above].get("parent_id"))
        return {self._spans[name]["span_data"].get("type") for name in seen}

    def _generation(self, data: Mapping[str, Any], *, inner: bool) -> None:
        said = data.get("output") if isinstance(data.get("output"), list) else []
        self.model = self.model or str(data.get("model") or "")
        self._count(data.get("usage"))
        if not inner:
            self._ask(data.get("input"))
        for message in said or ():
            if message.get("role", "assistant") != "assistant":
                continue
            calls = [called_function(call) for call in message.get("tool_calls") or ()]
            text = content_text(message) if message.get("content") else ""
            uses = tuple(Use(call["name"], call["arguments"]) for call in calls)
            self.turns.append(AgentTurn(text, uses, thought=hidden_reasoning(message)))

    def _ask(self, messages: Any) -> None:
        """Take the question out of the first input; later ones, which repeat it, may ask nothing else.

        Raises:
            DataError: They do, or something was said before the question.
        """
        listed = messages if isinstance(messages, list) else []
        sent = [message for message in listed if isinstance(message, Mapping)]
        asked = [content_text(message) for message in sent if message.get("role") == "user"]
        if self.question is not None:
            if asked and asked != self._asked:
                raise second_question(next((text for text in asked if text not in self._asked), asked[-1]))
            return
        if any(message.get("role") in ("system", "developer") for message in sent):
            self.lost.append("the system prompt")
        before = [message for message in sent if message.get("role") in ("assistant", "tool")]
        if before:
            raise DataError(
                f"the first generation was sent earlier messages of the assistant and its tools ({len(before)}), which no span holds; "
                "expected only a question. Make one row per question, and put the earlier messages into its text"
            )
        self._asked, self.question = asked, "\n\n".join(asked) or None

    def _count(self, usage: Any) -> None:
        tokens = usage if isinstance(usage, dict) else {}
        prompt = self.cost.prompt_tokens + (tokens.get("input_tokens") or 0)
        completion = self.cost.agent_tokens + (tokens.get("output_tokens") or 0)
        self.cost = Cost(prompt_tokens=prompt, agent_tokens=completion)

    def _function(self, data: Mapping[str, Any], *, failed: bool) -> None:
        """Give a result to the first call of that name and input without a result. A span without an input fits any input.

        Raises:
            DataError: No call of that name has that input: the framework changed it.
        """
        name, argument, result = str(data.get("name")), data.get("input"), data.get("output")
        if result is None:
            return
        waiting = {
            (place, number): use
            for place, turn in enumerate(self.turns)
            for number, use in enumerate(turn.uses)
            if use.result is None and use.tool == name
        }
        if not waiting:
            self.lost.append(f"a result of {name} that no generation asked for")
            return
        same = [
            place for place, use in waiting.items() if argument is None or use.arguments == _decoded(argument)
        ]
        if not same:
            raise DataError(
                f"{name} ran with {str(argument)[:80]!r}, which no generation asked for; its result belongs to no call"
            )
        self.give(*same[0], str(result), ok=not failed)


def _generation_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a response span, with items of the Responses API, in the form of a generation span."""
    response, asked = data["response"], data.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    rules = [{"role": "system", "content": text}] if (text := response.get("instructions")) else []
    return {
        "input": [*rules, *chat_of_items(asked or [])],
        "output": chat_of_items(response.get("output") or []),
        "model": response.get("model"),
        "usage": data.get("usage") or response.get("usage"),
    }


def _decoded(argument: Any) -> Any:
    try:
        return json.loads(argument) if isinstance(argument, str) else argument
    except (ValueError, RecursionError):
        return argument
