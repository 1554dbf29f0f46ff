"""Whether the arguments of tool calls keep the form that the prompt asks for: the test of tools that an agent never saw.

AFM (arXiv 2508.13167) gives trained agents further tools in the prompt alone: the code agent keeps their formats, the web
agent breaks those in JSON. Here a YAML declares which tools are unseen and the form of each one's argument; what is counted is
the share of their calls whose argument breaks it. What a tool then answered does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, model_validator

from afm.errors import DataError
from afm.trajectory.programs import parse_program
from afm.trajectory.record import Record

_FENCE = re.compile(r"\s*```\s*json\s*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_ADDRESS = re.compile(r"https?://[^\s|]+")


class ArgumentForm(StrEnum):
    """What an argument has to be."""

    TEXT = "text"
    """One line that is neither JSON nor fenced."""
    URLS = "urls"
    """Full addresses, separated by ``|``."""
    JSON = "json"
    """One object in a ``json`` fence."""
    PROGRAM = "program"
    """A ``py`` fence, perhaps with an ``sh`` fence."""


class UnseenTool(BaseModel):
    """A tool that the agent was not trained with.

    Attributes:
        required: Keys of a JSON argument that hold a text.
        optional: Further keys it may have; any other breaks the form.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: ArgumentForm
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> UnseenTool:
        if (self.required or self.optional) and self.form is not ArgumentForm.JSON:
            raise ValueError("keys only for form: json")
        return self

    def accepts(self, argument: str) -> bool:
        """Whether ``argument``, the raw text between the tool's tags, has the form."""
        match self.form:
            case ArgumentForm.TEXT:
                text = argument.strip()
                return bool(text) and "\n" not in text and not text.startswith(("{", "[{", "```"))
            case ArgumentForm.URLS:
                return all(_ADDRESS.fullmatch(part.strip()) for part in argument.split("|"))
            case ArgumentForm.JSON:
                return self._is_object(argument)
            case ArgumentForm.PROGRAM:
                return _is_program(argument)

    def _is_object(self, argument: str) -> bool:
        fenced = _FENCE.fullmatch(argument)
        if fenced is None:
            return False
        try:
            value = json.loads(fenced[1])
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict) or not set(self.required) <= set(value):
            return False
        known = {*self.required, *self.optional}
        return (not known or set(value) <= known) and all(
            isinstance(value[key], str) for key in self.required
        )


@dataclass
class ArgumentTally:
    """Counts calls of unseen tools.

    Attributes:
        tools: By role.
        calls: How many were made, by role.
        broken: How many of them break the form.
    """

    tools: Mapping[str, UnseenTool]
    calls: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Count the calls of one episode."""
        for call in record.calls:
            if (tool := self.tools.get(call.role)) is not None:
                self.calls[call.role] = self.calls.get(call.role, 0) + 1
                self.broken[call.role] = self.broken.get(call.role, 0) + (not tool.accepts(call.argument))

    def shares(self) -> dict[str, float]:
        """Broken calls over all calls, by role and over all under ``all``; empty when there was no call."""
        if not self.calls:
            return {}
        by_role = {role: self.broken[role] / count for role, count in sorted(self.calls.items())}
        return {"all": sum(self.broken.values()) / sum(self.calls.values()), **by_role}


def _is_program(argument: str) -> bool:
    try:
        parse_program(argument)
    except DataError:
        return False
    return True
