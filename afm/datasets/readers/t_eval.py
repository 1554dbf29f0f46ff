"""T-Eval: one JSON object a file, ``{id: {origin_prompt, ground_truth, meta_data | meta, template}}``, as in lovesnowbest/T-Eval.

What an item measures stands in the file's name (``instruct_v2.json``, ``plan_json_v2.json``, ``retrieve_str_v2.json``,
``reason_retrieve_understand_json_v2.json``), which therefore must be kept. An item of the last kind measures three abilities, so it is three tasks with one chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from afm.datasets.readers.row import Row, abbreviate, row_id
from afm.datasets.schema import Task
from afm.errors import DataError

_KINDS: dict[str, tuple[str, ...]] = {
    "reason_retrieve_understand": ("reason", "retrieve", "understand"),
    "instruct": ("instruct",),
    "plan": ("plan",),
    "retrieve": ("retrieve",),
    "understand": ("understand",),
    "reason": ("reason",),
    "review": ("review",),
}
_GOLD_KEYS = {"instruct": ("action", "args"), "review": ("answer",)}
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "function": "user"}
"""A function's answer is given as the user's, because chat templates differ in what they make of other roles."""


def unpack_t_eval(stem: str, whole: Row) -> Iterator[Row]:
    """The items of a file, one for each ability that they measure."""
    kinds = next((kinds for name, kinds in _KINDS.items() if stem.startswith(f"{name}_")), None)
    if kinds is None:
        raise DataError(
            f"the file's name begins with none of T-Eval's: {', '.join(_KINDS)}; keep it as it was published"
        )
    for key, item in whole.items():
        for kind in kinds:
            name = f"{stem}/{key}" if len(kinds) == 1 else f"{stem}/{key}/{kind}"
            yield {"id": name, "kind": kind, "item": item}


def read_t_eval(row: Row, default: str) -> Task:
    """One item of a file, as :func:`unpack_t_eval` gives it."""
    item = row.get("item")
    if not isinstance(item, Mapping):
        raise DataError(f"expected an object of origin_prompt and ground_truth, got {abbreviate(item)}")
    gold = item.get("ground_truth")
    if not isinstance(gold, Mapping | list | str) or not gold:
        raise DataError(f"`ground_truth`: expected an object, a list or a text, got {abbreviate(gold)}")
    messages = _messages(item.get("origin_prompt"))
    kind, form = str(row["kind"]), _form(item, str(row["id"]))
    _check_keys(kind, gold)
    return Task(
        id=row_id(row, default, "id"),
        question=messages[-1]["content"],
        ground_truth=gold,
        data_source=f"t_eval_{kind}_{form}",
        extra_info={
            "t_eval": {
                "kind": kind,
                "form": form,
                "template": item.get("template") or {},
                "tools": _meta(item).get("API_list") or [],
            },
        },
        prompt=tuple(messages),
    )


def _check_keys(kind: str, gold: Any) -> None:
    keys = _GOLD_KEYS.get(kind, ())
    if keys and not (isinstance(gold, Mapping) and all(key in gold for key in keys)):
        raise DataError(
            f"`ground_truth`: expected an object with {' and '.join(keys)}, got {abbreviate(gold)}"
        )


def _meta(item: Row) -> Row:
    meta = item.get("meta_data") or item.get("meta") or {}
    return meta if isinstance(meta, Mapping) else {}


def _form(item: Row, name: str) -> str:
    """``json`` or ``str``: as the item says, else as the file is called."""
    meta = _meta(item)
    by_name = "str" if "_str_" in name.split("/")[0] else "json"
    value = meta.get("response_format") or meta.get("prompt_type") or by_name
    form = {"json": "json", "str": "str", "string": "str"}.get(str(value))
    if form is None:
        raise DataError(f"expected a response in the form json or str, got {abbreviate(value)}")
    return form


def _messages(prompt: Any) -> list[dict[str, str]]:
    """The conversation with turns of one role after another merged."""
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"`origin_prompt`: expected a list of messages, got {abbreviate(prompt)}")
    merged: list[dict[str, str]] = []
    for message in prompt:
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
        content = message.get("content") if role else None
        if role is None or not isinstance(content, str):
            raise DataError(
                f"`origin_prompt`: expected role ({', '.join(_ROLES)}) and content, got {abbreviate(message)}"
            )
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += f"\n\n{content}"
        else:
            merged.append({"role": role, "content": content})
    if not merged[-1]["content"].strip():
        raise DataError("`origin_prompt`: the last message is empty")
    return merged
