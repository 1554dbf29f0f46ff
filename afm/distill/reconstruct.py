"""Reconstruction of a team's work from its model calls: messages, tool calls and results.

A gateway does not see tools. It sees tool calls in the replies of models, and results in later requests: as messages of
the role ``tool``, or as a user's text (smolagents' ``Observation:``). Text that is sent repeatedly counts once, where a
model wrote it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.conversation import TeamConversation, ToolUse
from afm.distill.event_log import Event, EventKind
from afm.distill.filters.base import without_event
from afm.distill.merge import RoleMap, merge_attempt
from afm.distill.model_calls import BadLines, RecordedCall, Usage, message_text, read_calls
from afm.distill.run import KEPT_FILE, MANIFEST_FILE, Progress, writing_records
from afm.distill.team_map import TeamMap, ToolRule, parameter_text, plain_text
from afm.errors import DataError
from afm.runs.atomic import replace_text
from afm.runs.folder import write_manifest
from afm.trajectory.convert.smolagents import without_labels
from afm.trajectory.programs import FunctionCall, calls_in, shows_only
from afm.trajectory.record import Record, StopReason

_PLAYS = " as "


def merge_calls(
    calls: Sequence[RecordedCall], task: Task, spec: AgentSpec, team: TeamMap, *, name: str = ""
) -> Record:
    """Return one record for the calls of an attempt at ``task``, with the tokens, cost and time of all calls.

    The record is dropped, with a reason, if ``spec`` does not accept the trajectory.
    """
    first, last = calls[0].event, calls[-1].event
    begun = _derived(
        first,
        EventKind.TASK,
        "",
        id=f"{first.task_id}#{first.attempt}.0",
        time=round(first.time - first.seconds, 3),
        meta={"task": task.model_dump(mode="json")},
    )
    rebuilt = Rebuilt(calls, spec, team)
    events = [begun, *(call.event for call in calls)]
    try:
        events += rebuilt.events()
    except DataError as error:
        events.append(_derived(last, EventKind.ERROR, error.message))
    record = merge_attempt(events, spec, rebuilt.roles(), team=name)
    steps = [
        step | {"agent": step["agent"].partition(_PLAYS)[0]} for step in record.provenance.get("steps", ())
    ]
    reason = record.reason.removeprefix("team failed: ")
    return record.model_copy(update={"provenance": {**record.provenance, "steps": steps}, "reason": reason})


class Rebuilt:
    """The events of a team, reconstructed from the calls of one attempt."""

    def __init__(self, calls: Sequence[RecordedCall], spec: AgentSpec, team: TeamMap) -> None:
        useful = [call for call in calls if call.event.ok and not team.ignores(call.event.agent)]
        self._conversation = TeamConversation(useful, team.observation)
        self._calls = self._conversation.calls
        self._spec, self._team = spec, team
        self._members: dict[str, str] = {}

    def roles(self) -> RoleMap:
        """The role of each member name in the events."""
        optional = tuple(name for name, role in self._members.items() if role in self._team.optional)
        return RoleMap(
            messages=self._members,
            optional=optional,
            missing_thought=self._team.missing_thought,
            missing_last_thought=self._team.missing_last_thought,
        )

    def events(self) -> Iterator[Event]:
        """Yield the events in order, ending with the team's answer.

        Raises:
            DataError: An event cannot be reconstructed.
        """
        if not self._calls:
            raise DataError("no call of this task was answered")
        for place in range(len(self._calls)):
            for event in self._reply(place):
                yield event
                if event.kind is EventKind.FINAL:
                    return
        raise DataError("no final answer was found; set the team map's `finals` or `answer` to its place")

    def _reply(self, place: int) -> Iterator[Event]:
        """Yield the events of one call: its message, then its tool calls or the answer."""
        said, uses = self._said(place), self._conversation.uses(place)
        self._conversation.check(place)
        if place == self._last_of_answerer and not uses:
            yield from self._answer(place, said)
            return
        program = re.search(self._team.programs.pattern, said) if self._team.programs and not uses else None
        if program is not None:
            yield from self._message(place, said[: program.start()].rstrip())
            yield from self._program(place, program[1].strip())
            return
        yield from self._message(place, said)
        for use in uses:
            yield from self._use(place, use, alone=len(uses) == 1)

    def _said(self, place: int) -> str:
        message = self._conversation.reply(place)
        said = message_text(message)
        if self._team.reasoning:
            hidden = message.get("reasoning_content") or message.get("reasoning")
            said = f"{hidden}\n\n{said}".strip() if isinstance(hidden, str) else said
        return said

    def _message(self, place: int, text: str) -> Iterator[Event]:
        if not text.strip():
            return
        event = self._calls[place].event
        role = self._team.role_of(event.agent, self._conversation.asked(place), text, self._spec)
        if role is not None:
            if self._team.programs is not None and role in self._spec.thought_roles:
                text = without_labels(text)
            member = f"{event.agent}{_PLAYS}{role}"
            self._members[member] = role
            if text.strip():
                yield _derived(event, EventKind.MESSAGE, text.strip(), agent=member)

    def _answer(self, place: int, said: str) -> Iterator[Event]:
        rule = self._team.answer
        assert rule is not None
        answer = said.strip()
        if rule.pattern is not None:
            match = re.search(rule.pattern, said)
            if match is None:
                raise DataError(
                    f"event {self._calls[place].event.id}: the answer's pattern is not found in the last message"
                )
            yield from self._message(place, said[: match.start()])
            answer = match[1].strip()
        yield _derived(self._calls[place].event, EventKind.FINAL, answer)

    def _use(self, place: int, use: ToolUse, *, alone: bool) -> Iterator[Event]:
        event = self._calls[place].event
        if use.name in self._team.finals:
            yield from self._final(
                place, parameter_text(use.arguments, self._team.finals[use.name], use.name)
            )
        elif use.name in self._team.tools:
            rule = self._team.tools[use.name]
            argument = rule.call_text(parameter_text(use.arguments, rule.argument, use.name))
            text, shown = self._conversation.result(place, use, alone=alone)
            yield from self._step(event, rule, argument, rule.result_in(text), shown)
        elif use.name not in self._team.delegates:
            raise DataError(
                f"event {event.id}: {event.agent!r} calls {use.name!r}, which the team map does not name; add it to "
                "`tools`, `finals` or `delegates`"
            )

    def _final(self, place: int, text: str) -> Iterator[Event]:
        """Yield the team's answer, or a member's report to its caller."""
        if place == self._last_final:
            yield _derived(self._calls[place].event, EventKind.FINAL, text)
        else:
            yield from self._message(place, text)

    def _program(self, place: int, code: str) -> Iterator[Event]:
        event, programs = self._calls[place].event, self._team.programs
        assert programs is not None
        try:
            finals = calls_in(code, self._team.finals)
            uses = () if programs.tool is not None else calls_in(code, self._team.tools)
        except DataError as error:
            raise DataError(f"event {event.id}: {error.message}") from None
        if not finals or uses:
            yield from self._program_step(place, code, uses)
        for call in finals[-1:]:
            yield from self._final(place, plain_text(call.value(self._team.finals[call.name])))

    def _program_step(self, place: int, code: str, uses: tuple[FunctionCall, ...]) -> Iterator[Event]:
        event, programs = self._calls[place].event, self._team.programs
        assert programs is not None
        if programs.tool is not None:
            rule, argument = programs.tool, programs.tool.call_text(code)
        elif len(uses) == 1 and shows_only(code, uses[0].name):
            rule = self._team.tools[uses[0].name]
            argument = rule.call_text(plain_text(uses[0].value(rule.argument)))
        else:
            called = ", ".join(call.name for call in uses) or "no tool"
            raise DataError(
                f"event {event.id}: a program calls {called}; expected one tool whose result is all that it prints, or "
                "`programs.tool` in the team map"
            )
        self._conversation.program(place, code)
        text, shown = self._conversation.observation(place)
        for pattern in programs.results if programs.tool is None else ():
            if match := re.search(pattern, text):
                text = match[1].removesuffix("\n")  # the line feed of print
                break
        yield from self._step(event, rule, argument, rule.result_in(text), shown)

    def _step(
        self, event: Event, rule: ToolRule, argument: str, result: str, shown: Event
    ) -> Iterator[Event]:
        yield _derived(event, EventKind.TOOL_CALL, argument, tool=rule.tool)
        yield _derived(shown, EventKind.TOOL_RESULT, result, tool=rule.tool, agent="")

    def _finals_in(self, place: int) -> bool:
        """Return whether the call holds an answer of its member."""
        names = self._team.finals
        if any(use.name in names for use in self._conversation.uses(place)):
            return True
        if self._team.programs is None:
            return False
        program = re.search(self._team.programs.pattern, self._said(place))
        return program is not None and any(re.search(rf"\b{re.escape(name)}\(", program[1]) for name in names)

    @cached_property
    def _last_of_answerer(self) -> int:
        """Return the index of the last call of the member that gives the answer, or -1."""
        rule = self._team.answer
        if rule is None or self._last_final >= 0:
            return -1
        members = (call.event.agent for call in self._calls)
        places = (place for place, member in enumerate(members) if fnmatchcase(member, rule.agent))
        return max(places, default=-1)

    @cached_property
    def _last_final(self) -> int:
        """Return the index of the last call with an answer, which is the team's, or -1."""
        return max((place for place in range(len(self._calls)) if self._finals_in(place)), default=-1)


