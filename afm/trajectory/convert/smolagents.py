"""Step logs of smolagents and OAgents: the content of ``agent.memory.get_full_steps()`` or of a ``RunResult``.

A row is ``{"steps": [...]}`` (or ``intermediate_steps``, ``agent_memory``), or the bare list of steps: a ``task``,
``plan`` steps, then action steps with ``model_output``, ``tool_calls``, ``observations``. ``ToolCallingAgent`` lists
its calls except failed ones, which are only in the model's message. ``CodeAgent`` lists its program and repeats it in
its text between special marks. Its last program returns the answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from afm.errors import DataError, json_word
from afm.trajectory.chat import content_text, row_id
from afm.trajectory.convert.base import Context, DialogueFormat, lost_keys
from afm.trajectory.convert.dialogue import ARGUMENT, AgentTurn, Dialogue, Use, Walk, take_all
from afm.trajectory.programs import without_last_call
from afm.trajectory.record import Cost, Record, StopReason
from afm.trajectory.tags import split

_STEPS = ("steps", "intermediate_steps", "agent_memory")
_KNOWN = {
    *_STEPS,
    *("output", "state", "token_usage", "timing", "id", "start_time", "end_time"),
    *("agent_name", "question", "augmented_question", "prediction", "true_answer", "task", "task_id"),
}
"""Keys other than the steps that are read or repeat what is in the steps."""
_NO_TIME = {"start_time": 0.0, "end_time": None, "duration": None}
_FINAL = "final_answer"
_INTERPRETER = "python_interpreter"
_HANDS_OVER = re.compile(rf"\b{_FINAL}\s*\(")
_PARSING_ERROR, _CHECK_ERROR, _MAX_STEPS_ERROR = "AgentParsingError", "AgentError", "AgentMaxStepsError"
_BLOCK = "code"
_MARK = f"</{_BLOCK}>"
_BLOCKS = (
    re.compile(f"<{_BLOCK}>(.*?){_MARK}", re.DOTALL),
    re.compile(r"```(?:python|py)(.*?)\n```", re.DOTALL),
)
"""Patterns of a program, in the order in which smolagents tries them."""
_BEFORE = re.compile(r"(?:<[^<>\s]+>|```\w*)\s*\Z")
_AFTER = re.compile(r"\A\s*(?:</?[^<>\s]+>|```)")
_END = re.compile(r"<end_code>|</?(?:think|thinking)>", re.IGNORECASE)
"""Marks in the text around a program. All of that text is a thought."""
_THOUGHT = re.compile(r"^\**Thoughts?\**[ \t]*:\**[ \t]*", re.MULTILINE)
_LABEL = re.compile(r"(?:\A|\n)[ \t]*\**(?:Code|Action)\**[ \t]*:\**\s*\Z")
_TAGGED = re.compile(r"</\w+>\s*\Z")
_FAILED = re.compile(r"'(?P<tool>[^'\n]+)' with arguments (?P<rest>.*)", re.DOTALL)


def _parse(row: Any) -> Dialogue:
    steps = _steps(row)
    if not steps:
        raise DataError(f"got {json_word(row)}, expected a list of steps, or one under {', '.join(_STEPS)}")
    outer = row if isinstance(row, dict) else {}
    log = _StepWalk()
    take_all(steps, log.take, "step {}")
    # In benchmark logs, `task` next to the steps is a level, and the question in a step includes instructions.
    question = outer.get("question") or log.task or outer.get("task")
    log.question = question if isinstance(question, str) else None
    output = outer.get("output", outer.get("prediction"))
    if output is not None and not log.has_answer(str(output)):
        log.turns.append(AgentTurn(str(output), final=True))
    managed = ", the work of a managed agent"
    log.lost += [key + managed * key.endswith("_actions'") for key in lost_keys(outer, _KNOWN)]
    without = "holds no task; expected a step with `task`, or `question` next to the steps"
    return log.dialogue(without, _facts(outer, steps))


class _StepWalk(Walk):
    """A step log while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.task: Any = None
        self._answered = False

    def take(self, step: Any) -> None:
        if not isinstance(step, dict):
            tip = "; steps written with str() cannot be read, write step.dict()" if type(step) is str else ""
            raise DataError(f"got {json_word(step)}, expected an object{tip}")
        if "task" in step and not _is_action(step):
            if self.task not in (None, step["task"]):
                raise DataError("got a second task, expected one run per row")
            self.task = step["task"]
        elif "plan" in step:
            self.turns.append(AgentTurn(thought=str(step["plan"])))
        elif _is_action(step):
            read = _read_step(step)
            self.turns += read.turns
            self.lost += read.lost
            self.lost += ["pictures"] if step.get("observations_images") else []
            self._answered = self._answered or step.get("is_final_answer") is True
        elif "system_prompt" in step:
            self.lost.append("the system prompt")

    def has_answer(self, output: str) -> bool:
        """Return whether a step gave the answer, or the text at the end of the run is the answer."""
        if self._answered or any(turn.final for turn in self.turns):
            return True
        return bool(self.turns) and not self.turns[-1].uses and self.turns[-1].text.strip() == output.strip()


