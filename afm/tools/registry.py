"""Tools from a YAML file.

The file has the shape that verl reads too::

    tools:
      - class_name: afm.tools.code.CodeTool
        config: {max_observation_chars: 1536}
        tool_schema: {type: function, function: {name: code, description: ..., parameters: {...}}}
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.configuration import read_mapping, validated
from afm.errors import ConfigError, suggestion
from afm.sandbox import Sandbox
from afm.tools.base import Tool, TrustedTool
from afm.tools.cassette import Cassette, CassetteSettings, CassetteTool, Mode, OnMiss, tool_version

SharedT = TypeVar("SharedT")


class FunctionSchema(BaseModel):
    """What a model is told about a tool: the ``function`` part of an OpenAI tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    def argument(self, named: Mapping[str, Any]) -> str:
        """The text a tool is called with for named arguments: the only parameter's text, or all as a JSON object.

        Raises:
            ValueError: An argument is unknown or missing.
        """
        names = list(self.parameters.get("properties", {}))
        unknown = sorted(set(named) - set(names))
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]!r}; expected: {', '.join(names) or 'none'}")
        if len(names) != 1:
            return json.dumps(named, ensure_ascii=False)
        if names[0] not in named:
            raise ValueError(f"argument {names[0]!r} is missing")
        value = named[names[0]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class ToolSchema(BaseModel):
    """An OpenAI tool declaration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"] = "function"
    function: FunctionSchema


class ToolEntry(BaseModel):
    """One tool in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    class_name: str
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: ToolSchema


class ToolsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: tuple[ToolEntry, ...]
    cassette: CassetteSettings | None = None

    @field_validator("cassette", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


@dataclass(slots=True)
class ToolContext:
    """What a tool class gets beside its own settings.

    Attributes:
        label: File and key path of its settings, for errors: ``tools.yaml`` and ``tools[0].config``.
        opened: What tools of this file opened so far (sandboxes, connections), by settings.
    """

    label: str
    at: str
    schema: ToolSchema
    opened: dict[str, Any] = field(default_factory=dict)

    def shared(self, settings: Mapping[str, Any], opener: Callable[[], SharedT]) -> SharedT:
        """What an earlier tool opened with equal ``settings``, or something new."""
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self.opened:
            self.opened[key] = opener()
        return cast("SharedT", self.opened[key])

    def sandbox(self, settings: Mapping[str, Any], opener: Callable[[], Sandbox]) -> Sandbox:
        """The sandbox for ``settings``; see :meth:`shared`."""
        return self.shared({"sandbox": dict(settings)}, opener)


class ConfiguredTool(Protocol):
    """A class that the registry can make tools of."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Tool:
        """A tool with these settings; raises ``ConfigError`` for wrong ones."""
        ...


def load_tools(source: Path | Mapping[str, Any]) -> dict[str, Tool]:
    """Tools by name, as an agent's roles refer to them.

    Nothing is started yet. Tools with equal sandbox settings share one sandbox; closing a tool closes it
    for all of them.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    label, data = read_mapping(source, "tools")
    file = validated(ToolsFile, data, label)
    entries = file.tools
    opened: dict[str, Any] = {}
    tools: dict[str, Tool] = {}
    for number, entry in enumerate(entries):
        at = f"tools[{number}]"
        name = entry.tool_schema.function.name
        if name in tools:
            raise ConfigError(f"{label}: {at}.tool_schema.function.name: {name!r} stands twice")
        kind = _tool_class(entry.class_name, f"{label}: {at}.class_name")
        context = ToolContext(label, f"{at}.config", entry.tool_schema, opened)
        tools[name] = kind.from_config(entry.config, context)
    return tools if file.cassette is None else _behind_cassette(tools, entries, file.cassette)


def tool_classes(path: Path) -> dict[str, type[ConfiguredTool]]:
    """The classes of the tools in a file, by the names of the tools; nothing is opened.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    label, data = read_mapping(path, "tools")
    entries = enumerate(validated(ToolsFile, data, label).tools)
    return {
        entry.tool_schema.function.name: _tool_class(entry.class_name, f"{label}: tools[{number}].class_name")
        for number, entry in entries
    }


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
    "web_search_v2": ("web_search.WebSearchTool", "search"),
    "crawl_page_v2": ("crawl_page.CrawlPageTool", "search"),
    "search_tool": ("wiki_search.WikiSearchTool", "wiki_rag"),
    "wiki_search_r1": ("wiki_search.WikiSearchTool", "wiki_rag"),
    "visual_inspector": ("visual_inspector.VisualInspectorTool", "visual_inspector"),
}
"""Modules of tools in AFM's and stock verl's files: our class, and the file of ours that declares it."""


def _ours_for(module: str) -> str:
    known = _OF_VERL.get(module.rpartition(".")[2])
    if known is None:
        return "which our loops cannot call; docs/tools.md says how to write one"
    return f"here it is afm.tools.{known[0]}, with its settings in configs/tools/{known[1]}.yaml (docs/from_afm.md)"


def _tool_class(name: str, where: str) -> type[ConfiguredTool]:
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"{where}: got {name!r}, expected a dotted name such as afm.tools.code.CodeTool")
    if name.startswith("verl.tools."):
        raise ConfigError(f"{where}: {name!r} is a tool of verl's, {_ours_for(module_name)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module does when it is loaded
        told = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {name!r} cannot be imported: {told}") from error
    found = getattr(module, class_name, None)
    classes = [key for key, value in vars(module).items() if hasattr(value, "from_config")]
    if found is None:
        hint = suggestion(class_name, classes) if classes else "it defines no tool"
        raise ConfigError(f"{where}: {module_name} has no class {class_name!r}; {hint}")
    if not callable(getattr(found, "from_config", None)) or inspect.isabstract(found):
        raise ConfigError(
            f"{where}: {name!r} is no tool class: it lacks the class method from_config, or leaves methods open"
        )
    return found  # type: ignore[no-any-return]
