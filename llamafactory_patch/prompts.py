"""Prompts of an agent's rows in training: that of the agent, of the row or of a file; and the record of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, PromptMode, PromptSource, PromptTemplate, RoleKind, load_agent
from afm.agents.load import without_tools
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord, PromptTally, check_prompts, record_of_model
from afm.agents.prompt_source import QUESTION_MARK
from afm.errors import ConfigError, DataError
from afm.terminal import plural
from llamafactory_patch.conversations import Aligned, turn
from llamafactory_patch.engine import Arguments
from llamafactory_patch.settings import SftSettings

ASKED_COLUMN = "_asked"
"""Column of aligned rows with a :class:`PromptState`."""


class PromptState(StrEnum):
    """What was done with the prompt of a row."""

    AS_IS = "as_is"
    """The row already has the wanted prompt."""
    REWRITTEN = "rewritten"
    """The row had another instruction; its question was put into the wanted prompt."""
    OTHER = "other"
    """The row is not one of the agent, but a chat or a question without instruction and tags. It is unchanged."""


@dataclass(frozen=True)
class RowPrompts:
    """Gives rows the configured prompt.

    Attributes:
        agent: Name or YAML of the agent to train; without one, all rows are unchanged.
    """

    source: PromptSource = field(default_factory=PromptSource)
    agent: str = ""

    def asked(self, aligned: Aligned, row: Mapping[str, Any], *, record: bool = False) -> Aligned:
        """Return the row with the wanted prompt and its :class:`PromptState`.

        Args:
            row: The row as in its file.
            record: Whether it is a record of this project, which already has the prompt of its agent.

        Raises:
            DataError: The wanted prompt cannot be built from the row.
        """
        if not self.agent:
            return {**aligned, ASKED_COLUMN: PromptState.OTHER}
        if record and self.source.mode is PromptMode.ROW:
            raise DataError("prompt=row, but a record has no prompt; set prompt=own or prompt=FILE")
        if not record and not self._is_agents(aligned, row):
            return {**aligned, ASKED_COLUMN: PromptState.OTHER}
        if self.source.mode is PromptMode.ROW or self._fits(aligned, row):
            return {**aligned, ASKED_COLUMN: PromptState.AS_IS}
        messages = self.source.messages(self._spec, self._question(aligned))
        system = "".join(message["content"] for message in messages[:-1])
        prompt = [turn("user", messages[-1]["content"])]
        return {**aligned, "_prompt": prompt, "_system": system, ASKED_COLUMN: PromptState.REWRITTEN}

    def known(self) -> tuple[PromptTemplate, ...]:
        """Return the prompts to look for in rows."""
        if not self.agent:
            return ()
        file = [self.source.template] if self.source.template else []
        return (*file, *self._own)

    @cached_property
    def _spec(self) -> AgentSpec:
        return load_agent(self.agent)

    @cached_property
    def _own(self) -> tuple[PromptTemplate, ...]:
        """The agent's prompt with its tools, and without them."""
        return tuple(map(PromptTemplate.of_agent, (self._spec, without_tools(self._spec))))

    def _is_agents(self, aligned: Aligned, row: Mapping[str, Any]) -> bool:
        """Return whether a row is one question with an answer in the agent's tags."""
        one_turn = len(aligned["_prompt"]) == 1 and not aligned["_tools"]
        if not one_turn or _named(row) == "":
            return False
        return any(_is_trajectory(answer["content"], self._spec) for answer in aligned["_response"])

    def _fits(self, aligned: Aligned, row: Mapping[str, Any]) -> bool:
        """Return whether the user turn is the wanted prompt, the prompt without tools, or that of the agent named in the row."""
        own, bare = self._own
        wanted = self.source.template if self.source.template is not None else own
        if _question_in(wanted, aligned) is not None:
            return wanted is own or aligned["_system"] == wanted.system
        return _question_in(bare, aligned) is not None or self._is_of_another(aligned, row)

    def _is_of_another(self, aligned: Aligned, row: Mapping[str, Any]) -> bool:
        name = _named(row)
        if name is None or name == self._spec.name:
            return False
        try:
            return _question_in(PromptTemplate.of_agent(load_agent(name)), aligned) is not None
        except ConfigError:
            return False

    def _question(self, aligned: Aligned) -> str:
        """Return the question of a row with another instruction.

        Raises:
            DataError: The question cannot be separated from the instruction.
        """
        file = [self.source.template] if self.source.template else []
        for known in (self._own[0], *file):
            if (question := _question_in(known, aligned)) is not None:
                return question
        user = str(aligned["_prompt"][0]["content"])
        marks = list(QUESTION_MARK.finditer(user))
        question = user[marks[0].end() :].strip() if marks else user.strip()
        advice = "set prompt=row to train with the rows' own prompts"
        if len(marks) > 1:
            raise DataError(
                f"the user turn has {len(marks)} lines that begin with Question: or Task:, so the question cannot be separated "
                f"from the instruction; {advice}"
            )
        if marks and (before := user[: marks[0].start()].strip()) and not _speaks_of(before, self._spec):
            raise DataError(
                "the text before the line Question: or Task: mentions no role of the agent, so it may be part of the "
                f"question; {advice}"
            )
        if not question or (not marks and _speaks_of(user, self._spec)):
            raise DataError(
                "the instruction in the user turn differs from the agent's, and no line Question: or Task: marks where its "
                f"question begins; {advice}"
            )
        return question


