"""One action step of smolagents: what was said, the call or the program, what came back, what went wrong.

``ToolCallingAgent`` lists its calls, but not those that failed, which stand in the model's message alone. ``CodeAgent`` lists its program
and says it once more in its words, between marks of its own; its last program hands the answer over.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from afm.errors import DataError
from afm.trajectory.chat import content_text
from afm.trajectory.convert.dialogue import Turn, Use
from afm.trajectory.programs import without_last_call

_FINAL = "final_answer"
_INTERPRETER = "python_interpreter"
_HANDS_OVER = re.compile(rf"\b{_FINAL}\s*\(")
_PARSING, _CHECK, _STEPS = "AgentParsingError", "AgentError", "AgentMaxStepsError"
_BLOCK = "code"
_MARK = f"</{_BLOCK}>"
_BLOCKS = (
    re.compile(f"<{_BLOCK}>(.*?){_MARK}", re.DOTALL),
    re.compile(r"```(?:python|py)(.*?)\n```", re.DOTALL),
)
"""Where a program stands, tried in this order as smolagents does."""
_BEFORE = re.compile(r"(?:<[^<>\s]+>|```\w*)\s*\Z")
_AFTER = re.compile(r"\A\s*(?:</?[^<>\s]+>|```)")
_END = re.compile(r"<end_code>|</?(?:think|thinking)>", re.IGNORECASE)
"""Marks in the words beside a program, all of which are a thought."""
_THOUGHT = re.compile(r"^\**Thoughts?\**[ \t]*:\**[ \t]*", re.MULTILINE)
_LABEL = re.compile(r"(?:\A|\n)[ \t]*\**(?:Code|Action)\**[ \t]*:\**\s*\Z")
_TAGGED = re.compile(r"</\w+>\s*\Z")
_FAILED = re.compile(r"'(?P<tool>[^'\n]+)' with arguments (?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepError:
    """What a step ended with.

    Attributes:
        kind: Name of its class; empty in logs that hold its text alone.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class StepRead:
    """A step as turns.

    Attributes:
        lost: What it held and turns cannot, in a few words each.
    """

    turns: tuple[Turn, ...]
    lost: tuple[str, ...] = ()


def read_step(step: Mapping[str, Any]) -> StepRead:
    """The turns of an action step: what was said with its call, and the answer behind it.

    Raises:
        DataError: It is no step, or what a call of it returned stands nowhere.
    """
    said, error = _said(step), _error(step)
    listed = step.get("tool_calls")
    uses = [_use(call) for call in (listed if isinstance(listed, list) else [])]
    program = _program(step, uses)
    if program is not None:
        return _program_step(step, said, program, error)
    if not uses and error is not None:
        uses = _failed_calls(step, error)
    if len(uses) > 1 and error is not None:
        raise DataError(f"one of {len(uses)} tool calls failed, and what the others returned stands nowhere")
    return _call_step(step, said, uses, error)


def _call_step(step: Mapping[str, Any], said: str, uses: list[Use], error: StepError | None) -> StepRead:
    answers = [use for use in uses if use.tool == _FINAL]
    others = [use for use in uses if use.tool != _FINAL]
    if len(others) > 1:
        raise DataError(f"the results of {len(others)} tool calls stand in one text")
    text = _without_json(said, uses[0].tool) if uses else said
    final, output = step.get("is_final_answer") is True, step.get("action_output")
    if others and not (final and step.get("observations") is None):
        use = Use(others[0].tool, others[0].arguments, _result(step, error), ok=error is None)
        turns, lost = [Turn(text, (use,))], []
    else:
        turns, lost = _worded(text, error), _untold(error, answered=bool(answers))
    if answers and error is None:
        turns.append(Turn(answers[0].text(), final=True))
    elif output is not None and (final or (error and error.kind == _STEPS)) and not _tells(text, str(output)):
        turns.append(Turn(str(output), final=True))
    return StepRead(tuple(turn for turn in turns if turn != Turn()), tuple(lost))


def _tells(text: str, answer: str) -> bool:
    """Whether words are the answer itself, or hold it within the tags that end them."""
    return text.strip() == answer.strip() or (_TAGGED.search(text) is not None and answer in text)


def _program_step(
    step: Mapping[str, Any], said: str, program: tuple[str, str], error: StepError | None
) -> StepRead:
    tool, code = program
    hands_over = _HANDS_OVER.search(code) is not None
    told, output = step.get("is_final_answer"), step.get("action_output")
    final = told is True or (told is None and hands_over and error is None)
    refused = hands_over and error is not None and error.kind == _CHECK
    rest, lost = _without_answer(code) if final or refused else (code, [])
    if refused:
        lost, error = [*lost, "an answer that a check refused"], None
    turn = Turn(thought=_words_beside(said, code))
    if rest and final and step.get("observations") is None:
        lost.append("the program of the answer, whose output is not known")
    elif rest:
        turn = replace(turn, uses=(Use(tool, rest, _result(step, error), ok=error is None),))
    turns = [turn, *([Turn(str(output), final=True)] if final and output is not None else [])]
    return StepRead(tuple(turn for turn in turns if turn != Turn()), tuple(lost))


