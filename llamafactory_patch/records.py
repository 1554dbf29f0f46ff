"""Our own trajectory JSONL as training rows, without a detour over another format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from afm.agents import AgentSpec, agent_of_model, load_agent
from afm.errors import DataError
from afm.trajectory import validate
from afm.trajectory.io import explain
from afm.trajectory.record import Record
from afm.trajectory.types import Segment
from llamafactory_patch.bad_rows import NOT_KEPT
from llamafactory_patch.messages import Aligned, aligned_row, turn


class RecordReader:
    """Reads the records of one folder, each as the agent it names.

    Args:
        folder: Where the file stands; its ``agent.yaml`` is used for records of that name, else the agent
            that is shipped under it.
        agent: Name or YAML of the agent that is trained; records of any other are refused. It is asked in its own words,
            even if its records were made when it was declared otherwise.
    """

    def __init__(self, folder: str, agent: str = "") -> None:
        self._folder = folder
        self._trained = load_agent(agent) if agent else None
        self._agents: dict[str, AgentSpec] = {}

    def aligned(self, row: Mapping[str, Any]) -> Aligned:
        """The user turn its agent would be asked with, and the whole response.

        Raises:
            DataError: No record, one that its agent's rules refuse, or one that a filter did not keep.
        """
        try:
            record = Record.model_validate(row)
        except ValidationError as error:
            raise DataError(explain(error)) from None
        if not record.kept:
            raise DataError(f"{NOT_KEPT}{record.reason or 'no reason given'}")
        spec = self._agent(record.agent)
        issues = validate([Segment(part.author, part.text) for part in record.segments], spec)
        if issues:
            raise DataError(f"record {record.id!r} breaks the rules of agent {spec.name!r}: {issues[0]}")
        question = turn("user", spec.user_message(record.question))
        return aligned_row([question, turn("assistant", record.text)])

    def _agent(self, name: str) -> AgentSpec:
        if self._trained is not None:
            if name != self._trained.name:
                raise DataError(
                    f"agent: got a record of {name!r}, but the agent that is trained is {self._trained.name!r}"
                )
            return self._trained
        if name not in self._agents:
            self._agents[name] = agent_of_model(self._folder, name)
        return self._agents[name]
