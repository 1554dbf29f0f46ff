"""Convert rows of every supported layout to LLaMA-Factory's aligned form, or report why that is not possible.

The aligned form of a row has ``_prompt`` (turns of user and assistant, the user's last), ``_response`` (one assistant
turn; two for preference data), ``_system`` and ``_tools``. Each turn is ``{role, content, loss}``.

Importing this module imports LLaMA-Factory; call :func:`llamafactory_patch.engine.load_engine` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final

from llamafactory.data.converter import get_dataset_converter
from llamafactory.data.parser import DatasetAttr
from pydantic import ValidationError

from afm.agents import AgentSpec, agent_of_model, load_agent
from afm.errors import AfmError, DataError, json_word
from afm.trajectory import Author, validate
from afm.trajectory.chat import loss_flag, message_list, text_of, tools_text
from afm.trajectory.io import explain
from afm.trajectory.record import Record
from llamafactory_patch.conversations import (
    Aligned,
    agent_flan_row,
    aligned_row,
    alternating,
    openai_row,
    turn,
    without_nulls,
)
from llamafactory_patch.masks import segments_by_tag
from llamafactory_patch.prompts import RowPrompts

NOT_KEPT: Final = "not kept: "
"""Begins the reason of a record that a filter dropped; this is not an error in the file."""


def record_row(row: Mapping[str, Any], agent_named: Callable[[str], AgentSpec]) -> Aligned:
    """Convert a record of this project: the prompt of its agent, and the whole response.

    Raises:
        DataError: The row is not a record, breaks the rules of its agent, or was dropped by a filter.
    """
    try:
        record = Record.model_validate(row)
    except ValidationError as error:
        raise DataError(explain(error)) from None
    if not record.kept:
        raise DataError(f"{NOT_KEPT}{record.reason or 'no reason given'}")
    spec = agent_named(record.agent)
    if issues := validate(record.segments, spec):
        raise DataError(f"record {record.id!r} breaks the rules of agent {spec.name!r}: {issues[0]}")
    question = turn("user", spec.user_message(record.question))
    return aligned_row([question, turn("assistant", record.text)])


@dataclass(frozen=True)
class Converter:
    """Converts the rows of one data set; ``trajectory``, ``agent_flan`` and ``openai_messages`` are our own formats.

    Attributes:
        attr: The data set's entry in ``dataset_info.json``.
        folder: Folder of its file. An ``agent.yaml`` there replaces the shipped agent for records of that agent.
        tags: Tags of the environment; empty if nothing is masked.
        template: Name of the chat template that renders the rows.
        media_dir: Folder of the images, videos and sounds that rows name.
        agent: Name or YAML of the agent to train; records get its prompt, and records of other agents are refused.
            Empty if each record may name its own agent.
        prompts: Prompts of the rows.
        from_table: Whether rows come from a table (parquet, a hub), where an absent key is null.
    """

    attr: DatasetAttr
    folder: str
    tags: tuple[str, ...]
    template: str
    media_dir: str = "."
    agent: str = ""
    from_table: bool = False
    prompts: RowPrompts = field(default_factory=RowPrompts)

    def __call__(self, row: Any) -> dict[str, Any]:
        """Return the aligned form of ``row``.

        Raises:
            DataError: The row cannot be trained on. The message has no location.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"got {json_word(row)}, expected an object")
        try:
            aligned = self._aligned(row)
            self._check_turns(aligned)
            aligned = self.prompts.asked(aligned, row, record=self.attr.formatting == "trajectory")
        except DataError:
            raise
        except AfmError as error:
            raise DataError(str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(
                f"cannot be read as {self.attr.formatting!r}: {type(error).__name__}: {error}"
            ) from None
        return aligned

    @cached_property
    def _agents(self) -> dict[str, AgentSpec]:
        """Agents by name, each read once."""
        return {}

    def _agent_named(self, name: str) -> AgentSpec:
        if name not in self._agents:
            spec = load_agent(self.agent) if self.agent else agent_of_model(self.folder, name)
            if self.agent and name != spec.name:
                raise DataError(f"agent: got a record of {name!r}, but the agent to train is {spec.name!r}")
            self._agents[name] = spec
        return self._agents[name]

    def _aligned(self, row: Mapping[str, Any]) -> Aligned:
        formatting: str = self.attr.formatting
        if formatting == "trajectory":
            return record_row(row, self._agent_named)
        if formatting == "agent_flan":
            return agent_flan_row(row, str(self.attr.messages), self.template)
        if formatting == "openai_messages":
            return openai_row(without_nulls(row) if self.from_table else row, self.attr, self.template)
        if formatting == "alpaca":
            return _alpaca(row, self.attr, self._stock)
        if formatting == "sharegpt":
            return _sharegpt(row, self.attr, self._stock)
        return self._stock(row)

    def _stock(self, row: Mapping[str, Any]) -> Aligned:
        """Apply LLaMA-Factory's own conversion to a row that it does not skip."""
        place = SimpleNamespace(media_dir=self.media_dir)
        aligned: Aligned = get_dataset_converter(self.attr.formatting, self.attr, place)(dict(row))
        for key in ("_prompt", "_response"):
            aligned[key] = [turn(message["role"], message["content"]) for message in aligned[key]]
        aligned["_system"] = text_of({"system": aligned["_system"] or ""}, "system")
        aligned["_tools"] = tools_text(aligned["_tools"])
        return aligned

    def _check_turns(self, aligned: Aligned) -> None:
        prompt, response = aligned["_prompt"], aligned["_response"]
        alternating(prompt)
        wanted = 2 if self.attr.ranking or self.attr.kto_tag else 1
        if len(response) != wanted:
            raise DataError(f"got {len(response)} responses, expected {wanted}")
        written = [self._agents_text(message) for message in response]
        for message in prompt:
            self._agents_text(message)
        if not (any if self.attr.kto_tag else all)(text.strip() for text in written):
            raise DataError("the response is empty, or has only observations and blanks")

    def _agents_text(self, message: Mapping[str, Any]) -> str:
        """Return the agent's part of a turn; check the tags of the assistant's turns."""
        content = text_of(message, "content")
        if message["role"] != "assistant" or not self.tags:
            return content
        segments = segments_by_tag(content, self.tags)
        return "".join(segment.text for segment in segments if segment.author is Author.AGENT)


Stock = Callable[[Mapping[str, Any]], Aligned]


def _alpaca(row: Mapping[str, Any], attr: DatasetAttr, stock: Stock) -> Aligned:
    """Apply the stock conversion; check texts, treat absent optional keys as empty, and use the key ``system``."""
    system = attr.system or "system"
    columns = (attr.prompt, attr.query, system)
    filled = {**dict.fromkeys(filter(None, (*columns, attr.history, attr.tools))), **row}
    for column in columns:
        if column and filled[column] is not None:
            text_of(filled, column)
    if not any(filled[column] for column in (attr.prompt, attr.query) if column):
        raise DataError(f"got no question, expected a text under {attr.prompt!r}")
    for column in (attr.chosen, attr.rejected) if attr.ranking else (attr.response,):
        text_of(filled, str(column))
    if attr.kto_tag and not isinstance(filled.get(attr.kto_tag), bool):
        raise DataError(f"{attr.kto_tag}: got {filled.get(attr.kto_tag)!r}, expected true or false")
    if attr.history:
        _check_history(attr.history, filled[attr.history] or [])
    return {**stock(filled), "_system": filled[system] or ""}


def _check_history(column: str, history: Any) -> None:
    """Check a history. The stock conversion skips one that is not a list, and splits texts of two characters."""
    for turns in history if isinstance(history, list) else [history]:
        both = isinstance(turns, list) and len(turns) == 2
        if not both or not all(isinstance(text, str) for text in turns):
            raise DataError(f"{column}: got {str(turns)[:80]}, expected pairs of a question and an answer")


def _sharegpt(row: Mapping[str, Any], attr: DatasetAttr, stock: Stock) -> Aligned:
    """Apply the stock conversion; report rows that it would silently skip, and keep ``loss`` flags."""
    column = str(attr.messages)
    messages = message_list(row, column, str(attr.role_tag), str(attr.content_tag))
    turns = messages[1:] if messages[0][attr.role_tag] == attr.system_tag else messages
    sides = ((attr.user_tag, attr.observation_tag), (attr.assistant_tag, attr.function_tag))
    for number, message in enumerate(turns):
        role, expected = message[attr.role_tag], sides[number % 2]
        if role not in expected:
            place = f"{column}[{len(messages) - len(turns) + number}].{attr.role_tag}"
            raise DataError(f"{place}: got {role!r}, expected {' or '.join(map(repr, expected))}")
    if len(turns) % 2 != int(bool(attr.ranking)):
        last = "the user's" if attr.ranking else "the assistant's"
        raise DataError(f"{column}: got {len(turns)} turns, expected alternating turns, {last} last")
    for side in (attr.chosen, attr.rejected) if attr.ranking else ():
        answer = row.get(str(side))
        if not isinstance(answer, Mapping) or answer.get(attr.role_tag) not in sides[1]:
            raise DataError(f"{side}: got {str(answer)[:80]!r}, expected a message of the assistant")
        text_of(answer, str(attr.content_tag))
    if attr.kto_tag and not isinstance(row.get(attr.kto_tag), bool):
        raise DataError(f"{attr.kto_tag}: got {row.get(attr.kto_tag)!r}, expected true or false")
    aligned = stock({**dict.fromkeys(filter(None, (attr.system, attr.tools))), **row})
    answers = [row[side] for side in (attr.chosen, attr.rejected)] if attr.ranking else turns[-1:]
    sources = (*turns, *answers)  # the one answer of KTO is before or after an empty one
    for message, source in zip((*aligned["_prompt"], *aligned["_response"]), sources, strict=False):
        message["loss"] = loss_flag(source)
    return aligned
