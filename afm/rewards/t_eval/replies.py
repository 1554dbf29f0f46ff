"""Replies as T-Eval's own program reads them: JSON or a Python literal, perhaps in a fence, or marked text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FENCE = "```json"
_NAMES = (re.compile(r"\w+\.\w+"), re.compile("FinishAction"))
_TURN_ENDS = (
    "<eoa>",
    "<TOKENS_UNUSED_1>",
    "<|im_end|>",
    "\nuser",
    "\nassistant",
    "\nUSER",
    "[INST]",
    "<|user|>",
)
FINISH = "FinishAction"
_LONGEST = 100_000


def cleaned(reply: str) -> str:
    """What the published program keeps of a reply before it scores it: the turn up to a mark of the next one, without a fence."""
    for mark in _TURN_ENDS:
        reply = reply.partition(mark)[0]
    return reply.strip().removeprefix(_FENCE).strip("`").strip()


def literal(text: str, opening: str = "", closing: str = "") -> Any:
    """The value in a reply: a Python literal, else JSON, else JSON with single quotes.

    Args:
        opening, closing: What stands before the first and behind the last of these characters is left out.

    Raises:
        ValueError: It is none of them.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    if _FENCE in text:
        text = text.partition(_FENCE)[2].strip("`")
    if opening:
        start = text.find(opening)
        text = text[start:] if start >= 0 else ""
    if closing:
        text = text[: text.rfind(closing) + 1]
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: ast.literal_eval(text),
        lambda: json.loads(text),
        lambda: json.loads(text.replace("'", '"')),
    )
    for attempt in attempts:
        try:
            return attempt()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError("neither JSON nor a literal")


def instructed(reply: str, form: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Action and arguments of a reply in the form asked for; ``None`` when it is not in it.

    Args:
        form: ``json``: an object with the keys that ``template`` names; else text with the marks of ``template`` around it.
    """
    return _of_object(reply, template) if form == "json" else _of_marks(reply, template)


def _of_object(reply: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    try:
        parts = literal(reply)
        _, action, args = (parts[template[key]] for key in _PARTS)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return action, args if isinstance(args, dict) else {}


def _of_marks(reply: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The published program takes the marks for regular expressions, groups of their own included."""
    marks = [str(template.get(f"{part}_{end}", "")) for part in _PARTS for end in ("start", "end")]
    pattern = "".join(f"{marks[2 * at]}(.*){marks[2 * at + 1]}" for at in range(len(_PARTS)))
    try:
        match = re.search(pattern, reply[:_LONGEST], re.DOTALL)
    except re.error:
        return None
    if match is None:
        return None
    _, action, text = match.groups("")[: len(_PARTS)]
    try:
        args = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        args = {}
    return action.strip(), args if isinstance(args, dict) else {}


_PARTS = ("thought", "action", "args")


def call(reply: Any, form: str = "json") -> dict[str, Any] | None:
    """``thought``, ``name`` and ``args`` of a call as a JSON object, given as text or decoded; ``None`` when it is none.

    What is absent is an empty text; arguments that are no object are an empty one, in the form ``str`` their text.
    """
    try:
        value = literal(reply, "{", "}") if isinstance(reply, str) else reply
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    said = {key: str(value[key]) if key in value else "" for key in ("thought", "name", "args")}
    args = value.get("args")
    return {**said, "args": said["args"] if form == "str" else args if isinstance(args, dict) else {}}


def names_alone(reply: str, name: str) -> bool:
    """Whether a reply in words names this tool and no other."""
    return name in reply and all(other == name for names in _NAMES for other in names.findall(reply))


def option(reply: str, form: str) -> Any:
    """The letter that a review ends in, behind the first colon, or its JSON verdict; ``None`` when there is none."""
    if form != "json":
        text = reply[reply.find(":") + 1 :].strip()
        return text[0] if text[:1] and text[0] in "ABCDE" else None
    try:
        verdict = literal(reply)["is_finished"]
        return {"review": verdict} if verdict in (True, False) else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def plan_of_json(reply: Any) -> list[tuple[str, str]]:
    """Names and arguments of the steps of a plan, by their ids; empty when it is none, or one step is wrong."""
    try:
        value = literal(reply, "[", "]") if isinstance(reply, str) else reply
        if not isinstance(value, list):
            return []
        steps = [(int(step["id"]), str(step["name"]), str(step["args"])) for step in value]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return []
    return [(name, args) for _, name, args in sorted(steps, key=lambda step: step[0])]


def plan_of_text(reply: str, tools: Sequence[str]) -> list[tuple[str, str]]:
    """The first tool that each sentence or line names, with the sentence as its arguments."""
    steps = []
    for sentence in reply[:_LONGEST].replace(". ", "\n").split("\n"):
        named = [(place, tool) for tool in tools if (place := sentence.find(tool)) >= 0]
        if named:
            steps.append((min(named, key=lambda step: step[0])[1], sentence))
    return steps