def _show(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    spec = context.spec(record.agent)
    steps: list[dict[str, Any]] = [{"task": dialogue.question, "task_images": None}]
    output = None
    for number, turn in enumerate(dialogue.turns, 1):
        answers = [step.content for step in split(turn.text, spec).steps if step.role == spec.answer_role]
        output = answers[-1].strip() if answers else output
        steps.append(_shown_step(number, turn, output if answers else None))
    return {"output": output, "steps": steps, "state": "success"}


def _shown_step(number: int, turn: AgentTurn, answer: str | None) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": use.tool, "arguments": {ARGUMENT: use.text()}},
        }
        for use in turn.uses
    ]
    return {
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
        "action_output": answer,
        "token_usage": None,
        "is_final_answer": answer is not None,
    }


def _known(row: Any) -> bool:
    steps = _steps(row)
    return bool(steps) and all(isinstance(step, dict) for step in steps) and any(map(_is_action, steps))


SMOLAGENTS = DialogueFormat("smolagents", _known, parse=_parse, show=_show)
"""One run per row."""


def _steps(row: Any) -> list[Any]:
    if isinstance(row, list):
        return row
    lists = (row[name] for name in _STEPS if isinstance(row, dict) and isinstance(row.get(name), list))
    return next(lists, [])


def _facts(outer: Mapping[str, Any], steps: list[Any]) -> dict[str, Any]:
    """Return the facts in the keys other than the steps, and the tokens of the steps."""
    spent = [step.get("token_usage") for step in ([outer] if outer.get("token_usage") else steps)]
    prompt, written = (
        sum(usage.get(key) or 0 for usage in spent if isinstance(usage, Mapping))
        for key in ("input_tokens", "output_tokens")
    )
    facts: dict[str, Any] = {
        "id": row_id(outer, "task_id", "id"),
        "cost": Cost(prompt_tokens=prompt, agent_tokens=written),
        "ground_truth": outer.get("true_answer"),
        "model": outer["agent_name"] if isinstance(outer.get("agent_name"), str) else "",
    }
    kinds = {error.kind for error in map(_error, steps) if error}
    if outer.get("state") == "max_steps_error" or _MAX_STEPS_ERROR in kinds:
        reason = "smolagents: the run reached its limit of steps, and its answer was forced"
        facts |= {"kept": False, "stop": StopReason.TURNS, "reason": reason}
    return facts


def _is_action(step: Any) -> bool:
    keys = ("model_output", "observations", "step_number", "llm_output", "action_output")
    return isinstance(step, dict) and any(key in step for key in keys)


class _StepError(NamedTuple):
    """The error of a step. ``kind`` is the name of its class, empty in logs that only hold its text."""

    kind: str
    message: str


class _StepTurns(NamedTuple):
    """A step as turns, and short descriptions of what the turns do not hold."""

    turns: tuple[AgentTurn, ...]
    lost: tuple[str, ...] = ()


