"""Loading of tools from a YAML file, and checks of a trajectory's arguments with the tools' readers.

verl reads files of the same shape::

    tools:
      - class_name: afm.tools.code.CodeTool
        config: {max_observation_chars: 1536}
        tool_schema: {type: function, function: {name: code, description: ..., parameters: {...}}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from afm.agents import AgentSpec
from afm.configuration import Settings, read_mapping, validated
from afm.errors import AfmError, BadArgumentError, ConfigError, Fault, TrajectoryError, suggestion
from afm.file_kinds import configs_folder
from afm.plugins import code_place, import_module_of, own_code_error
from afm.tools.base import ConfiguredTool, ReadingTool, Tool, ToolContext, ToolSchema, TrustedTool
from afm.tools.cassette import Cassette, CassetteSettings, CassetteTool, Mode, OnMiss, tool_version
from afm.trajectory.tags import Segment, SplitText, split
from afm.trajectory.validate import FaultFinder, validate

Reader = Callable[[str], object]
"""Reads an argument or raises :class:`BadArgumentError`."""


class ToolEntry(Settings):
    """One tool in the file."""

    class_name: str
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: ToolSchema


class ToolsFile(Settings):
    """A whole tools file."""

    tools: tuple[ToolEntry, ...]
    cassette: CassetteSettings | None = None

    @field_validator("cassette", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


def load_tools(source: str | Path | Mapping[str, Any]) -> dict[str, Tool]:
    """Return the tools of a file by the names that an agent's roles refer to.

    Your own classes are imported from the folder of the file (see :mod:`afm.plugins`). This starts nothing.
    Tools with equal sandbox settings share one sandbox. Closing one of these tools closes the sandbox for all.

    Raises:
        ConfigError: The file is invalid. The message names the file, the key path, the value and the expectation.
    """
    label, data = read_mapping(source, "tools")
    file = validated(ToolsFile, data, label)
    entries = file.tools
    opened: dict[str, Any] = {}
    tools = _Tools(label)
    for number, entry in enumerate(entries):
        at = f"tools[{number}]"
        name = entry.tool_schema.function.name
        if name in tools:
            raise ConfigError(f"{label}: {at}.tool_schema.function.name: {name!r} is used twice")
        folder = None if isinstance(source, Mapping) else Path(source).parent
        kind = _tool_class(entry.class_name, f"{label}: {at}.class_name", folder)
        context = ToolContext(label, f"{at}.config", entry.tool_schema, opened)
        try:
            tools[name] = kind.from_config(entry.config, context)
        except AfmError:
            raise
        except Exception as error:
            raise own_code_error(error, f"{label}: {at}: {entry.class_name}.from_config") from error
        if (got := getattr(tools[name], "name", None)) != name:
            raise ConfigError(
                f"{label}: {at}: {entry.class_name}.from_config made a tool with the name {got!r}, expected "
                f"{name!r}, which is context.schema.function.name (docs/tutorials/own_tool.md)"
            )
    if file.cassette is not None:
        tools.update(_behind_cassette(tools, entries, file.cassette))
    return tools


class _Tools(dict[str, Tool]):
    """The tools of a file by name. Another name is an error that lists them."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def __missing__(self, name: str) -> Tool:
        raise ConfigError(f"{self._label}: declares no tool {name!r}; {suggestion(name, self)}")


def check_tools(who: str, needed: Iterable[str], tools: Collection[str]) -> None:
    """Check that every tool that ``who`` calls is there.

    Raises:
        ConfigError: One is missing.
    """
    if missing := sorted(set(needed) - set(tools)):
        names = ", ".join(sorted(tools)) or "none"
        close = [match for name in missing for match in get_close_matches(name, tools, n=1)]
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "correct `tool` under the agent's `roles`, or name a file with all of them"
        )
        raise ConfigError(f"{who} calls {', '.join(missing)}, but `tools` has {names}; {hint}")


def default_tools(spec: AgentSpec) -> dict[str, Tool]:
    """Return the tools of an agent as the files in ``configs/tools`` declare them. This starts nothing.

    Raises:
        ConfigError: No file there declares one of the tools.
    """
    needed = set(spec.tool_roles.values())
    entries: dict[str, Any] = {}
    for file in sorted((configs_folder() / "tools").glob("*.yaml")) if needed else []:
        for entry in read_mapping(file, "tools")[1].get("tools", []):
            entries.setdefault(entry["tool_schema"]["function"]["name"], entry)
    if missing := sorted(needed - set(entries)):
        raise ConfigError(
            f"agent {spec.name!r} calls {', '.join(missing)}, which no file in configs/tools declares"
        )
    return load_tools({"tools": [entries[name] for name in sorted(needed)]})


def tools_beside(spec: AgentSpec, agent: Path) -> Path | None:
    """Return a list of tools in the folder of an agent's YAML that declares every tool the agent calls."""
    needed = set(spec.tool_roles.values())
    return next((file for file, declared in declared_beside(agent) if needed <= declared), None)


