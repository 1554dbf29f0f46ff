"""The aligned form that LLaMA-Factory's processors take, and Agent-FLAN's conversations in it.

Agent-FLAN (arXiv 2403.12881) says of each message whether it is trained on. Its chat protocol is the template
``agent_flan``: every turn of the user or the system reads ``<|Human|>`` + U+0D46 + text + newline + blank, every turn of
the assistant ``<|Assistant|>`` + U+0D46 + text + U+0D3F + newline + blank. U+0D46 and U+0D3F are single tokens of
Llama-2, and U+0D3F ends a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from afm.errors import DataError
from afm.trajectory.chat import message_list

Aligned = dict[str, Any]
"""``_prompt``, ``_response``, ``_system``, ``_tools`` and the media columns of one row."""

_USER_SIDE = ("user", "observation")
_ASSISTANT_SIDE = ("assistant", "function")


def turn(role: str, content: str, *, loss: bool = True) -> dict[str, Any]:
    """One turn; ``loss`` matters for the assistant's alone."""
    return {"role": role, "content": content, "loss": loss}


def aligned_row(turns: Sequence[dict[str, Any]], *, system: str = "", tools: str = "") -> Aligned:
    """A row whose last turn is the response."""
    return {
        "_prompt": list(turns[:-1]),
        "_response": list(turns[-1:]),
        "_system": system,
        "_tools": tools,
        "_images": None,
        "_videos": None,
        "_audios": None,
    }


def alternating(prompt: Sequence[Mapping[str, Any]]) -> None:
    """Check that a prompt begins and ends with the user's side, in alternation with the assistant's.

    Raises:
        DataError: It does not.
    """
    sides = (_USER_SIDE, _ASSISTANT_SIDE)
    sound = all(message["role"] in sides[number % 2] for number, message in enumerate(prompt))
    if not sound or len(prompt) % 2 != 1:
        raise DataError("expected turns of user and assistant in alternation, the assistant's last")


TEMPLATE: Final = "agent_flan"
SPLITS: Final = (
    "agent_instruct_react",
    "agent_instruct_tflan",
    "toolbench_instruct_j1s1_3k",
    "toolbench_negative",
    "toolbench_react_10p",
    "toolbench_tflan_60p_r10r5u7",
    "toolbench_tflan_cot_30p",
)
HUMAN: Final = "<|Human|>\u0d46"
ASSISTANT: Final = "<|Assistant|>\u0d46"
TURN_END: Final = "\n "
END_TOKEN: Final = "\u0d3f"


def agent_flan_row(row: Mapping[str, Any], column: str, template: str) -> Aligned:
    """``{id, conversation: [{role, content, loss}]}`` as an aligned row.

    Turns of the user in a row become one: under the template ``agent_flan`` its text is what the protocol
    writes for them, under any other they are joined by a blank line.

    Args:
        column: Where the messages stand if not under ``conversation``.
        template: Name of the chat template in use.

    Raises:
        DataError: A message is no such message, or turns do not alternate.
    """
    column = column if column in row else "conversation"
    messages = message_list(row, column)
    roles = [message["role"] for message in messages]
    for number, (role, message) in enumerate(zip(roles, messages, strict=True)):
        place = f"{column}[{number}]"
        if role not in ("system", "user", "assistant"):
            raise DataError(f"{place}.role: got {role!r}, expected system, user or assistant")
        if message.get("loss") and role != "assistant":
            raise DataError(
                f"{place}.loss: the turn of the {role} has a loss, expected one of the assistant's only"
            )
        if role == "assistant" and message.get("loss") is None:
            raise DataError(f"{place}: no key 'loss'; expected true or false on each turn of the assistant")
    system = messages[0]["content"] if roles[0] == "system" else ""
    turns = _turns(messages[1:] if roles[0] == "system" else messages, column, template)
    return aligned_row(turns, system=system)


def _turns(messages: Sequence[Mapping[str, Any]], column: str, template: str) -> list[dict[str, Any]]:
    joint = TURN_END + HUMAN if template == TEMPLATE else "\n\n"
    turns = []
    for assistant, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        group = list(run)
        if assistant and len(group) > 1:
            raise DataError(f"{column}: got {len(group)} turns of the assistant in a row, expected one")
        content = joint.join(message["content"] for message in group)
        loss = bool(group[0].get("loss", False))
        turns.append(turn("assistant" if assistant else "user", content, loss=loss))
    if not turns or turns[0]["role"] != "user" or turns[-1]["role"] != "assistant":
        raise DataError(f"{column}: expected turns in alternation, the user's first and the assistant's last")
    return turns


def install_template() -> None:
    """Register the chat protocol with LLaMA-Factory (0.9.5, data/template.py)."""
    from llamafactory.data.formatter import EmptyFormatter, StringFormatter
    from llamafactory.data.template import TEMPLATES, register_template

    if TEMPLATE in TEMPLATES:
        return
    register_template(
        name=TEMPLATE,
        format_system=StringFormatter(slots=[HUMAN + "{{content}}" + TURN_END]),
        format_user=StringFormatter(slots=[HUMAN + "{{content}}" + TURN_END + ASSISTANT]),
        format_assistant=StringFormatter(slots=["{{content}}", {"eos_token"}, TURN_END]),
        format_prefix=EmptyFormatter(slots=[{"bos_token"}]),
        stop_words=[END_TOKEN],
        replace_eos=True,
        replace_jinja_template=True,  # else Llama-2's own [INST] is saved, and the model is served in another protocol
    )
