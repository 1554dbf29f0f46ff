"""Readers of dialogues with agents, of tasks that are chats or come from chats, and of AFM's alpaca rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from itertools import dropwhile, pairwise
from typing import Any

from afm.datasets.readers.row import (
    AlpacaRow,
    ChatMessage,
    Conversation,
    Row,
    abbreviate,
    as_list,
    object_field,
    text_field,
)
from afm.datasets.schema import Task
from afm.errors import DataError
from afm.trajectory.answer import boxed
from afm.trajectory.chat import row_id

_ROLES = frozenset({"system", "user", "assistant"})


def read_agent_flan(row: Row, default: str) -> Conversation:
    """Read Agent-FLAN: ``{id, conversation: [{role, content, loss}]}``, as in internlm/Agent-FLAN (arXiv 2403.12881)."""
    turns = [object_field(turn, "conversation") for turn in as_list(row.get("conversation"))]
    if not any(turn.get("loss") for turn in turns):
        raise DataError("`conversation`: no turn has loss = true, so there is nothing to train on")
    messages = tuple(_message(turn) for turn in turns)
    return Conversation(id=row_id(row) or default, messages=messages)


def _message(turn: Row) -> ChatMessage:
    role, loss = turn.get("role"), turn.get("loss")
    if role not in _ROLES:
        raise DataError(f"`conversation`: role {role!r}, expected one of {sorted(_ROLES)}")
    if not isinstance(loss, bool):
        raise DataError(f"`conversation`: loss {abbreviate(loss)}, expected true or false")
    text_field(turn, "content")  # only a check, because outer whitespace is trained on too
    return ChatMessage(role=role, content=turn["content"], loss=loss)


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}


def read_sharegpt(row: Row, default: str) -> Conversation:
    """Read ShareGPT: ``{id, conversations: [{from, value}]}``, as in ShareGPT_V3_unfiltered_cleaned_split.json.

    Long chats are published in pieces. An answer without its question, or a question without its answer, is dropped.
    """
    turns = [
        _sharegpt_message(object_field(turn, "conversations")) for turn in as_list(row.get("conversations"))
    ]
    system = [turn for turn in turns[:1] if turn.role == "system"]
    spoken = list(dropwhile(lambda turn: turn.role != "user", turns[len(system) :]))
    if spoken and spoken[-1].role == "user":
        spoken = spoken[:-1]
    if not spoken:
        raise DataError("`conversations`: no question with an answer")
    for first, second in pairwise(spoken):
        if first.role == second.role or second.role == "system":
            raise DataError(f"`conversations`: a turn of the {second.role} after one of the {first.role}")
    return Conversation(id=row_id(row) or default, messages=tuple(system + spoken))


def _sharegpt_message(turn: Row) -> ChatMessage:
    role = _SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None:
        raise DataError(
            f"`conversations`: from {abbreviate(turn.get('from'))}, expected one of {sorted(_SHAREGPT_ROLES)}"
        )
    text_field(turn, "value")
    return ChatMessage(role=role, content=turn["value"], loss=role == "assistant")


_PRINTED = re.compile(r"<interpreter>(.*?)</interpreter>", re.DOTALL)
_ASKED = "*user question:*"
_REMINDER = "Remember to place the final answer"


def read_retool(row: Row, default: str) -> Conversation:
    r"""Read ReTool's cold-start trajectories: ``{messages: [{role, content}]}``, as in JoeYing/ReTool-SFT.

    One assistant turn holds thoughts, programs in ``<code>`` and their output in ``<interpreter>``. It is split there, so
    that the output becomes a turn of the role ``tool``, which is not trained on.
    """
    turns = [object_field(turn, "messages") for turn in as_list(row.get("messages"))]
    messages = [message for turn in turns for message in _messages(turn)]
    if [message.role for message in messages if message.role != "system"][:2] != ["user", "assistant"]:
        raise DataError(
            f"`messages`: expected a user turn and the reply, got {[m.role for m in messages][:4]}"
        )
    return Conversation(id=row_id(row) or default, messages=tuple(messages))


def _messages(turn: Row) -> Iterator[ChatMessage]:
    role, content = turn.get("role"), text_field(turn, "content")
    if role not in _ROLES:
        raise DataError(f"`messages`: role {role!r}, expected one of {sorted(_ROLES)}")
    if role != "assistant":
        yield ChatMessage(role=role, content=content, loss=False)
        return
    position = 0
    for printed in _PRINTED.finditer(content):
        if written := content[position : printed.start()].strip():
            yield ChatMessage(role="assistant", content=written, loss=True)
        yield ChatMessage(role="tool", content=printed[1].strip(), loss=False)
        position = printed.end()
    rest = content[position:].strip()
    if re.search(r"</?interpreter>", rest):
        raise DataError("an <interpreter> block is never closed, or never opened")
    if rest:
        yield ChatMessage(role="assistant", content=rest, loss=True)


def read_retool_question(row: Row, default: str) -> Task:
    r"""Read only the problem of a ReTool row, with the content of the last ``\boxed{}`` as gold answer, for another agent.

    The instruction before it and the reminder of ReTool's answer format after it are removed.
    """
    conversation = read_retool(row, default)
    asked, *written = (
        message.content for message in conversation.messages if message.role in ("user", "assistant")
    )
    answer = boxed(written[-1])
    if not answer:
        raise DataError("the last reply has no \\boxed{} answer")
    return Task(id=conversation.id, question=_problem(asked), ground_truth=answer)


def _problem(asked: str) -> str:
    body = asked.rpartition(_ASKED)[2].strip()
    lead, blank, rest = body.partition("\n")
    body = rest if blank and "\\boxed" in lead else body
    return body.partition(_REMINDER)[0].strip() or asked.strip()


def read_afm_sft(row: Row, default: str) -> AlpacaRow:
    """Read AFM's SFT sets: alpaca rows ``{instruction, input, output, system}``, as in PersonalAILab/AFM-*-SFT-Dataset."""
    texts = {key: row.get(key) for key in ("input", "system")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise DataError(f"`{key}`: expected a text, got {abbreviate(value)}")
    text_field(row, "instruction")
    text_field(row, "output")
    return AlpacaRow(
        instruction=row["instruction"],
        input=texts["input"] or "",
        output=row["output"],
        system=texts["system"] or None,
    )


_EXCHANGE = re.compile(
    r"\s*USER:(?P<asked>.*?)\n\s*ASSISTANT:(?P<reply>.*?)(?:<\|endoftext\|>|\n\s*(?:USER|FUNCTION RESPONSE):|\Z)",
    re.DOTALL,
)
_CALL = "<functioncall>"
_CALLED = re.compile(r'"name"\s*:\s*"([^"]+)"')
_TWIN = "without_functions"


def unpack_glaive(_: str, row: Row) -> Iterator[Row]:
    """Yield the row, and if its answer is a call, also the question without any functions."""
    yield row
    exchange = _EXCHANGE.match(str(row.get("chat")))
    if exchange and _CALL in exchange["reply"] and _functions(str(row.get("system"))):
        yield {**row, _TWIN: True}


def read_glaive(row: Row, default: str) -> Task:
    """Read function calling: ``{system, chat}`` as in glaiveai/glaive-function-calling-v2, the rows of Agent-H.

    Agent-H (Agent-FLAN, arXiv 2403.12881) has four cases: tools are offered or not, and the question needs one or not. The
    functions and the first answer of a row decide its case.
    """
    exchange = _EXCHANGE.match(text_field(row, "chat"))
    question, answer = (exchange["asked"].strip(), exchange["reply"].strip()) if exchange else ("", "")
    if not question or not answer:
        raise DataError(
            f"`chat`: expected texts after `USER:` and `ASSISTANT:`, got {abbreviate(row['chat'])}"
        )
    system = text_field(row, "system").removeprefix("SYSTEM:").strip()
    tools, asked = _functions(system), _CALL in answer
    called = _CALLED.search(answer)
    if asked and (called is None or (called[1] not in tools)):
        raise DataError(f"`chat`: the answer calls none of the functions {tools}, got {abbreviate(answer)}")
    if row.get(_TWIN):
        system, tools = "", []
    case = f"{'given' if tools else 'absent'}_{'asked' if asked else 'not_asked'}"
    user = {"role": "user", "content": question}
    return Task(
        id=_glaive_id(row, default),
        question=question,
        ground_truth=called[1] if called and asked and tools else answer,
        data_source=f"agent_h_{case}",
        extra_info={"agent_h": {"tools": tools, "asked": asked}},
        prompt=({"role": "system", "content": system}, user) if system else (user,),
    )


def _glaive_id(row: Row, default: str) -> str:
    """Return an id with a digest of the text, because rows have no ids, and rows of an array may share one line."""
    digest = hashlib.blake2b(f"{row['system']}{row['chat']}".encode("utf-8", "surrogatepass"), digest_size=6)
    name = row_id(row) or f"{default}-{digest.hexdigest()}"
    return f"{name}/{_TWIN}" if row.get(_TWIN) else name


def _functions(system: str) -> list[str]:
    """Return the names of the functions, which are consecutive JSON objects in the text."""
    names, place, decoder = [], 0, json.JSONDecoder(strict=False)
    while (place := system.find("{", place)) >= 0:
        try:
            function, place = decoder.raw_decode(system, place)
        except ValueError:
            place += 1
            continue
        name = function.get("name")
        if isinstance(name, str):
            names.append(name)
    return names


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
_T_EVAL_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "function": "user"}
"""Roles of the chat. A function's answer becomes a user turn, because chat templates treat other roles differently."""


