"""All formats by their names."""

from __future__ import annotations

from afm.errors import UsageError, suggestion
from afm.trajectory.convert.agent_flan import AgentFlan
from afm.trajectory.convert.alpaca import Alpaca
from afm.trajectory.convert.atif import Atif
from afm.trajectory.convert.base import Format
from afm.trajectory.convert.coa import Coa
from afm.trajectory.convert.messages import Messages, OpenAi
from afm.trajectory.convert.openai_agents import OpenAiAgents
from afm.trajectory.convert.react import React
from afm.trajectory.convert.sharegpt import ShareGpt
from afm.trajectory.convert.smolagents import SmolAgents

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Coa(),
        Atif(),
        Alpaca(),
        ShareGpt(),
        AgentFlan(),
        OpenAi(),
        React(),
        OpenAiAgents(),
        SmolAgents(),
        Messages(),
    )
}
"""In the order in which a row is held against them."""


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in FORMATS:
        raise UsageError(f"no format {name!r}; {suggestion(name, FORMATS)}")
    return FORMATS[name]