def _read_step(step: Mapping[str, Any]) -> _StepTurns:
    """Return the turns of an action step: the text with its call, and the answer after it.

    Raises:
        DataError: The step is invalid, or the result of a call is missing.
    """
    said, error, listed = _said(step), _error(step), step.get("tool_calls")
    uses = [_use(call) for call in listed] if isinstance(listed, list) else []
    program = _program(step, uses)
    if program is not None:
        return _program_step(step, said, program, error)
    if not uses and error is not None:
        uses = _failed_calls(step, error)
    if len(uses) > 1 and error is not None:
        failed = f"one of {len(uses)} tool calls failed, and the log lacks the results of the others"
        raise DataError(f"{failed}; expected a result of each. Leave the run out: --on-bad-rows drop")
    return _call_step(step, said, uses, error)


def _call_step(step: Mapping[str, Any], said: str, uses: list[Use], error: _StepError | None) -> _StepTurns:
    answers = [use for use in uses if use.tool == _FINAL]
    others = [use for use in uses if use.tool != _FINAL]
    text = _without_json(said, uses[0].tool) if uses else said
    final, output = step.get("is_final_answer") is True, step.get("action_output")
    if others and not (final and step.get("observations") is None):
        turns = [_with_results(text, others, _result(step, error), ok=error is None)]
        lost = [] if turns[0].result is None else ["which of a step's calls gave which part of its result"]
    else:
        turns, lost = _worded(text, error), _lost_error(error, answered=bool(answers))
    if answers and error is None:
        turns.append(AgentTurn(answers[0].text(), final=True))
    elif (
        output is not None
        and (final or (error and error.kind == _MAX_STEPS_ERROR))
        and not _holds(text, str(output))
    ):
        turns.append(AgentTurn(str(output), final=True))
    return _StepTurns(tuple(turn for turn in turns if turn != AgentTurn()), tuple(lost))


def _with_results(text: str, uses: list[Use], joined: str, *, ok: bool) -> AgentTurn:
    """Return a turn; smolagents joins the results of its calls with line breaks, which tells one line each apart."""
    lines = joined.split("\n") if len(uses) > 1 else [joined]
    if len(lines) != len(uses):
        return AgentTurn(text, tuple(uses), result=joined)
    return AgentTurn(text, tuple(replace(use, result=lines.pop(0), ok=ok) for use in uses))


def _holds(text: str, answer: str) -> bool:
    """Return whether a text is the answer itself, or contains it in the tags at its end."""
    return text.strip() == answer.strip() or (_TAGGED.search(text) is not None and answer in text)


def _program_step(
    step: Mapping[str, Any], said: str, program: tuple[str, str], error: _StepError | None
) -> _StepTurns:
    tool, code = program
    hands_over = _HANDS_OVER.search(code) is not None
    flag, output = step.get("is_final_answer"), step.get("action_output")
    final = flag is True or (flag is None and hands_over and error is None)
    refused = hands_over and error is not None and error.kind == _CHECK_ERROR
    rest, lost = _without_answer(code) if final or refused else (code, [])
    if refused:
        lost, error = [*lost, "an answer that a check refused"], None
    turn = AgentTurn(thought=_words_around(said, code))
    if rest and final and step.get("observations") is None:
        lost.append("the program of the answer, whose output is not known")
    elif rest:
        turn = replace(turn, uses=(Use(tool, rest, _result(step, error), ok=error is None),))
    turns = [turn, *([AgentTurn(str(output), final=True)] if final and output is not None else [])]
    return _StepTurns(tuple(turn for turn in turns if turn != AgentTurn()), tuple(lost))


def _without_answer(code: str) -> tuple[str, list[str]]:
    """Return a program without the call that returns its answer (empty if it does nothing else), and what is lost."""
    try:
        rest = without_last_call(code, _FINAL)
    except DataError:
        rest = None
    if rest is None:
        return code, [f"what {_FINAL}() in the middle of a program does; it stays there"]
    return rest, [f"{_FINAL}() around the last value of a program"] if rest else []


def _program(step: Mapping[str, Any], uses: list[Use]) -> tuple[str, str] | None:
    """Return the tool that ran a program and the program, or ``None`` for a step of calls."""
    code, names = step.get("code_action"), [use.tool for use in uses]
    if not isinstance(code, str) and names != [_INTERPRETER]:
        return None
    return (names or [_INTERPRETER])[0], code if isinstance(code, str) else uses[0].text()