def _derived(event: Event, kind: EventKind, content: str, **fields: Any) -> Event:
    """Return an event derived from a call. The call's event holds the usage."""
    own = {"kind": kind, "content": content, "meta": {}, "ok": True}
    return event.model_copy(update={**Usage().model_dump(), **own, **fields})


def task_of(calls: Sequence[RecordedCall], tasks: Mapping[str, Task]) -> Task | None:
    """Return the task of an attempt by its label. Without a label, it is the task whose question was sent."""
    label = calls[0].event.task_id
    if label in tasks or not label.startswith("auto-"):
        return tasks.get(label)
    messages = (message for message in calls[0].call.messages if isinstance(message, Mapping))
    sent = [message_text(message) for message in messages if message.get("role") == "user"]
    words = "\n".join(sent) or str(calls[0].call.prompt or "")
    candidates = [task for task in tasks.values() if task.question in words]
    return max(candidates, key=lambda task: len(task.question), default=None)


UNREADABLE_FILE = "unreadable.jsonl"


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge: trajectories kept in ``path``, dropped attempts by reason, and tasks ``missing`` in the log.

    Attributes:
        cost_usd: Cost of all calls, including those of dropped attempts.
        unreadable: Number of unreadable lines, which ``unreadable.jsonl`` next to ``path`` lists.
    """

    path: Path
    kept: int
    dropped: Mapping[str, int]
    missing: int
    cost_usd: float
    unreadable: int = 0


def merge_gateway_log(
    log: Path,
    tasks: Iterable[Task],
    spec: AgentSpec,
    team: TeamMap,
    output_dir: Path,
    *,
    name: str = "",
    drop_bad_lines: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Write ``trajectories.jsonl``, ``dropped.jsonl`` and ``manifest.json`` to ``output_dir``, each atomically.

    The last of several attempts at a task counts.

    Args:
        drop_bad_lines: Skip unreadable lines. ``unreadable.jsonl`` lists them with number and error. Attempts that may
            have lost a call are dropped.

    Raises:
        DataError: A line cannot be read and ``drop_bad_lines`` is not set, or the log was not written by a gateway.
    """
    bad = BadLines(log) if drop_bad_lines else None
    known = {task.id: task for task in tasks}
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    cost = 0.0
    with writing_records(output_dir) as write:
        for number, record in enumerate(_records(log, known, spec, team, name, bad), 1):
            cost += record.provenance.get("cost_usd", 0.0)
            seen.add(record.id)
            counts["" if record.kept else without_event(record.reason).partition(" at character ")[0]] += 1
            write(record)
            if progress is not None:
                progress("merge", number, None)
    merged = Merged(
        path=output_dir / KEPT_FILE,
        kept=counts.pop("", 0),
        dropped=dict(counts),
        missing=len(known.keys() - seen),
        cost_usd=round(cost, 6),
        unreadable=_list_bad_lines(bad, output_dir / UNREADABLE_FILE),
    )
    write_manifest(
        output_dir / MANIFEST_FILE,
        counts={
            "kept": merged.kept,
            "dropped": sum(merged.dropped.values()),
            "tasks_without_calls": merged.missing,
            **({"unreadable_lines": merged.unreadable} if merged.unreadable else {}),
        },
        inputs=[log],
        spec=spec,
        team=name,
        map=team.model_dump(mode="json", exclude_defaults=True),
        dropped=merged.dropped,
        cost_usd=merged.cost_usd,
    )
    return merged