@dataclass(frozen=True)
class PromptCounts:
    """Prompts of a training run: number of ``rows`` by :class:`PromptState`, and the ``record`` for the model's folder."""

    rows: Mapping[str, int]
    record: PromptRecord

    def __str__(self) -> str:
        asked, rewritten, other = (self.rows.get(state, 0) for state in PromptState)
        whose = {PromptMode.OWN: "the agent's prompt", PromptMode.ROW: "their own prompts"}
        words = [f"{plural(asked, 'row')} with {whose.get(self.record.mode, 'the prompt of the file')}"]
        words += [f"{rewritten:,} rewritten from another instruction"] if rewritten else []
        words += [f"{plural(other, 'chat')} unchanged"] if other else []
        words += [f"{self.record.unknown:,} of unknown form"] if self.record.unknown else []
        return ", ".join(words)


def row_prompts(own: SftSettings) -> RowPrompts:
    """Return the prompts that a run's settings ask for.

    Raises:
        ConfigError: The file of ``prompt`` is wrong.
    """
    return RowPrompts(PromptSource.load(own.prompt), own.agent or "")


class PromptCounter:
    """Counts aligned rows by :class:`PromptState`, and the prompts of the agent's rows."""

    def __init__(self, prompts: RowPrompts) -> None:
        self._tally = PromptTally(prompts.source.mode, prompts.known())
        self._rows: Counter[str] = Counter()

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        state = str(row[ASKED_COLUMN])
        self._rows[state] += 1
        if state != PromptState.OTHER:
            self._tally.add(_chat(row))

    def counts(self) -> PromptCounts:
        """Return the counts."""
        return PromptCounts(dict(self._rows), self._tally.record())


def count_prompts(dataset: Any, own: SftSettings) -> PromptCounts | None:
    """Count the prompts of a run's aligned rows; return ``None`` if no agent is trained."""
    prompts = row_prompts(own)
    if not prompts.agent:
        return None
    counter = PromptCounter(prompts)
    for row in dataset.select_columns(["_prompt", "_system", ASKED_COLUMN]):
        counter.add(row)
    return counter.counts()


def keep_record(record: PromptRecord, arguments: Arguments, output_dir: Path) -> None:
    """Check the record of the prompts against that of the base model, and save it in the output folder.

    Raises:
        ConfigError: The base model was trained with another prompt, and ``prompt_check`` is on.
    """
    model = arguments.model.model_name_or_path
    base = record_of_model(model)
    if arguments.sft.prompt_check:
        check_prompts(record, base, model)
    if record.templates:
        record.after(base).save(output_dir / PROMPT_FILE)


def _chat(row: Mapping[str, Any]) -> list[dict[str, str]]:
    system = [{"role": "system", "content": row["_system"]}] if row["_system"] else []
    return [
        *system,
        *({"role": message["role"], "content": message["content"]} for message in row["_prompt"]),
    ]


def _question_in(template: PromptTemplate, aligned: Aligned) -> str | None:
    """Return the question of a user turn that has this prompt, with any system turn; otherwise ``None``."""
    system = str(aligned["_system"] or "")
    turns = [{"role": message["role"], "content": message["content"]} for message in aligned["_prompt"]]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return replace(template, system=system).question_in(turns)


def _named(row: Mapping[str, Any]) -> str | None:
    """Return the agent that a row names, an empty text for "no agent", or ``None`` if it names none."""
    info = row.get("extra_info")
    name = info.get("agent") if isinstance(info, Mapping) else None
    return name if isinstance(name, str) else None


def _is_trajectory(text: str, spec: AgentSpec) -> bool:
    """Return whether a response begins with a tag of the agent and has a tag of a role other than a thought."""
    first = re.match(r"\s*<([a-z][a-z0-9_]*)>", text)
    acts = [tag for tag, role in spec.roles.items() if role.kind is not RoleKind.THOUGHT]
    return bool(first and first[1] in spec.roles) and any(f"<{tag}>" in text for tag in acts)


def _speaks_of(text: str, spec: AgentSpec) -> bool:
    """Return whether a text names a role of the agent in brackets or quotes, as instructions do."""
    names = "|".join(map(re.escape, spec.roles))
    return re.search(rf"[<'\"`]/?(?:{names})[>'\"`]", text) is not None
