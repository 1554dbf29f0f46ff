"""Step logs of smolagents and of its kin (OAgents): what ``agent.memory.get_full_steps()`` or a ``RunResult`` holds.

A row is ``{"steps": [...]}`` (or ``intermediate_steps``, ``agent_memory``), or the bare list of steps: a ``task``, ``plan`` steps, then
action steps with ``model_output``, ``tool_calls``, ``observations``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from afm.errors import DataError
from afm.trajectory.chat import content_text
from afm.trajectory.convert.base import Context, DialogueFormat
from afm.trajectory.convert.dialogue import ARGUMENT, Dialogue, Turn, Use
from afm.trajectory.convert.sidecar import KEY
from afm.trajectory.parse import split
from afm.trajectory.record import Record

_STEPS = ("steps", "intermediate_steps", "agent_memory")
_FINAL = "final_answer"
_NO_TIME = {"start_time": 0.0, "end_time": None, "duration": None}


class SmolAgents(DialogueFormat):
    """One run a row."""

    name: ClassVar[str] = "smolagents"
    loses: ClassVar[str] = "id, gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        steps = _steps(row)
        return bool(steps) and all(isinstance(step, dict) for step in steps) and any(map(_is_action, steps))

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        steps = _steps(row)
        if not steps:
            raise DataError(f"expected a list of steps, or one under {', '.join(_STEPS)}")
        outer = row if isinstance(row, dict) else {}
        asked = None
        turns: list[Turn] = []
        lost: list[str] = []
        for number, step in enumerate(steps):
            if not isinstance(step, dict):
                hint = "; steps written with str() cannot be read, write step.dict()" * isinstance(step, str)
                raise DataError(f"step {number}: got {type(step).__name__}, expected an object{hint}")
            try:
                if "task" in step and not _is_action(step):
                    asked = _question(asked, step["task"])
                elif "plan" in step:
                    turns.append(Turn(str(step["plan"])))
                elif _is_action(step):
                    turns += _action(step)
                    lost += ["pictures"] if step.get("observations_images") else []
                elif "system_prompt" in step:
                    lost.append("the system prompt")
            except DataError as error:
                raise DataError(f"step {number}: {error.message}") from None
        # In logs of benchmarks `task` beside the steps is a level, and the question of a step has instructions in it.
        question = outer.get("question") or asked or outer.get("task")
        if not isinstance(question, str):
            raise DataError("holds no task; expected a step with `task`, or `question` beside the steps")
        output = outer.get("output", outer.get("prediction"))
        if turns and turns[-1].uses and output is not None:
            turns.append(Turn(str(output), final=True))
        for key in outer:
            if key.endswith("_actions") and outer[key]:
                lost.append(f"key {key!r}, the work of a managed agent")
        return Dialogue(question, tuple(turns), _facts(outer), tuple(dict.fromkeys(lost)))

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        spec = context.spec(record.agent)
        steps: list[dict[str, Any]] = [{"task": dialogue.question, "task_images": None}]
        output = None
        for number, turn in enumerate(dialogue.turns, 1):
            calls = [
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {"name": use.tool, "arguments": {ARGUMENT: use.text()}},
                }
                for use in turn.uses
            ]
            answers = [step.content for step in split(turn.text, spec).steps if step.role == spec.answer_role]
            output = answers[-1].strip() if answers else output
            steps.append(
                {
                    "step_number": number,
                    "timing": _NO_TIME,
                    "model_input_messages": None,
                    "tool_calls": calls,
                    "error": None,
                    "model_output_message": None,
                    "model_output": turn.text,
                    "code_action": None,
                    "observations": turn.uses[0].result if turn.uses else None,
                    "observations_images": None,
                    "action_output": output if answers else None,
                    "token_usage": None,
                    "is_final_answer": bool(answers),
                }
            )
        row: dict[str, Any] = {"output": output, "steps": steps, "state": "success"}
        return {**row, KEY: dict(kept)} if kept else row


def _steps(row: Any) -> list[Any]:
    if isinstance(row, list):
        return row
    found = [row[name] for name in _STEPS if isinstance(row, dict) and isinstance(row.get(name), list)]
    return found[0] if found else []


def _facts(outer: Mapping[str, Any]) -> dict[str, Any]:
    """What logs of benchmarks say beside the steps."""
    facts: dict[str, Any] = {"id": str(outer.get("task_id") or outer.get("id") or "")}
    if outer.get("true_answer") is not None:
        facts["ground_truth"] = outer["true_answer"]
    if isinstance(outer.get("agent_name"), str):
        facts["model"] = outer["agent_name"]
    return facts


def _is_action(step: Any) -> bool:
    keys = ("model_output", "observations", "step_number", "llm_output", "action_output")
    return isinstance(step, dict) and any(key in step for key in keys)


def _question(known: Any, told: Any) -> Any:
    if known is not None and known != told:
        raise DataError("a second task; expected one run a row")
    return told


def _action(step: Mapping[str, Any]) -> list[Turn]:
    """The turns of an action step: one, and the answer behind it."""
    text = _said(step)
    listed = step.get("tool_calls")
    uses = [_use(call) for call in (listed if isinstance(listed, list) else [])]
    answers = [use for use in uses if use.tool == _FINAL]
    others = [use for use in uses if use.tool != _FINAL]
    if len(others) > 1:
        raise DataError(f"the results of {len(others)} tool calls stand in one text")
    final = step.get("is_final_answer") is True
    if others and not (final and step.get("observations") is None):
        turn = Turn(text, (replace(others[0], result=_result(step)),))
    else:
        turn = Turn(text)
    if answers:
        return [*([turn] if text.strip() or others else []), Turn(answers[0].text(), final=True)]
    output = step.get("action_output")
    if final and output is not None and str(output) not in text:
        return [turn, Turn(str(output), final=True)]
    return [turn]


def _said(step: Mapping[str, Any]) -> str:
    output = step.get("model_output", step.get("llm_output"))
    if isinstance(output, list):
        return content_text({"content": output})
    if output is not None and not isinstance(output, str):
        raise DataError(f"model_output: got {type(output).__name__}, expected a text")
    return output or ""


def _use(call: Any) -> Use:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"tool_calls: got {str(call)[:80]!r}, expected a name and arguments")
    return Use(function["name"], function.get("arguments", ""))


def _result(step: Mapping[str, Any]) -> str:
    told = step.get("observations")
    error = step.get("error")
    if isinstance(error, dict):
        message = f"Error: {error.get('message', error)}"
        return f"{told}\n{message}" if told else message
    if not isinstance(told, str):
        raise DataError("a tool call without observations")
    return told
