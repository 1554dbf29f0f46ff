"""Sets of dialogues with agents, and alpaca rows made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import dropwhile, pairwise
from typing import Any

from afm.datasets.readers.row import (
    AlpacaRow,
    Conversation,
    Message,
    Reader,
    abbreviate,
    as_list,
    object_field,
    row_id,
    text_field,
)
from afm.datasets.schema import Task
from afm.errors import DataError

_ROLES = frozenset({"system", "user", "assistant"})


def _read_agent_flan(row: Mapping[str, Any], default: str) -> Conversation:
    """Agent-FLAN: ``{id, conversation: [{role, content, loss}]}``, as in internlm/Agent-FLAN (arXiv 2403.12881)."""
    turns = [object_field(turn, "conversation") for turn in as_list(row.get("conversation"))]
    if not any(turn.get("loss") for turn in turns):
        raise DataError("`conversation`: no turn has loss = true, so nothing could be learned from it")
    messages = tuple(_message(turn) for turn in turns)
    return Conversation(id=row_id(row, default, "id"), messages=messages, data_source="agent_flan")


def _message(turn: Mapping[str, Any]) -> Message:
    role, loss = turn.get("role"), turn.get("loss")
    if role not in _ROLES:
        raise DataError(f"`conversation`: role {role!r}, expected one of {sorted(_ROLES)}")
    if not isinstance(loss, bool):
        raise DataError(f"`conversation`: loss {abbreviate(loss)}, expected true or false")
    text_field(turn, "content")  # checked, and then taken with the blanks around it, which are trained on too
    return Message(role=role, content=turn["content"], loss=loss)


AGENT_FLAN = Reader("agent_flan", "agent_flan", _read_agent_flan, makes_conversations=True)


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


def _read_sharegpt(row: Mapping[str, Any], default: str) -> Conversation:
    """ShareGPT: ``{id, conversations: [{from, value}]}``, as in ShareGPT_V3_unfiltered_cleaned_split.json.

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
    return Conversation(
        id=row_id(row, default, "id"), messages=tuple(system + spoken), data_source="sharegpt"
    )


def _sharegpt_message(turn: Mapping[str, Any]) -> Message:
    role = _SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None:
        raise DataError(
            f"`conversations`: from {abbreviate(turn.get('from'))}, expected one of {sorted(_SHAREGPT_ROLES)}"
        )
    text_field(turn, "value")
    return Message(role=role, content=turn["value"], loss=role == "assistant")


SHAREGPT = Reader("sharegpt", "sharegpt", _read_sharegpt, makes_conversations=True)


_PRINTED = re.compile(r"<interpreter>(.*?)</interpreter>", re.DOTALL)
_ASKED = "*user question:*"
_REMINDER = "Remember to place the final answer"
_BOX = "\\boxed{"


def _read_retool(row: Mapping[str, Any], default: str) -> Conversation:
    r"""ReTool's cold-start trajectories: ``{messages: [{role, content}]}``, as in JoeYing/ReTool-SFT.

    One assistant turn holds thoughts, programs in ``<code>`` and what they printed in ``<interpreter>``. It is cut there, so
    that what the interpreter wrote becomes a turn of the role ``tool``, on which nothing is trained.

    ``retool_questions`` takes the problems alone, with the number in the last ``\boxed{}`` as gold answer: to be worked on by
    another agent. Around a problem stand an instruction and a reminder of ReTool's own answer format, which are taken away.
    """
    turns = [object_field(turn, "messages") for turn in as_list(row.get("messages"))]
    messages = [message for turn in turns for message in _messages(turn)]
    if [message.role for message in messages if message.role != "system"][:2] != ["user", "assistant"]:
        raise DataError(
            f"`messages`: expected a user turn and the reply, got {[m.role for m in messages][:4]}"
        )
    return Conversation(id=row_id(row, default, "id"), messages=tuple(messages), data_source="retool")


def _messages(turn: Mapping[str, Any]) -> Iterator[Message]:
    role, content = turn.get("role"), text_field(turn, "content")
    if role not in _ROLES:
        raise DataError(f"`messages`: role {role!r}, expected one of {sorted(_ROLES)}")
    if role != "assistant":
        yield Message(role=role, content=content, loss=False)
        return
    position = 0
    for printed in _PRINTED.finditer(content):
        if written := content[position : printed.start()].strip():
            yield Message(role="assistant", content=written, loss=True)
        yield Message(role="tool", content=printed[1].strip(), loss=False)
        position = printed.end()
    rest = content[position:].strip()
    if re.search(r"</?interpreter>", rest):
        raise DataError("an <interpreter> block is never closed, or never opened")
    if rest:
        yield Message(role="assistant", content=rest, loss=True)


def _question(row: Mapping[str, Any], default: str) -> Task:
    conversation = _read_retool(row, default)
    asked, *written = (
        message.content for message in conversation.messages if message.role in ("user", "assistant")
    )
    answer = boxed(written[-1])
    if not answer:
        raise DataError("the last reply has no \\boxed{} answer")
    return Task(id=conversation.id, question=_problem(asked), ground_truth=answer, data_source="retool")


def _problem(asked: str) -> str:
    body = asked.rpartition(_ASKED)[2].strip()
    lead, blank, rest = body.partition("\n")
    body = rest if blank and "\\boxed" in lead else body
    return body.partition(_REMINDER)[0].strip() or asked.strip()


def boxed(text: str) -> str:
    r"""What the last ``\boxed{..}`` of a text holds, braces within it included; empty when there is none."""
    begin = text.rfind(_BOX)
    depth = 1
    for place in range(begin + len(_BOX), len(text) if begin >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len(_BOX) : place].strip()
    return ""


RETOOL_QUESTIONS = Reader("retool_questions", "retool", _question)
RETOOL = Reader("retool", "retool", _read_retool, makes_conversations=True)


def _read_afm_sft(row: Mapping[str, Any], default: str) -> AlpacaRow:
    """AFM's SFT sets: alpaca rows ``{instruction, input, output, system}``, as in PersonalAILab/AFM-*-SFT-Dataset."""
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


AFM_SFT = Reader("afm_sft", "", _read_afm_sft)
