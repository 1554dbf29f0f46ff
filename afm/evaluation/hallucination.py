"""How often a model calls tools that are not there.

After Agent-FLAN (arXiv 2403.12881): it counts answers that use the form of a tool call where no tool was given, and
calls of a tool that was not offered, on a benchmark of its own. Here both are counted in the episodes of any
evaluation, so the figures compare runs of this project, not with the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.trajectory.call_forms import written_calls
from afm.trajectory.record import Record
from afm.trajectory.types import Segment


@dataclass
class HallucinationTally:
    """Counts episodes and calls of one agent.

    Attributes:
        spec: The agent the episodes were played as.
        original: The agent that ``spec`` is without its tools.
    """

    spec: AgentSpec
    original: AgentSpec | None = None
    episodes: int = 0
    calls: int = 0
    invented_calls: int = 0
    with_invented: int = 0

    def add(self, record: Record) -> None:
        """Count one episode that was played to its end."""
        segments = [Segment(part.author, part.text) for part in record.segments]
        calls = written_calls(segments, self.spec, original=self.original)
        invented = sum(not call.offered for call in calls)
        self.episodes += 1
        self.calls += len(calls)
        self.invented_calls += invented
        self.with_invented += invented > 0

    @property
    def tool_format_without_tool(self) -> float | None:
        """Episodes with a call or its form, over all episodes; ``None`` for an agent that has tools."""
        return None if self.spec.tool_roles else self.invented_tool

    @property
    def invented_tool(self) -> float | None:
        """Episodes with a call of a tool that the agent does not have, over all episodes."""
        return self.with_invented / self.episodes if self.episodes else None

    @property
    def invented_tool_calls(self) -> float | None:
        """Calls of tools that the agent does not have, over all calls written; ``None`` when there was none."""
        return self.invented_calls / self.calls if self.calls else None
