"""Reading and writing of the Agent Trajectory Interchange Format (ATIF, RFC 0001 of Harbor), versions 1.0 to 1.8."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from afm.errors import DataError, json_word
from afm.trajectory.chat import hidden_reasoning
from afm.trajectory.convert.base import KEY, Context, DialogueFormat, kept_aside
from afm.trajectory.convert.dialogue import ARGUMENT, AgentTurn, Dialogue, Use, Walk, take_all
from afm.trajectory.convert.messages import declared
from afm.trajectory.record import Cost, Record

VERSIONS = tuple(f"1.{minor}" for minor in range(9))
_PREFIX = "ATIF-v"
_USD = "cost_usd"
_ROW_KEYS = {
    *("schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics"),
    *("continued_trajectory_ref", "subagent_trajectories", "extra"),
}
_AGENT_KEYS = {"name", "version", "model_name", "tool_definitions", "extra"}
_STEP_KEYS = {
    *("step_id", "timestamp", "source", "model_name", "message", "reasoning_content", "tool_calls"),
    *("observation", "metrics", "is_copied_context", "llm_call_count"),
}
_METRICS_KEYS = {"prompt_tokens", "completion_tokens", "cost_usd"}
_TOTALS_KEYS = {"total_prompt_tokens", "total_completion_tokens", "total_cost_usd", "total_steps"}
_CALL_KEYS = {"tool_call_id", "function_name", "arguments"}
_RESULT_KEYS = {"source_call_id", "content", "subagent_trajectory_ref"}
"""Keys that are read or hold nothing new. All others are reported as lost."""
_MEDIA = {"image": "pictures", "audio": "recordings"}


def _parse(row: Any) -> Dialogue:
    version = str(row.get("schema_version", "")) if isinstance(row, dict) else ""
    if version.removeprefix(_PREFIX) not in VERSIONS:
        raise DataError(f"schema_version: got {version!r}, expected ATIF-v1.0 to ATIF-v1.8")
    steps = row.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataError("steps: expected a list of steps")
    reader = _AtifWalk()
    take_all(enumerate(steps, 1), reader.take, "steps[{}]")
    agent = row["agent"] if isinstance(row.get("agent"), dict) else {}
    reader.leave_rest(row, agent)
    facts: dict[str, Any] = {
        "id": str(row.get("trajectory_id") or row.get("session_id") or ""),
        "model": reader.model(agent),
        **reader.spent(row.get("final_metrics")),
        **({"kept": False, "reason": f"atif: {reader.unclear}"} if reader.unclear else {}),
    }
    return reader.dialogue("steps: expected a step of the user", facts)


def _show(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    version = context.atif_version
    minor = VERSIONS.index(version)
    agent: dict[str, Any] = {"name": record.agent, "version": record.agent_digest or "0"}
    agent |= {"model_name": record.model} if record.model else {}
    names = list(dict.fromkeys(use.tool for turn in dialogue.turns for use in turn.uses))
    if names and minor >= 5:  # tool_definitions came with 1.5
        agent["tool_definitions"] = [declared(name) for name in names]
    row: dict[str, Any] = {
        "schema_version": f"{_PREFIX}{version}",
        "session_id": record.id or "unnamed",  # required until 1.6
        "agent": agent,
        "steps": list(_shown_steps(dialogue)),
        "final_metrics": {
            "total_prompt_tokens": record.cost.prompt_tokens,
            "total_completion_tokens": record.cost.agent_tokens,
            **({"total_cost_usd": usd} if (usd := _number(record.provenance.get(_USD))) else {}),
            "total_steps": len(dialogue.turns) + 1,
        },
    }
    if minor >= 7 and record.id:
        row["trajectory_id"] = record.id
    return row


def _keep(row: Any, kept: Mapping[str, Any]) -> None:
    place = row["agent"] if row["schema_version"] == f"{_PREFIX}1.0" else row  # `extra` since 1.1
    place["extra"] = {KEY: dict(kept)}


def _kept(row: Any) -> Mapping[str, Any]:
    places = (row, row.get("agent")) if isinstance(row, dict) else ()
    extras = (place.get("extra") for place in places if isinstance(place, dict))
    return next((kept_aside(extra) for extra in extras if isinstance(extra, dict) and KEY in extra), {})


ATIF = DialogueFormat(
    "atif",
    lambda row: isinstance(row, dict) and str(row.get("schema_version", "")).startswith(_PREFIX),
    parse=_parse,
    show=_show,
    loses="gold answer, verdict and provenance",
    keep=_keep,
    kept=_kept,
)
"""One trajectory per row. The question is the user's step, and each turn of the agent a step with calls and results."""