def _words_around(said: str, code: str) -> str:
    """Return the text around a program, without the program's marks and the labels of the format."""
    try:
        whole = json.loads(said)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and _BLOCK in whole:  # structured outputs
        return str(whole.get("thought") or "").strip()
    return without_labels(*_outside(_without_mark(said), code))


def without_labels(*parts: str) -> str:
    """Return the text around programs without the labels of the format: ``Thought:``, ``Code:`` and end marks."""
    cleaned = (_LABEL.sub("", _END.sub("", part).strip()) for part in parts)
    return _THOUGHT.sub("", "\n\n".join(filter(None, cleaned))).strip()


def _outside(said: str, code: str) -> Iterator[str]:
    for pattern in _BLOCKS:
        programs = list(pattern.finditer(said))
        same = "\n\n".join(block[1].strip() for block in programs) == code.strip()
        if programs and (same or _FINAL in code):  # smolagents renames such variables before the run
            begins = [0, *(block.end() for block in programs)]
            ends = [*(block.start() for block in programs), len(said)]
            yield from (said[begin:end] for begin, end in zip(begins, ends, strict=True))
            return
    program = code.strip()
    before, is_there, after = said.partition(program) if program else (said, "", "")
    yield from (_BEFORE.sub("", before), _AFTER.sub("", after)) if is_there else (said,)


def _without_json(said: str, tool: str) -> str:
    """Return a model's text without the call that it wrote into it as JSON."""
    begin, end = said.find("{"), said.rfind("}") + 1
    try:
        call = json.loads(said[begin:end], strict=False) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return said
    if not isinstance(call, dict) or call.get("name") != tool or "arguments" not in call:
        return said
    return f"{_LABEL.sub('', said[:begin])}{said[end:]}".strip()


def _worded(text: str, error: _StepError | None) -> list[AgentTurn]:
    if error is None:
        return [AgentTurn(text)]
    return [AgentTurn(thought=_without_mark(text).strip() if error.kind == _PARSING_ERROR else text.strip())]


def _without_mark(said: str) -> str:
    """Return a text without the closing mark that smolagents always appends."""
    return said if f"<{_BLOCK}>" in said else said.removesuffix(_MARK)


def _lost_error(error: _StepError | None, *, answered: bool) -> list[str]:
    """Return what is lost of an error that does not belong to a tool call."""
    what = "an answer that was refused" if answered else "the error of a step without a tool call"
    return [f"{what} ({error.kind or error.message[:60]})"] if error else []


def _error(step: Mapping[str, Any]) -> _StepError | None:
    error = step.get("error")
    if isinstance(error, Mapping):
        return _StepError(str(error.get("type") or ""), str(error.get("message", dict(error))))
    return _StepError("", error) if isinstance(error, str) and error else None


def _failed_calls(step: Mapping[str, Any], error: _StepError) -> list[Use]:
    """Return the failed calls of a step from the model's message or the text of the error."""
    message = step.get("model_output_message")
    listed = message.get("tool_calls") if isinstance(message, Mapping) else None
    if isinstance(listed, list) and listed:
        return [_use(call) for call in listed]
    failure = _FAILED.search(error.message)
    if failure is None:
        return []
    for mark in re.finditer(r": |\Z", failure["rest"]):
        try:
            arguments = ast.literal_eval(failure["rest"][: mark.start()])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return [Use(failure["tool"], arguments)]
    return []


def _said(step: Mapping[str, Any]) -> str:
    output = step.get("model_output", step.get("llm_output"))
    if isinstance(output, list):
        return content_text({"content": output})
    if output is not None and not isinstance(output, str):
        raise DataError(f"model_output: got {json_word(output)}, expected a text")
    return output or ""


def _use(call: Any) -> Use:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"tool_calls: got {str(call)[:80]!r}, expected a name and arguments")
    return Use(function["name"], function.get("arguments", ""))


def _result(step: Mapping[str, Any], error: _StepError | None) -> str:
    observations = step.get("observations")
    if error is not None:
        message = f"Error: {error.message}"
        return f"{observations}\n{message}" if observations else message
    if not isinstance(observations, str):
        raise DataError("a tool call without observations")
    return observations
