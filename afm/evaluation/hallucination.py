"""How often a model calls tools that are not there, after Agent-FLAN (arXiv 2403.12881).

:class:`AgentHTally` is the paper's measure, on questions of its benchmark's form. :class:`HallucinationTally` counts calls of
tools that were not offered in the episodes of any evaluation, so its figures compare runs of this project, not with the paper's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from afm.evaluation.agents import Agents
from afm.rewards.agent_h import tool_talk
from afm.trajectory.call_forms import written_calls
from afm.trajectory.record import Record
from afm.trajectory.types import Segment


@dataclass
class HallucinationTally:
    """Counts episodes and calls of one agent, or of several.

    Attributes:
        agents: Those that the episodes were played as.
    """

    agents: Agents
    episodes: int = 0
    calls: int = 0
    invented_calls: int = 0
    with_invented: int = 0

    def add(self, record: Record) -> None:
        """Count one episode that was played to its end."""
        segments = [Segment(part.author, part.text) for part in record.segments]
        agents = self.agents
        calls = written_calls(segments, agents.declared(record), original=agents.original(record))
        invented = sum(not call.offered for call in calls)
        self.episodes += 1
        self.calls += len(calls)
        self.invented_calls += invented
        self.with_invented += invented > 0

    @property
    def tool_format_without_tool(self) -> float | None:
        """Episodes with a call or its form, over all episodes; ``None`` where an agent has tools."""
        with_tools = any(spec.tool_roles for spec in self.agents.specs.values())
        return None if with_tools else self.invented_tool

    @property
    def invented_tool(self) -> float | None:
        """Episodes with a call of a tool that the agent does not have, over all episodes."""
        return self.with_invented / self.episodes if self.episodes else None

    @property
    def invented_tool_calls(self) -> float | None:
        """Calls of tools that the agent does not have, over all calls written; ``None`` when there was none."""
        return self.invented_calls / self.calls if self.calls else None


AGENT_H = "agent_h_"
"""Data sources of Agent-H begin with this and end with the circumstance."""
_NEEDED = f"{AGENT_H}given_asked"


@dataclass
class AgentHTally:
    """Counts replies to questions of Agent-H."""

    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count one episode with a verdict; those of other data are passed over."""
        if not record.data_source.startswith(AGENT_H) or record.verdict is None:
            return
        if record.data_source == _NEEDED:
            self._counts["needed"] += 1
            self._counts["called"] += record.verdict.score == 1
            return
        react, general = tool_talk([Segment(part.author, part.text) for part in record.segments])
        self._counts["raw"] += 1
        self._counts["react"] += react
        self._counts["general"] += general
        self._counts["invented"] += record.verdict.parts.get("format") == 0

    def figures(self) -> dict[str, float]:
        """Shares, 0 to 1; empty where nothing was counted.

        ``h_react`` and ``h_general``: replies with such a keyword, over the questions whose expected reply is plain text (equation
        1 of the paper); ``h_score``: the mean of what is left of both; ``invented_tool``: replies of these that call a tool that
        is not given; ``called_when_asked``: replies with the expected call, over the questions where a tool is given and needed.
        """
        count, figures = self._counts, {}
        if raw := count["raw"]:
            react, general = count["react"] / raw, count["general"] / raw
            figures = {"h_react": react, "h_general": general, "h_score": ((1 - react) + (1 - general)) / 2}
            figures["invented_tool"] = count["invented"] / raw
        if needed := count["needed"]:
            figures["called_when_asked"] = count["called"] / needed
        return figures
