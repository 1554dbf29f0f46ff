"""Conversations in a team's model calls: which call goes on where another ended, and what came back in between."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from afm.distill.gateway import message_text
from afm.distill.gateway_log import RecordedCall
from afm.distill.record import Event
from afm.errors import DataError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in what a model said.

    Attributes:
        id: As the model or its server gave it; empty when it gave none.
        number: Among the tool calls of its message, from 0.
        arguments: Decoded, if they are JSON.
    """

    id: str
    number: int
    name: str
    arguments: Any


class Thread:
    """The answered calls of one attempt at a task.

    Of several calls that asked the same (a client that tried again, answers to choose from), only the one stays whose
    answer the conversation went on with, else the last.

    Attributes:
        calls: Those that stay, in the order in which they ended.
    """

    def __init__(self, calls: Sequence[RecordedCall], observation: str) -> None:
        self._observation = re.compile(observation)
        self.calls = tuple(calls)
        dropped = self._superseded()
        self.calls = tuple(found for place, found in enumerate(calls) if place not in dropped)
        self.__dict__.pop("_continuations", None)

    def reply(self, place: int) -> Mapping[str, Any]:
        """The message of a call's first choice; empty for a completion."""
        choices = self.calls[place].call.choices
        message = choices[0].get("message") if choices else None
        return message if isinstance(message, Mapping) else {}

    def asked(self, place: int) -> str:
        """The last message that a call sent."""
        call = self.calls[place].call
        if call.messages and isinstance(call.messages[-1], Mapping):
            return message_text(call.messages[-1])
        return str(call.prompt or "")

    def uses(self, place: int) -> tuple[ToolUse, ...]:
        """The tool calls of a reply.

        Raises:
            DataError: One has arguments that are no JSON.
        """
        listed = self.reply(place).get("tool_calls")
        found = []
        for number, call in enumerate(listed if isinstance(listed, list) else ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                continue
            name, arguments = str(function.get("name", "")), function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments or "{}")
                except (ValueError, RecursionError) as error:
                    event = self.calls[place].event.id
                    raise DataError(f"event {event}: arguments of {name} are no JSON: {error}") from None
            found.append(ToolUse(str(call.get("id") or ""), number, name, arguments))
        return tuple(found)

    def result(self, place: int, use: ToolUse, *, alone: bool) -> tuple[str, Event]:
        """What a tool call returned, word for word as a model was sent it, and the call that shows it first.

        Args:
            alone: Whether it is the only tool call of its message.

        Raises:
            DataError: No later call shows it, or only together with other results.
        """
        continuing = self._continuations.get(place)
        if continuing is not None:
            later, tail = continuing
            told = [message for message in tail if message.get("role") in ("tool", "function")]
            by_id = [message for message in told if use.id and message.get("tool_call_id") == use.id]
            if by_id or use.number < len(told):
                return message_text(by_id[0] if by_id else told[use.number]), later
            if not told and alone:
                return self.observation(place)
            if not told:
                raise DataError(
                    f"event {self.calls[place].event.id}: the results of several tool calls came as one text"
                )
        return self._by_id(place, use)

    def observation(self, place: int) -> tuple[str, Event]:
        """What the user's text behind a reply says that came back, and the call that shows it.

        Raises:
            DataError: There is none.
        """
        event = self.calls[place].event
        if place not in self._continuations:
            raise DataError(f"event {event.id}: no later call shows what came back")
        later, tail = self._continuations[place]
        for message in tail[1:]:
            if message.get("role") == "user" and (found := self._observation.search(message_text(message))):
                return found[1], later
        raise DataError(
            f"event {event.id}: what came back is not marked as an observation (event {later.id})"
        )

    def _by_id(self, place: int, use: ToolUse) -> tuple[str, Event]:
        for later in self.calls[place + 1 :]:
            for message in later.call.messages:
                if isinstance(message, Mapping) and use.id and message.get("tool_call_id") == use.id:
                    return message_text(message), later.event
        event = self.calls[place].event.id
        raise DataError(f"event {event}: no later call shows what {use.name} returned")

    @cached_property
    def _continuations(self) -> dict[int, tuple[Event, list[Mapping[str, Any]]]]:
        """By place: the first later call of the same member that goes on behind the reply, and what it adds."""
        found: dict[int, tuple[Event, list[Mapping[str, Any]]]] = {}
        for place, before in enumerate(self.calls):
            for later in self.calls[place + 1 :]:
                if later.event.agent == before.event.agent and (tail := self._tail(place, later)):
                    found[place] = (later.event, tail)
                    break
        return found

    def _tail(self, place: int, later: RecordedCall) -> list[Mapping[str, Any]]:
        """What ``later`` has behind the messages of a call, the reply first; empty when it does not go on there."""
        before = self.calls[place].call
        if isinstance(before.prompt, str) and isinstance(later.call.prompt, str):
            begun = before.prompt + self.calls[place].event.content
            if not later.call.prompt.startswith(begun):
                return []
            rest = later.call.prompt[len(begun) :].lstrip()
            return [{"role": "assistant", "content": begun}, {"role": "user", "content": rest}]
        count = len(before.messages)
        tail = [message for message in later.call.messages[count:] if isinstance(message, Mapping)]
        goes_on = later.call.messages[:count] == before.messages and bool(tail) and count > 0
        return tail if goes_on and tail[0].get("role") == "assistant" else []

    def _superseded(self) -> set[int]:
        same: defaultdict[str, list[int]] = defaultdict(list)
        for place, found in enumerate(self.calls):
            asked = [found.event.agent, found.call.prompt, found.call.messages]
            same[json.dumps(asked, sort_keys=True, default=str)].append(place)
        dropped: set[int] = set()
        for places in same.values():
            if len(places) > 1:
                used = [place for place in places if self._was_used(place)]
                dropped |= set(places) - {used[-1] if used else places[-1]}
        return dropped

    def _was_used(self, place: int) -> bool:
        """Whether the conversation went on with this very reply."""
        if place not in self._continuations:
            return False
        kept = self._continuations[place][1][0]
        mine = self.reply(place)
        if (calls := mine.get("tool_calls")) and kept.get("tool_calls"):
            return bool(kept["tool_calls"] == calls)
        return message_text(kept).strip().startswith(message_text(mine).strip())