def declared_beside(agent: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield the lists of tools in the folder of an agent's YAML with the names that they declare."""
    for file in sorted(agent.parent.glob("*.yaml")):
        with suppress(AfmError):
            yield file, {entry.tool_schema.function.name for entry in read_tools_file(file).tools}


def tool_classes(path: Path) -> dict[str, type[ConfiguredTool]]:
    """Return the tool classes of a file by the names of the tools. This opens nothing.

    Raises:
        ConfigError: The file is invalid. The message names the file, the key path, the value and the expectation.
    """
    return {
        entry.tool_schema.function.name: _tool_class(
            entry.class_name, f"{path}: tools[{number}].class_name", path.parent
        )
        for number, entry in enumerate(read_tools_file(path).tools)
    }


def read_tools_file(source: Path | Mapping[str, Any]) -> ToolsFile:
    """Return the declarations of a tools YAML without an import of their classes.

    Raises:
        ConfigError: The file is invalid. The message names the file, the key path, the value and the expectation.
    """
    label, data = read_mapping(source, "tools")
    return validated(ToolsFile, data, label)


def _behind_cassette(
    tools: Mapping[str, Tool], entries: Sequence[ToolEntry], settings: CassetteSettings
) -> dict[str, Tool]:
    must_exist = settings.mode is Mode.REPLAY and settings.on_miss is not OnMiss.LIVE
    secrets = {name for tool in tools.values() if isinstance(tool, TrustedTool) for name in tool.variables()}
    cassette = Cassette(settings.file, readonly=must_exist, secrets=secrets)
    versions = [tool_version(entry.class_name, entry.config) for entry in entries]
    return {
        name: CassetteTool(tool, cassette, settings, version)
        for (name, tool), version in zip(tools.items(), versions, strict=True)
    }


_OF_VERL = {
    "code_executor": ("code.CodeTool", "code_executor"),
    "web_search_v2": ("search.WebSearchTool", "search"),
    "crawl_page_v2": ("crawl_page.CrawlPageTool", "search"),
    "search_tool": ("search.WikiSearchTool", "wiki_rag"),
    "wiki_search_r1": ("search.WikiSearchTool", "wiki_rag"),
    "visual_inspector": ("visual_inspector.VisualInspectorTool", "visual_inspector"),
}
"""Maps the tool modules of AFM and stock verl to our class and to our file that declares it."""


def _ours_for(module: str) -> str:
    known = _OF_VERL.get(module.rpartition(".")[2])
    if known is None:
        return "which our loops cannot call; docs/tools.md shows how to write a tool"
    return f"here it is afm.tools.{known[0]}, with its settings in configs/tools/{known[1]}.yaml (docs/from_afm.md)"


def _tool_class(name: str, where: str, folder: Path | None) -> type[ConfiguredTool]:
    module_name, _, class_name = name.rpartition(".")
    if name.startswith("verl.tools."):
        raise ConfigError(f"{where}: {name!r} is a tool of verl, {_ours_for(module_name)}")
    module = import_module_of(name, folder, where)
    kind = getattr(module, class_name, None)
    classes = [key for key, value in vars(module).items() if hasattr(value, "from_config")]
    if kind is None:
        hint = suggestion(class_name, classes) if classes else "it defines no tool"
        raise ConfigError(f"{where}: {module_name} has no class {class_name!r}; {hint}")
    lacks = (
        []
        if callable(getattr(kind, "from_config", None))
        else ["`@classmethod def from_config(cls, config, context)`"]
    )
    lacks += [f"`def {each}`, which is abstract" for each in sorted(getattr(kind, "__abstractmethods__", ()))]
    for method in ("call", "close"):
        present = getattr(kind, method, None)
        if not lacks and not inspect.iscoroutinefunction(present):
            got = f", got {code_place(present, method)} without `async`" if callable(present) else ""
            lacks.append(f"a method `async def {method}`{got}")
    if lacks:
        raise ConfigError(
            f"{where}: {name!r} is not a tool class: expected {', '.join(lacks)} (docs/tutorials/own_tool.md)"
        )
    return kind  # type: ignore[no-any-return]


@cache
def usual_readers() -> Mapping[str, Reader]:
    """Return the readers of the shipped tools by their usual names."""
    from afm.tools.code import CodeTool
    from afm.tools.crawl_page import CrawlPageTool
    from afm.tools.search import WebSearchTool, WikiSearchTool
    from afm.tools.visual_inspector import VisualInspectorTool

    shipped = (CodeTool, CrawlPageTool, VisualInspectorTool, WebSearchTool, WikiSearchTool)
    return {kind.usual_name: kind.read for kind in shipped}


def readers_of(tools: Path | None) -> Mapping[str, Reader]:
    """Return the readers of the tools in a file by name, or those of the shipped tools without a file.

    Raises:
        ConfigError: The file is not a tools file, or names a class that cannot be imported.
    """
    if tools is None:
        return usual_readers()
    return readers_among(tool_classes(tools))


def readers_among(tools: Mapping[str, object]) -> Mapping[str, Reader]:
    """Return the readers of the tools or tool classes that have one."""
    return {name: tool.read for name, tool in tools.items() if isinstance(tool, ReadingTool)}


def faults_of(
    segments: Sequence[Segment],
    spec: AgentSpec,
    *,
    parts: SplitText | None = None,
    readers: Mapping[str, Reader] | None = None,
) -> tuple[TrajectoryError, ...]:
    """Return every fault of a response: those of :func:`afm.trajectory.validate` and arguments that a tool refuses.

    Args:
        parts: The result of :func:`afm.trajectory.tags.split` for the text, if the caller has it.
        readers: Readers by tool, by default those of the shipped tools. A tool without one accepts any argument.
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
