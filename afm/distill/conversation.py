"""Conversations in a team's model calls: which call continues another, and the results between them."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from afm.distill.event_log import Event
from afm.distill.model_calls import RecordedCall, message_text
from afm.errors import DataError

_SHOWN_CALLS = "Calling tools:\n"
"""Text before smolagents' calls of an earlier step, a Python list of ``{id, function: {name, arguments}}``."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in a reply: its index in the message, and its arguments, decoded if they are JSON."""

    id: str
    number: int
    name: str
    arguments: Any

    @property
    def query(self) -> tuple[str, Any]:
        """Return the name and the arguments, without the id."""
        return self.name, self.arguments


class TeamConversation:
    """The answered calls of one attempt at a task.

    Of several calls with the same request (a retry, or alternative answers), only the call whose answer the conversation
    continues is kept, or else the last one.

    Attributes:
        calls: The kept calls, ordered by their end.
    """

    def __init__(self, calls: Sequence[RecordedCall], observation: str) -> None:
        self._observation = re.compile(observation)
        self.calls = tuple(calls)
        dropped = self._superseded()
        self.calls = tuple(call for place, call in enumerate(calls) if place not in dropped)
        self.__dict__.pop("_continuations", None)

    def reply(self, place: int) -> Mapping[str, Any]:
        """Return the message of a call's answer. Empty without one.

        Of several choices it is the one that a later request continues, or else the one that a later request quotes.

        Raises:
            DataError: No later request shows which choice counts.
        """
        choices = _choices(self.calls[place])
        if all(choice == choices[0] for choice in choices):
            return choices[0] if choices else {}
        rankings = [
            [_likeness(choice, tail) for choice in choices] for _, tail in self._all_continuations(place)
        ]
        if not rankings:
            rankings = [[self._quoted(place, message_text(choice).strip()) for choice in choices]]
        first, *others = (_clearest(choices, ranking) for ranking in rankings)
        if first is None:
            raise self._fault(
                place, f"answered with {len(choices)} choices, and no later call shows which one counts"
            )
        if any(other not in (None, first) for other in others):
            raise self._fault(
                place, f"answered with {len(choices)} choices, and later calls continue several"
            )
        return first

    def asked(self, place: int) -> str:
        """Return the last message that a call sent."""
        call = self.calls[place].call
        if call.messages and isinstance(call.messages[-1], Mapping):
            return message_text(call.messages[-1])
        return str(call.prompt or "")

    def uses(self, place: int) -> tuple[ToolUse, ...]:
        """Return the tool calls of a reply.

        Raises:
            DataError: The arguments of a call are not JSON.
        """
        uses = _uses(self.reply(place))
        for use in uses:
            if isinstance(use.arguments, DataError):
                raise DataError(f"event {self.calls[place].event.id}: {use.arguments.message}")
        return uses

    def result(self, place: int, use: ToolUse, *, alone: bool) -> tuple[str, Event]:
        """Return the result of a tool call, word for word as it was sent to a model, and the first call that shows it.

        A result belongs to the call with its id. Results without ids belong to the calls in order, if their number is the
        same.

        Args:
            alone: Whether it is the only tool call of its message.

        Raises:
            DataError: No later call shows the result, or only together with others. Or a later call shows another query,
                or a result that fits no call.
        """
        if place not in self._continuations:
            return self._by_id(place, use)
        later, tail = self._continuations[place]
        shown = self._shown(place, tail)
        kept = shown[use.number]
        if kept.query != use.query:
            raise self._changed(place, use.name)
        results = list(_results(tail))
        if not results and alone:
            return self.observation(place)
        if not results and any(message.get("role") == "user" for message in tail):
            raise self._fault(place, "the results of several tool calls came as one text")
        own = self._own_results(place, shown, results).get(use.number)
        return (message_text(own), later) if own is not None else self._by_id(place, kept)

    def check(self, place: int) -> None:
        """Check the results after a reply, even if its calls do not need them.

        Raises:
            DataError: A result fits no call, or its call is ambiguous.
        """
        if place in self._continuations:
            tail = self._continuations[place][1]
            if results := list(_results(tail)):
                self._own_results(place, self._shown(place, tail), results)

    def program(self, place: int, code: str) -> None:
        """Compare a program with the one that the framework ran, if a later call shows it.

        Raises:
            DataError: The programs differ, so the result belongs to another program.
        """
        tail = self._continuations[place][1] if place in self._continuations else ()
        ran = [use.arguments for use in _calls_shown(tail) if isinstance(use.arguments, str)]
        if len(ran) == 1 and ran[0].strip() != code.strip():
            raise self._fault(place, "the next request shows another program than the model wrote")

    def observation(self, place: int) -> tuple[str, Event]:
        """Return the result in the user's text after a reply, and the call that shows it.

        Raises:
            DataError: No text matches.
        """
        if place not in self._continuations:
            raise self._fault(place, "no later call shows the result")
        later, tail = self._continuations[place]
        for message in tail[1:]:
            if message.get("role") == "user" and (match := self._observation.search(message_text(message))):
                return match[1], later
        raise self._fault(place, f"the result is not marked as an observation (event {later.id})")

    def _shown(self, place: int, tail: Sequence[Mapping[str, Any]]) -> tuple[ToolUse, ...]:
        """Return the calls of a reply as the next request shows them, in the model's order.

        Raises:
            DataError: They differ from the model's calls.
        """
        made, shown = self.uses(place), _calls_shown(tail)
        if not shown:
            return made
        ids = Counter(use.id for use in made)
        if "" not in ids and set(ids.values()) == {1} and ids == Counter(use.id for use in shown):
            by_id = {use.id: use for use in shown}
            return tuple(by_id[use.id] for use in made)
        if len(shown) != len(made):
            raise self._fault(
                place, f"the model made {len(made)} tool calls and the next request shows {len(shown)}"
            )
        return shown

    def _own_results(
        self, place: int, shown: Sequence[ToolUse], results: Sequence[Mapping[str, Any]]
    ) -> dict[int, Mapping[str, Any]]:
        """Return the results in one request by the index of their call. Calls whose result comes later are left out.

        Raises:
            DataError: A result fits no call, or its call is ambiguous.
        """
        named = [result for result in results if result.get("tool_call_id")]
        if not named:
            names = [result.get("name") or use.name for result, use in zip(results, shown, strict=False)]
            if len(results) not in (0, len(shown)) or names != [use.name for use in shown][: len(results)]:
                raise self._fault(
                    place, f"{len(results)} results without ids do not fit {len(shown)} tool calls"
                )
            return dict(enumerate(results))
        waiting: defaultdict[str, list[int]] = defaultdict(list)
        for number, use in enumerate(shown):
            waiting[use.id].append(number)
        owned: dict[int, Mapping[str, Any]] = {}
        counts = Counter(str(result["tool_call_id"]) for result in named)
        for result in results:
            identity = str(result.get("tool_call_id") or "")
            if not identity or not waiting.get(identity):
                raise self._fault(place, "the next request shows a result that fits none of the tool calls")
            number = waiting[identity].pop(0)
            owned[number] = result
        if any(waiting[identity] for identity in counts):
            raise self._fault(place, "tool calls share an id, and not each of them has a result")
        return owned

    def _by_id(self, place: int, use: ToolUse) -> tuple[str, Event]:
        """Return the result in any later request, if no other call of the attempt has the same id."""
        if self._ids[use.id] == 1:
            for later in self.calls[place + 1 :]:
                messages = [message for message in later.call.messages if isinstance(message, Mapping)]
                for at, message in enumerate(messages):
                    if str(message.get("tool_call_id")) != use.id:
                        continue
                    shown = [past for before in messages[:at] for past in _uses(before) if past.id == use.id]
                    if any(past.query != use.query for past in shown):
                        raise self._changed(place, use.name)
                    return message_text(message), later.event
        raise self._fault(place, f"no later call shows what {use.name} returned")

    @cached_property
    def _ids(self) -> Counter[str]:
        """Count the replies, or calls of one reply, with each id. Empty ids are not counted."""
        counts: Counter[str] = Counter()
        for call in self.calls:
            said = [Counter(use.id for use in _uses(choice)) for choice in _choices(call)]
            for identity in {name for counter in said for name in counter} - {""}:
                counts[identity] += max(counter[identity] for counter in said)
        return counts

    def _changed(self, place: int, name: str) -> DataError:
        return self._fault(
            place,
            f"the next request shows another call of {name} than the model made; its result belongs to that one",
        )

    def _fault(self, place: int, why: str) -> DataError:
        return DataError(f"event {self.calls[place].event.id}: {why}")

    def _quoted(self, place: int, text: str) -> int:
        """Return 1 if a later request of any member contains a text, otherwise 0."""
        if not text:
            return 0
        sent = (later.call for later in self.calls[place + 1 :])
        return int(
            any(
                text in str(call.prompt or "")
                or any(text in message_text(part) for part in call.messages if isinstance(part, Mapping))
                for call in sent
            )
        )

    @cached_property
    def _continuations(self) -> dict[int, tuple[Event, list[Mapping[str, Any]]]]:
        """Map each index to the first later call of the same member that continues its reply, and the added messages."""
        firsts = ((place, next(self._all_continuations(place), None)) for place in range(len(self.calls)))
        return {place: first for place, first in firsts if first is not None}

    def _all_continuations(self, place: int) -> Iterator[tuple[Event, list[Mapping[str, Any]]]]:
        """Yield each later call of the same member that continues the reply, and the added messages."""
        for later in self.calls[place + 1 :]:
            if later.event.agent == self.calls[place].event.agent and (tail := self._tail(place, later)):
                yield later.event, tail

    def _tail(self, place: int, later: RecordedCall) -> list[Mapping[str, Any]]:
        """Return the messages of ``later`` after those of a call, beginning with the reply. Empty if it does not continue."""
        before = self.calls[place].call
        if isinstance(before.prompt, str) and isinstance(later.call.prompt, str):
            texts = (message_text(choice) for choice in _choices(self.calls[place]))
            begun = [text for text in texts if later.call.prompt.startswith(before.prompt + text)]
            if not begun:
                return []
            reply = max(begun, key=len)
            rest = later.call.prompt[len(before.prompt) + len(reply) :].lstrip()
            return [{"role": "assistant", "content": reply}, {"role": "user", "content": rest}]
        count = len(before.messages)
        tail = [message for message in later.call.messages[count:] if isinstance(message, Mapping)]
        goes_on = later.call.messages[:count] == before.messages and bool(tail) and count > 0
        return tail if goes_on and tail[0].get("role") == "assistant" else []

    def _superseded(self) -> set[int]:
        same: defaultdict[str, list[int]] = defaultdict(list)
        for place, call in enumerate(self.calls):
            asked = [call.event.agent, call.call.prompt, call.call.messages]
            same[json.dumps(asked, sort_keys=True, default=str)].append(place)
        dropped: set[int] = set()
        for places in same.values():
            if len(places) > 1:
                dropped |= set(places) - {max(places, key=lambda place: (self._use(place), place))}
        return dropped

    def _use(self, place: int) -> int:
        """Return the confidence that the conversation continued with this reply. 0 if it did not."""
        if place not in self._continuations:
            return 0
        tail = self._continuations[place][1]
        return max((_likeness(choice, tail) for choice in _choices(self.calls[place])), default=0)


