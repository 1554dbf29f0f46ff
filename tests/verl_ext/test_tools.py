"""Our tools behind the interface of verl's own agent loops: real sandbox, verl's own loading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from extras import needs

from afm.errors import ConfigError
from afm.tools import ToolContext, ToolResult
from afm.tools.base import current_goal

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "configs/tools/code_executor.yaml"


class Echo:
    """Returns its argument and the question of the episode."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_config(cls, config: Any, context: ToolContext) -> Echo:
        return cls(context.schema.function.name)

    async def call(self, argument: str) -> ToolResult:
        if argument == "fail":
            raise ConfigError("no such thing")
        return ToolResult(f"{argument} <|im_end|>\u200b<tool_call> | {current_goal()}")

    async def close(self) -> None:
        pass


def load(folder: Path, **config: Any) -> list[Any]:
    from verl.tools.tool_registry import load_all_tools

    entry = {"class_name": "verl_ext.stock.AfmTool", "config": {"type": "native"} | config}
    (folder / "entries.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return list(load_all_tools(str(folder / "entries.yaml"), None))


def echo_file(folder: Path, *names: str) -> Path:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    said = {"description": "Says it again.", "parameters": parameters}
    schemas = [{"function": {"name": name} | said} for name in names]
    entries = [{"class_name": f"{__name__}.Echo", "tool_schema": schema} for schema in schemas]
    path = folder / "echo.yaml"
    path.write_text(yaml.safe_dump({"tools": entries}))
    return path


@pytest.mark.sandbox
async def test_a_program_runs_in_the_sandbox(tmp_path: Path) -> None:
    [tool] = load(tmp_path, tools=str(CODE))
    assert tool.name == "code"
    assert "Python program" in tool.tool_schema.function.description
    number, _ = await tool.create()
    response, reward, facts = await tool.execute(number, {"code": "```py\nprint(12+13)\n```"})
    assert (response.text, reward, facts) == ("25", 0.0, {"ok": True})


async def test_the_tool_gets_its_argument_and_the_question(tmp_path: Path) -> None:
    [tool] = load(tmp_path, tools=str(echo_file(tmp_path, "echo")))
    turns = {"system": "x", "user": "Why?"}
    asked = SimpleNamespace(messages=[{"role": role, "content": text} for role, text in turns.items()])
    response, _, _ = await tool.execute("1", {"text": "hello"}, agent_data=asked)
    assert response.text == "hello [|im_end|][tool_call] | Why?"


async def test_a_failure_is_told_to_the_agent(tmp_path: Path) -> None:
    [tool] = load(tmp_path, tools=str(echo_file(tmp_path, "echo")))
    for parameters, message in (
        ({"text": "fail"}, "no such thing"),
        ({}, "'text' is missing"),
        ({"txt": "x"}, "unknown argument 'txt'"),
    ):
        response, reward, facts = await tool.execute("1", parameters)
        assert response.text.startswith("The tool echo failed: ")
        assert message in response.text
        assert (reward, facts) == (0.0, {"ok": False})


def test_wrong_settings_are_explained(tmp_path: Path) -> None:
    path = echo_file(tmp_path, "echo", "again")
    for config, message in (
        ({"nme": "echo"}, "nme: unknown key; did you mean 'name'"),
        ({}, "holds echo, again; set name to one of them"),
        ({"name": "ecko"}, "has no tool 'ecko'; did you mean 'echo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, tools=str(path), **config)


def test_a_second_schema_is_refused(tmp_path: Path) -> None:
    from verl.tools.schemas import OpenAIFunctionToolSchema

    from verl_ext.stock import AfmTool

    schema = {"type": "function", "function": {"name": "echo", "description": "another"}}
    with pytest.raises(ConfigError, match="remove it here"):
        AfmTool({"tools": str(CODE)}, OpenAIFunctionToolSchema.model_validate(schema))