def _without_answer(code: str) -> tuple[str, list[str]]:
    """A program that does not hand its answer over, empty when it does nothing else, and what is lost by that."""
    try:
        rest = without_last_call(code, _FINAL)
    except DataError:
        rest = None
    if rest is None:
        return code, [f"what {_FINAL}() in the middle of a program does; it stays there"]
    return rest, [f"{_FINAL}() around the last value of a program"] if rest else []


def _program(step: Mapping[str, Any], uses: list[Use]) -> tuple[str, str] | None:
    """The name under which a program was run, and the program; ``None`` in a step of calls."""
    code, names = step.get("code_action"), [use.tool for use in uses]
    if not isinstance(code, str) and names != [_INTERPRETER]:
        return None
    return (names or [_INTERPRETER])[0], code if isinstance(code, str) else uses[0].text()


def _words_beside(said: str, code: str) -> str:
    """What was said beside a program, without the marks around it and the labels of the format."""
    try:
        whole = json.loads(said)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and _BLOCK in whole:  # structured outputs
        return str(whole.get("thought") or "").strip()
    return without_labels(*_outside(_without_mark(said), code))


def without_labels(*parts: str) -> str:
    """The words around programs without the labels that the format asks for: ``Thought:``, ``Code:``, its end marks."""
    cleaned = (_LABEL.sub("", _END.sub("", part).strip()) for part in parts)
    return _THOUGHT.sub("", "\n\n".join(filter(None, cleaned))).strip()


def _outside(said: str, code: str) -> Iterator[str]:
    for pattern in _BLOCKS:
        found = list(pattern.finditer(said))
        same = "\n\n".join(block[1].strip() for block in found) == code.strip()
        if found and (same or _FINAL in code):  # variables of that name are renamed before it is run
            begins = [0, *(block.end() for block in found)]
            ends = [*(block.start() for block in found), len(said)]
            yield from (said[begin:end] for begin, end in zip(begins, ends, strict=True))
            return
    before, is_there, after = said.partition(code.strip())
    if is_there and code.strip():
        yield _BEFORE.sub("", before)
        yield _AFTER.sub("", after)
    else:
        yield said


def _without_json(said: str, tool: str) -> str:
    """The words of a model that writes its call as JSON into them, without it."""
    begin, end = said.find("{"), said.rfind("}") + 1
    try:
        call = json.loads(said[begin:end], strict=False) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return said
    if not isinstance(call, dict) or call.get("name") != tool or "arguments" not in call:
        return said
    return f"{_LABEL.sub('', said[:begin])}{said[end:]}".strip()


def _worded(text: str, error: StepError | None) -> list[Turn]:
    if error is None:
        return [Turn(text)]
    return [Turn(thought=_without_mark(text).strip() if error.kind == _PARSING else text.strip())]


def _without_mark(said: str) -> str:
    """Words without the closing mark that smolagents puts behind them, whatever was said."""
    return said if f"<{_BLOCK}>" in said else said.removesuffix(_MARK)


def _untold(error: StepError | None, *, answered: bool) -> list[str]:
    """What is lost of an error that no call of a tool ended with."""
    if error is None:
        return []
    what = "an answer that was refused" if answered else "the error of a step without a tool call"
    return [f"{what} ({error.kind or error.message[:60]})"]


def _error(step: Mapping[str, Any]) -> StepError | None:
    told = step.get("error")
    if isinstance(told, Mapping):
        return StepError(str(told.get("type") or ""), str(told.get("message", dict(told))))
    return StepError("", told) if isinstance(told, str) and told else None


def _failed_calls(step: Mapping[str, Any], error: StepError) -> list[Use]:
    """The calls of a step that failed, out of the model's message or the error's text."""
    message = step.get("model_output_message")
    listed = message.get("tool_calls") if isinstance(message, Mapping) else None
    if isinstance(listed, list) and listed:
        return [_use(call) for call in listed]
    found = _FAILED.search(error.message)
    if found is None:
        return []
    for mark in re.finditer(r": |\Z", found["rest"]):
        try:
            arguments = ast.literal_eval(found["rest"][: mark.start()])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return [Use(found["tool"], arguments)]
    return []


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


def _result(step: Mapping[str, Any], error: StepError | None) -> str:
    told = step.get("observations")
    if error is not None:
        message = f"Error: {error.message}"
        return f"{told}\n{message}" if told else message
    if not isinstance(told, str):
        raise DataError("a tool call without observations")
    return told