def _choices(call: RecordedCall) -> list[Mapping[str, Any]]:
    """Return the choices of a call's answer as messages."""
    messages = []
    for choice in call.call.choices:
        message, text = choice.get("message"), choice.get("text")
        if isinstance(message, Mapping):
            messages.append(message)
        elif isinstance(text, str):
            messages.append({"role": "assistant", "content": text})
    return messages


def _uses(message: Mapping[str, Any]) -> tuple[ToolUse, ...]:
    """Return the tool calls of a message, or its older form ``function_call``. Invalid arguments become their error."""
    listed = message.get("tool_calls")
    if not listed and isinstance(message.get("function_call"), Mapping):
        listed = [{"function": message["function_call"]}]
    return tuple(_read(listed if isinstance(listed, list) else ()))


def _read(listed: Sequence[Any], in_text: bool = False) -> Iterator[ToolUse]:
    """Yield the calls in a list. With ``in_text``, arguments that are not JSON stay text, such as a program."""
    functions = ((call, call.get("function")) for call in listed if isinstance(call, Mapping))
    whole = [(call, function) for call, function in functions if isinstance(function, Mapping)]
    for number, (call, function) in enumerate(whole):
        name, arguments = str(function.get("name", "")), function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                if not in_text:
                    arguments = DataError(f"arguments of {name} are not JSON: {error}")
        yield ToolUse(str(call.get("id") or ""), number, name, arguments)


