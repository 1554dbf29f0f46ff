"""Replies as T-Eval's own program reads them: JSON or a Python literal, perhaps in a fence, or marked text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FENCE = "```json"
_NAME = re.compile(r"\w+\.\w+|FinishAction")
FINISH = "FinishAction"
_LONGEST = 100_000


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
        lambda: ast.literal_eval(text.strip()),
        lambda: json.loads(text),
        lambda: json.loads(text.replace("'", '"')),
    )
    for attempt in attempts:
        try:
            return attempt()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError("neither JSON nor a literal")


def instructed(reply: str, form: str, template: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Action and arguments of a reply in the form asked for; ``None`` when it is not in it.

    Args:
        form: ``json``: an object with the keys that ``template`` names; else text with the marks of ``template`` around it.
    """
    return _of_object(reply, template) if form == "json" else _of_marks(reply, template)


def _of_object(reply: str, template: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    try:
        found = literal(reply)
        _, action, args = (found[template[key]] for key in ("thought", "action", "args"))
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return str(action), dict(args) if isinstance(args, dict) else {}


def _of_marks(reply: str, template: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    marks = [re.escape(str(template.get(f"{part}_{end}", ""))) for part in _PARTS for end in ("start", "end")]
    pattern = "".join(f"{marks[2 * at]}(.*){marks[2 * at + 1]}" for at in range(len(_PARTS)))
    found = re.search(pattern, reply[:_LONGEST], re.DOTALL)
    if found is None:
        return None
    try:
        args = literal(found[3].strip())
    except ValueError:
        args = {}
    return found[2].strip(), args if isinstance(args, dict) else {}


_PARTS = ("thought", "action", "args")


def call(reply: Any) -> dict[str, Any] | None:
    """``name`` and ``args`` of a call as a JSON object, given as text or decoded; ``None`` when it is none."""
    try:
        found = literal(reply, "{", "}") if isinstance(reply, str) else reply
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    args = found.get("args")
    return {"name": str(found.get("name", "")), "args": args if isinstance(args, dict | str) else {}}


def names_alone(reply: str, name: str) -> bool:
    """Whether a reply in words names this tool and no other."""
    return name in reply and all(other == name for other in _NAME.findall(reply))


def plan_of_json(reply: Any) -> list[tuple[str, str]]:
    """Names and arguments of the steps of a plan, by their ids; empty when it is none, or one step is wrong."""
    try:
        found = literal(reply, "[", "]") if isinstance(reply, str) else reply
        steps = [(int(step["id"]), str(step["name"]), str(step["args"])) for step in found]
    except (ValueError, KeyError, TypeError):
        return []
    return [(name, args) for _, name, args in sorted(steps, key=lambda step: step[0])]


def plan_of_text(reply: str, tools: Sequence[str]) -> list[tuple[str, str]]:
    """The first tool that each sentence or line names, with the sentence as its arguments."""
    steps = []
    for sentence in reply[:_LONGEST].replace(". ", "\n").split("\n"):
        named = [(place, tool) for tool in tools if (place := sentence.find(tool)) >= 0]
        if named:
            steps.append((min(named, key=lambda one: one[0])[1], sentence))
    return steps
