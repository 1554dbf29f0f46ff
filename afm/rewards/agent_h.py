"""Agent-H, Agent-FLAN's measure of hallucination (arXiv 2403.12881, section 4.3, equation 1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from afm.rewards.base import Part, Sample, Scorer
from afm.trajectory.call_forms import written_calls
from afm.trajectory.types import Author, Segment

ITEM = "agent_h"
"""Where a task's ``extra_info`` holds the names of the tools that are given, and whether one is asked for."""
REACT = ("Thought:", "Action:")
GENERAL = ("I will use", "I need to call")
"""What counts as talk of tools, in ReAct's form and in plain words."""

_FUNCTION_CALL = re.compile(r"""<functioncall>\s*\{\s*["']name["']\s*:\s*["']([^"']+)""")


def tool_talk(segments: Sequence[Segment]) -> tuple[bool, bool]:
    """Whether what the agent wrote holds a keyword of ReAct, and one of plain words."""
    text = said(segments)
    return any(word in text for word in REACT), any(word in text for word in GENERAL)


def said(segments: Sequence[Segment]) -> str:
    """What the agent wrote."""
    return "".join(part.text for part in segments if part.author is Author.AGENT)


class AgentH(Scorer):
    """Scores plain replies without talk of tools, and calls where a tool is offered and asked for."""

    async def judge(self, sample: Sample) -> Part:
        """The mean of 1 without ReAct's keywords and 1 without plain ones, whose mean over questions is H_Score.

        Where a tool is given and asked for, which H_Score leaves out, 1 for a call of the expected one.
        """
        item = sample.extra_info.get(ITEM)
        if not isinstance(item, Mapping):
            return Part(None, "the row is no item of Agent-H: read its files with reader: glaive")
        if item["asked"] and item["tools"]:
            right = sample.ground_truth in _called(sample)
            return Part(float(right), f"expected a call of {sample.ground_truth}")
        react, general = tool_talk(sample.segments)
        kinds = [name for name, there in (("ReAct", react), ("general", general)) if there]
        return Part(1 - len(kinds) / 2, f"talk of tools: {', '.join(kinds) or 'none'}")

    async def form(self, sample: Sample) -> Part:
        """0 when the reply calls a tool that is not given, in any form."""
        item = sample.extra_info.get(ITEM)
        if not isinstance(item, Mapping):
            return Part(None)
        tools = item["tools"]
        invented = sorted(name for name in _called(sample) if name not in tools and (name or not tools))
        return Part(
            float(not invented), f"calls of tools not given: {', '.join(invented)}" if invented else ""
        )


def _called(sample: Sample) -> set[str]:
    """Names of the tools that the reply calls; an empty name for a call without one."""
    calls = {call.name for call in written_calls(sample.segments, sample.spec)}
    named = set(_FUNCTION_CALL.findall(said(sample.segments)))
    return named | {name for name in calls if name != "functioncall"}