def _calls_shown(tail: Sequence[Mapping[str, Any]]) -> tuple[ToolUse, ...]:
    """Return the tool calls of a reply as shown by the request that continues it: as calls, or as smolagents' text."""
    if not tail:
        return ()
    if uses := _uses(tail[0]):
        return uses
    for message in tail:
        if message.get("role") != "assistant":
            break
        _, mark, text = message_text(message).rpartition(_SHOWN_CALLS)
        if mark:
            try:
                listed = ast.literal_eval(text.strip())
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return ()
            return tuple(_read(listed, in_text=True)) if isinstance(listed, list) else ()
    return ()


def _results(tail: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of tools after a reply, up to the assistant's next message."""
    begun = False
    for message in tail[1:]:
        if message.get("role") in ("tool", "function"):
            begun = True
            yield message
        elif message.get("role") == "assistant" and (begun or _uses(message)):
            return


def _likeness(choice: Mapping[str, Any], tail: Sequence[Mapping[str, Any]]) -> int:
    """Return the confidence that a request continues this reply. 0 if it continues another one."""
    made, shown = _uses(choice), _calls_shown(tail)
    said, kept = message_text(choice).strip(), message_text(tail[0]).strip()
    same_text = 2 * (kept == said) or int(kept.startswith(said) or (bool(kept) and said.endswith(kept)))
    if made and shown:
        same = [use.query for use in made] == [use.query for use in shown]
        return 1 + same_text + 3 * ([use.id for use in made] == [use.id for use in shown]) if same else 0
    return 0 if _uses(tail[0]) else same_text


def _clearest(choices: Sequence[Mapping[str, Any]], ranking: Sequence[int]) -> Mapping[str, Any] | None:
    """Return the choice with the highest rank. ``None`` if several share it and are not parts of the longest one."""
    best = max(ranking)
    fitting = [choice for choice, rank in zip(choices, ranking, strict=True) if rank == best]
    longest = max(fitting, key=lambda choice: len(message_text(choice)))
    alike = all(
        message_text(choice).strip() in message_text(longest) and str(_uses(choice)) == str(_uses(longest))
        for choice in fitting
    )
    return longest if best and alike else None
