"""Step logs of smolagents and of its kin (OAgents): what ``agent.memory.get_full_steps()`` or a ``RunResult`` holds.

A row is ``{"steps": [...]}`` (or ``intermediate_steps``, ``agent_memory``), or the bare list of steps: a ``task``, ``plan`` steps, then
action steps with ``model_output``, ``tool_calls``, ``observations``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from afm.errors import DataError
from afm.trajectory.chat import row_id
from afm.trajectory.convert.base import KEY, Context, DialogueFormat
from afm.trajectory.convert.dialogue import ARGUMENT, Dialogue, Turn
from afm.trajectory.convert.smolagents_step import read_step
from afm.trajectory.record import Cost, Record
from afm.trajectory.tags import split

_STEPS = ("steps", "intermediate_steps", "agent_memory")
_KNOWN = {
    *_STEPS,
    *("output", "state", "token_usage", "timing", KEY, "id"),
    *("agent_name", "question", "augmented_question", "prediction", "true_answer", "task", "task_id"),
    *("start_time", "end_time"),
}
"""Keys beside the steps; what they say is read, or said by the steps too."""
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
        answered = False
        for number, step in enumerate(steps):
            if not isinstance(step, dict):
                hint = "; steps written with str() cannot be read, write step.dict()" * isinstance(step, str)
                raise DataError(f"step {number}: got {type(step).__name__}, expected an object{hint}")
            try:
                if "task" in step and not _is_action(step):
                    asked = _question(asked, step["task"])
                elif "plan" in step:
                    turns.append(Turn(thought=str(step["plan"])))
                elif _is_action(step):
                    read = read_step(step)
                    turns += read.turns
                    lost += read.lost
                    answered = answered or step.get("is_final_answer") is True
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
        answered = answered or any(turn.final for turn in turns)
        if output is not None and not answered and not _says(turns, str(output)):
            turns.append(Turn(str(output), final=True))
        for key, value in outer.items():
            if key not in _KNOWN and value:
                lost.append(f"key {key!r}" + ", the work of a managed agent" * key.endswith("_actions"))
        return Dialogue(question, tuple(turns), _facts(outer, steps), tuple(dict.fromkeys(lost)))

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


def _says(turns: list[Turn], answer: str) -> bool:
    """Whether a run ends with its answer in words."""
    return bool(turns) and not turns[-1].uses and turns[-1].text.strip() == answer.strip()


def _facts(outer: Mapping[str, Any], steps: list[Any]) -> dict[str, Any]:
    """What stands beside the steps, and their tokens."""
    facts: dict[str, Any] = {"id": row_id(outer, "task_id", "id")}
    spent = [step.get("token_usage") for step in ([outer] if outer.get("token_usage") else steps)]
    prompt, written = (
        sum(one.get(key) or 0 for one in spent if isinstance(one, Mapping))
        for key in ("input_tokens", "output_tokens")
    )
    if prompt or written:
        facts["cost"] = Cost(prompt_tokens=prompt, agent_tokens=written)
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
