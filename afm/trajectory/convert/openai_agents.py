"""Traces of the OpenAI Agents SDK, as its exporters write them: one ``trace`` or ``trace.span`` object a row. Read only.

Spans of one trace may stand anywhere in the file. Words come from ``generation`` spans, results of tools from ``function`` spans;
``response`` spans hold no words, so a trace that has nothing else is refused.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from afm.errors import DataError
from afm.trajectory.chat import called_function, content_text
from afm.trajectory.convert.base import Context, DialogueFormat, Item
from afm.trajectory.convert.dialogue import Dialogue, Turn, Use
from afm.trajectory.record import Cost, Record


class OpenAiAgents(DialogueFormat):
    """A trace becomes one trajectory: what all its agents said and called, in the order of time."""

    name: ClassVar[str] = "openai_agents"
    writable: ClassVar[bool] = False

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and (row.get("object") in ("trace", "trace.span") or "span_data" in row)

    def gathered(self, items: Iterable[Item]) -> Iterator[Item]:
        """See :class:`Format`; memory holds all spans of the file."""
        lines: dict[str, int] = {}
        spans: defaultdict[str, list[Any]] = defaultdict(list)
        for line, row in items:
            if isinstance(row, DataError) or not isinstance(row, dict):
                yield line, row
                continue
            rows = (
                row["data"] if isinstance(row.get("data"), list) else [row]
            )  # as they are sent to the server
            for one in rows:
                name = str(one.get("trace_id") or one.get("id"))
                lines.setdefault(name, line)
                spans[name].append(one)
        for name, line in lines.items():
            yield line, spans[name]

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        if not isinstance(row, list):
            raise DataError("expected the spans of a trace")
        spans = [span for span in row if isinstance(span.get("span_data"), dict)]
        spans.sort(key=lambda span: str(span.get("started_at") or ""))
        kinds = {span["span_data"].get("type") for span in spans}
        if "generation" not in kinds:
            more = "; `response` spans hold no words" if "response" in kinds else ""
            raise DataError(f"the trace has no generation span{more}")
        walk = _Spans()
        for span in spans:
            walk.take(span["span_data"])
        if walk.question is None:
            raise DataError("no generation was asked by a user")
        trace: dict[str, Any] = next((one for one in row if one.get("object") == "trace"), {})
        identity = str(trace.get("id") or spans[0].get("trace_id") or "")
        facts: dict[str, Any] = {"id": identity, "model": walk.model}
        if walk.cost != Cost():
            facts["cost"] = walk.cost
        return Dialogue(walk.question, tuple(walk.turns), facts, tuple(dict.fromkeys(walk.lost)))

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        raise DataError(f"{self.name} is only read")


class _Spans:
    """What is known of a trace so far."""

    def __init__(self) -> None:
        self.question: str | None = None
        self.turns: list[Turn] = []
        self.lost: list[str] = []
        self.model = ""
        self.cost = Cost()

    def take(self, data: Mapping[str, Any]) -> None:
        kind = data.get("type")
        if kind == "generation":
            self._generation(data)
        elif kind == "function":
            self._function(data)
        elif kind in ("handoff", "guardrail", "response"):
            self.lost.append(f"{kind} spans")

    def _generation(self, data: Mapping[str, Any]) -> None:
        asked = data.get("input") if isinstance(data.get("input"), list) else []
        said = data.get("output") if isinstance(data.get("output"), list) else []
        self.model = self.model or str(data.get("model") or "")
        self._count(data.get("usage"))
        if self.question is None:
            if any(message.get("role") in ("system", "developer") for message in asked or ()):
                self.lost.append("the system prompt")
            users = [message for message in asked or () if message.get("role") == "user"]
            self.question = "\n\n".join(map(content_text, users)) or None
        for message in said or ():
            if message.get("role", "assistant") != "assistant":
                continue
            calls = [called_function(call) for call in message.get("tool_calls") or ()]
            text = content_text(message) if message.get("content") else ""
            self.turns.append(Turn(text, tuple(Use(call["name"], call["arguments"]) for call in calls)))

    def _count(self, usage: Any) -> None:
        told = usage if isinstance(usage, dict) else {}
        prompt = self.cost.prompt_tokens + (told.get("input_tokens") or 0)
        completion = self.cost.agent_tokens + (told.get("output_tokens") or 0)
        self.cost = Cost(prompt_tokens=prompt, agent_tokens=completion)

    def _function(self, data: Mapping[str, Any]) -> None:
        """Give a result to the first call of that name and input that has none."""
        name, told, result = str(data.get("name")), data.get("input"), data.get("output")
        if result is None:
            return
        waiting = [
            (turn, use)
            for turn in range(len(self.turns))
            for use in range(len(self.turns[turn].uses))
            if self.turns[turn].uses[use].result is None and self.turns[turn].uses[use].tool == name
        ]
        if not waiting:
            self.lost.append(f"a result of {name} that no generation asked for")
            return
        same = [place for place in waiting if self.turns[place[0]].uses[place[1]].arguments == _decoded(told)]
        turn, use = (same or waiting)[0]
        uses = list(self.turns[turn].uses)
        uses[use] = replace(uses[use], result=str(result))
        self.turns[turn] = replace(self.turns[turn], uses=tuple(uses))


def _decoded(told: Any) -> Any:
    try:
        return json.loads(told) if isinstance(told, str) else told
    except (ValueError, RecursionError):
        return told