def _records(
    log: Path, tasks: Mapping[str, Task], spec: AgentSpec, team: TeamMap, name: str, bad: BadLines | None
) -> Iterator[Record]:
    merged: set[str] = set()
    for calls in read_calls(log, last_only=True, bad=bad):
        task, first = task_of(calls, tasks), calls[0].event
        if task is None:
            yield _refuse(calls, spec, "no task of this name among the tasks")
        elif task.id in merged:
            yield _refuse(calls, spec, "its task has a trajectory already", task)
        elif bad is not None and bad.spoil((first.task_id, first.attempt)):
            yield _refuse(calls, spec, "lines of its last attempt cannot be read", task)
        else:
            merged.add(task.id)
            yield merge_calls(calls, task, spec, team, name=name)


def _list_bad_lines(bad: BadLines | None, file: Path) -> int:
    """Write the bad lines, if any, to a file. Returns their number."""
    if bad is None or not bad.lines:
        file.unlink(missing_ok=True)
        return 0
    rows = sorted(bad.lines, key=itemgetter("line"))
    replace_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _refuse(calls: Sequence[RecordedCall], spec: AgentSpec, reason: str, task: Task | None = None) -> Record:
    cost = sum(call.event.cost_usd for call in calls)
    return Record(
        id=calls[0].event.task_id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=task.question if task else "",
        segments=(),
        stop=StopReason.ERROR,
        provenance={"attempt": calls[0].event.attempt, "cost_usd": round(cost, 6)},
        kept=False,
        reason=reason,
    )