def unpack_t_eval(stem: str, whole: Row) -> Iterator[Row]:
    """Unpack T-Eval: one JSON object per file, ``{id: {origin_prompt, ground_truth, meta_data | meta, template}}``.

    The layout is that of lovesnowbest/T-Eval. The file name must stay as published, because it determines what an item
    measures (``instruct_v2.json``, ``plan_json_v2.json``, ``retrieve_str_v2.json``,
    ``reason_retrieve_understand_json_v2.json``). An item of the last kind measures three abilities, so it becomes three
    tasks with one chat.
    """
    kinds = next((kinds for name, kinds in _KINDS.items() if stem.startswith(f"{name}_")), None)
    if kinds is None:
        raise DataError(
            f"the file name begins with no kind of T-Eval ({', '.join(_KINDS)}); keep the published file name"
        )
    for key, item in whole.items():
        for kind in kinds:
            name = f"{stem}/{key}" if len(kinds) == 1 else f"{stem}/{key}/{kind}"
            yield {"id": name, "kind": kind, "item": item}


def read_t_eval(row: Row, default: str) -> Task:
    """Read one item of :func:`unpack_t_eval`."""
    item = row.get("item")
    if not isinstance(item, Mapping):
        raise DataError(f"expected an object of origin_prompt and ground_truth, got {abbreviate(item)}")
    gold = item.get("ground_truth")
    if not isinstance(gold, Mapping | list | str) or not gold:
        raise DataError(f"`ground_truth`: expected an object, a list or a text, got {abbreviate(gold)}")
    messages = _t_eval_messages(item.get("origin_prompt"))
    kind, form = str(row["kind"]), _form(item, str(row["id"]))
    _check_keys(kind, gold)
    return Task(
        id=row_id(row) or default,
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
    """Return ``json`` or ``str``, from the item or else from the file name."""
    meta = _meta(item)
    by_name = "str" if "_str_" in name.split("/")[0] else "json"
    value = meta.get("response_format") or meta.get("prompt_type") or by_name
    form = {"json": "json", "str": "str", "string": "str"}.get(str(value))
    if form is None:
        raise DataError(f"expected a response in the form json or str, got {abbreviate(value)}")
    return form


def _t_eval_messages(prompt: Any) -> list[dict[str, str]]:
    """Return the conversation with consecutive turns of one role merged."""
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"`origin_prompt`: expected a list of messages, got {abbreviate(prompt)}")
    merged: list[dict[str, str]] = []
    for message in prompt:
        role = _T_EVAL_ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
        content = message.get("content") if role else None
        if role is None or not isinstance(content, str):
            raise DataError(
                f"`origin_prompt`: expected role ({', '.join(_T_EVAL_ROLES)}) and content, got {abbreviate(message)}"
            )
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += f"\n\n{content}"
        else:
            merged.append({"role": role, "content": content})
    if not merged[-1]["content"].strip():
        raise DataError("`origin_prompt`: the last message is empty")
    return merged
