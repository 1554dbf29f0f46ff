"""Whether tools can read the arguments that a trajectory calls them with: the tools' own readers decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from afm.agents import AgentSpec
from afm.errors import BadArgumentError, Fault, TrajectoryError
from afm.tools.base import ReadingTool
from afm.tools.code import CodeTool
from afm.tools.crawl_page import CrawlPageTool
from afm.tools.registry import tool_classes
from afm.tools.visual_inspector import VisualInspectorTool
from afm.tools.web_search import WebSearchTool
from afm.tools.wiki_search import WikiSearchTool
from afm.trajectory.tags import SplitText, split
from afm.trajectory.types import Segment
from afm.trajectory.validate import FaultFinder, validate

Reader = Callable[[str], object]
"""Reads an argument, or raises :class:`BadArgumentError`."""


@cache
def usual_readers() -> Mapping[str, Reader]:
    """The readers of the shipped tools, by their usual names."""
    shipped = (CodeTool, CrawlPageTool, VisualInspectorTool, WebSearchTool, WikiSearchTool)
    return {kind.usual_name: kind.read for kind in shipped}


def readers_of(tools: Path | None) -> Mapping[str, Reader]:
    """The readers of the tools in a tools file, by name, without those that have none; the usual ones without a file.

    Raises:
        ConfigError: The file is no tools file, or names a class that cannot be had.
    """
    if tools is None:
        return usual_readers()
    return readers_among(tool_classes(tools))


def readers_among(tools: Mapping[str, object]) -> Mapping[str, Reader]:
    """The readers of those tools, or classes of tools, that have one."""
    return {name: tool.read for name, tool in tools.items() if isinstance(tool, ReadingTool)}


def faults_of(
    segments: Sequence[Segment],
    spec: AgentSpec,
    *,
    parts: SplitText | None = None,
    readers: Mapping[str, Reader] | None = None,
) -> tuple[TrajectoryError, ...]:
    """Every fault of a response: those of :func:`afm.trajectory.validate`, and calls whose argument the tool refuses.

    Args:
        parts: What :func:`afm.trajectory.tags.split` made of the text, where the caller has it already.
        readers: By the names of tools; the usual ones by default. A tool without one takes any argument.
    """
    text = "".join(segment.text for segment in segments)
    parts = split(text, spec) if parts is None else parts
    finder, readers = FaultFinder(text), usual_readers() if readers is None else readers
    refused = []
    for step in parts.steps:
        tool = spec.tool_roles.get(step.role, "")
        if not step.content.strip() or tool not in readers:  # an empty step is a fault of its own
            continue
        try:
            readers[tool](step.content)
        except BadArgumentError as error:
            complaint = f"is a call that the tool {tool!r} refuses: {error.message}"
            refused.append(finder.fault(Fault.ARGUMENT, f"<{step.role}>", complaint, step.start))
    faults = (*validate(segments, spec, parts=parts), *refused)
    return tuple(sorted(faults, key=lambda error: error.character))