def _shown_steps(dialogue: Dialogue) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": dialogue.question}]
    for turn in dialogue.turns:
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": "agent", "message": turn.text}
        if turn.uses:
            identities = [f"call_{step['step_id']}_{number}" for number in range(len(turn.uses))]
            step["tool_calls"] = [
                {"tool_call_id": identity, "function_name": use.tool, "arguments": {ARGUMENT: use.text()}}
                for identity, use in zip(identities, turn.uses, strict=True)
            ]
            results = [
                {"source_call_id": identity, "content": use.result or ""}
                for identity, use in zip(identities, turn.uses, strict=True)
            ]
            step["observation"] = {"results": results}
        steps.append(step)
    return steps


class _AtifWalk(Walk):
    """A trajectory while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.unclear = ""
        self._spent: Counter[str] = Counter()
        self._times: list[datetime] = []
        self._models: dict[str, None] = {}

    def take(self, numbered: tuple[int, Any]) -> None:
        number, step = numbered
        if not isinstance(step, dict):
            raise DataError(f"got {json_word(step)}, expected an object")
        if step.get("step_id") != number:
            raise DataError(f"step_id: got {step.get('step_id')!r}, expected {number}")
        self._time(step.get("timestamp"))
        if step.get("is_copied_context"):
            self.lost.append("steps copied from an earlier trajectory")
            return
        self.leave(step, _STEP_KEYS, "steps")
        source, text = step.get("source"), self._text(step.get("message", ""))
        if source == "system":
            self.lost += ["steps of the system"] if text or step.get("observation") else []
        elif source == "user":
            self.ask(text)
            self.lost += ["observations of the user's steps"] if step.get("observation") else []
        elif source == "agent":
            self._agent(step, text)
        else:
            raise DataError(f"source: got {source!r}, expected system, user or agent")

    def _agent(self, step: Mapping[str, Any], text: str) -> None:
        hidden = hidden_reasoning(step)
        calls = step.get("tool_calls") or []
        uses, identities = [], []
        for call in calls if isinstance(calls, list) else []:
            if not isinstance(call, dict) or not isinstance(call.get("function_name"), str):
                raise DataError(f"tool_calls: got {str(call)[:80]!r}, expected a function_name")
            self.leave(call, _CALL_KEYS, "tool calls")
            uses.append(Use(call["function_name"], call.get("arguments", {})))
            identities.append(call.get("tool_call_id"))
        observation = step.get("observation")
        results = observation.get("results", []) if isinstance(observation, dict) else []
        whole = self._results(results, identities, uses)
        self.turns.append(
            AgentTurn(text, tuple(uses), thought="" if hidden in text else hidden, result=whole)
        )
        if step.get("model_name"):
            self._models[str(step["model_name"])] = None
        metrics = step.get("metrics")
        if isinstance(metrics, dict):
            self.leave(metrics, _METRICS_KEYS, "steps' metrics")
            self._spent.update({name: _number(metrics.get(name)) for name in _METRICS_KEYS})

    def _results(self, results: Any, identities: list[Any], uses: list[Use]) -> str | None:
        """Assign results to their calls and return the remaining ones, which belong to the whole step.

        By the standard, a result without ``source_call_id`` comes from the step, not from a call. It is assigned to a call
        only if the step has exactly one.
        """
        free: list[str] = []
        for result in results if isinstance(results, list) else []:
            if not isinstance(result, dict):
                raise DataError(f"observation: got {json_word(result)}, expected a result")
            self.leave(result, _RESULT_KEYS, "results")
            if result.get("subagent_trajectory_ref"):
                self.lost.append("references to trajectories of subagents")
            identity, text = result.get("source_call_id"), self._text(result.get("content"))
            if identity is None:
                free.append(text)
            elif identity in identities:
                _add(uses, identities.index(identity), text)
            else:
                raise DataError(f"observation: the step has no tool call {identity!r} (source_call_id)")
        if len(uses) != 1:
            waiting = any(use.result is None for use in uses)
            if free and waiting:
                self.unclear = "a result names no call of its step, and several could be meant"
            return "\n".join(free) if any(free) or (free and waiting) else None
        for text in free:
            _add(uses, 0, text)
        return None

    def _text(self, content: Any) -> str:
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict)]
            kinds = {part.get("type") for part in parts}
            self.lost += [name for kind, name in _MEDIA.items() if kind in kinds]
            return "".join(str(part["text"]) for part in parts if part.get("type") == "text")
        if content is not None and not isinstance(content, str):
            raise DataError(f"got {json_word(content)}, expected a text or its parts")
        return content or ""

    def _time(self, timestamp: Any) -> None:
        try:
            if timestamp is not None:
                self._times.append(datetime.fromisoformat(str(timestamp).replace("Z", "+00:00")))
        except ValueError:
            raise DataError(f"timestamp: got {timestamp!r}, expected ISO 8601") from None

    def leave_rest(self, row: Mapping[str, Any], agent: Mapping[str, Any]) -> None:
        """Record the parts of a row outside the steps that are not read."""
        if row.get("subagent_trajectories"):
            self.lost.append(f"{len(row['subagent_trajectories'])} embedded trajectories of subagents")
        if row.get("continued_trajectory_ref"):
            self.lost.append(f"its continuation in {row['continued_trajectory_ref']!r}")
        self.leave(row, _ROW_KEYS, "the trajectory")
        self.leave(agent, _AGENT_KEYS, "the agent")
        for place, what in ((row, "the trajectory"), (agent, "the agent")):
            extra = place.get("extra")
            rest = {key for key in extra if key != KEY} if isinstance(extra, dict) else extra
            self.leave({"extra": rest}, (), what)

    def leave(self, place: Mapping[str, Any], known: Collection[str], what: str) -> None:
        """Record the keys of an object that are not read."""
        self.lost += [f"{key!r} of {what}" for key, value in place.items() if key not in known and value]

    def model(self, agent: Mapping[str, Any]) -> str:
        """Return the agent's model or else that of its first step. Others are lost."""
        name = str(agent.get("model_name") or next(iter(self._models), ""))
        self.lost += ["models of single steps"] if set(self._models) - {name} else []
        return name

    def spent(self, final: Any) -> dict[str, Any]:
        """Return tokens, money and time of the trajectory: its totals or else the sum of its steps."""
        totals = final if isinstance(final, dict) else {}
        self.leave(totals, _TOTALS_KEYS, "the final metrics")
        prompt, completion, usd = (
            _number(totals.get(f"total_{name}")) or self._spent[name]
            for name in ("prompt_tokens", "completion_tokens", _USD)
        )
        aware = {time.tzinfo is not None for time in self._times}
        seconds = (max(self._times) - min(self._times)).total_seconds() if len(aware) == 1 else 0.0
        cost = Cost(prompt_tokens=int(prompt), agent_tokens=int(completion), wall_seconds=seconds)
        money = {"provenance": {_USD: round(usd, 6)}} if usd else {}
        return money | ({"cost": cost} if cost != Cost() else {})


def _add(uses: list[Use], place: int, text: str) -> None:
    """Append a text to the result of a call."""
    before = uses[place].result
    uses[place] = replace(uses[place], result=text if before is None else f"{before}\n{text}")


def _number(value: Any) -> Any:
    """Return ``value`` if it is a finite number of at least 0, else 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < math.inf else 0
