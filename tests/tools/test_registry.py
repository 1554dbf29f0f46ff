"""Tools from YAML: the shipped file works, a wrong one is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from afm.errors import ConfigError
from afm.tools import load_tools
from afm.tools.code import CodeSettings, CodeTool

ROOT = Path(__file__).resolve().parents[2]


def entry(name: str = "code", class_name: str = "afm.tools.code.CodeTool", **config: Any) -> dict[str, Any]:
    return {
        "class_name": class_name,
        "config": config,
        "tool_schema": {"type": "function", "function": {"name": name}},
    }


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/tools/*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    tools = load_tools(path)
    assert tools
    for name, tool in tools.items():
        assert tool.name == name


@pytest.mark.sandbox
async def test_the_shipped_code_tool_runs_a_program() -> None:
    tools = load_tools(ROOT / "configs/tools/code_executor.yaml")
    result = await tools["code"].call("```py\nprint(1 + 1)\n```")
    await tools["code"].close()
    assert (result.text, result.ok) == ("2", True)


def test_the_announcement_is_kept_with_the_tool() -> None:
    tool = load_tools(ROOT / "configs/tools/code_executor.yaml")["code"]
    assert isinstance(tool, CodeTool)
    assert tool.schema is not None
    assert tool.schema.model_dump()["function"]["parameters"]["required"] == ["code"]


@pytest.mark.sandbox
async def test_limits_reach_the_program() -> None:
    tool = load_tools({"tools": [entry(limits={"wall_s": 1.0}, max_observation_chars=200)]})["code"]
    result = await tool.call("```py\nimport time\nprint('y' * 500, flush=True)\ntime.sleep(30)\n```")
    await tool.close()
    assert result.text.endswith("(The program was stopped: it ran longer than 1 seconds.)")
    assert len(result.text) == 200


def test_tools_with_equal_sandbox_settings_share_it() -> None:
    tools = load_tools({"tools": [entry("a"), entry("b"), entry("c", sandbox={"max_parallel": 1})]})
    first, second, third = (tools[name]._sandbox for name in "abc")  # type: ignore[attr-defined]
    assert first is second
    assert first is not third


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"tools: missing, but required"),
        ({"tool": []}, r"tool: unknown key; did you mean 'tools'\?"),
        ({"tools": [{"class_name": "x.Y"}]}, r"tools\[0\]\.tool_schema: missing"),
        ({"tools": [entry("no blanks")]}, r"tools\[0\]\.tool_schema\.function\.name: got 'no blanks'"),
        ({"tools": [entry(), entry()]}, r"tools\[1\]\.tool_schema\.function\.name: 'code' stands twice"),
        (
            {"tools": [entry(class_name="CodeTool")]},
            r"tools\[0\]\.class_name: got 'CodeTool', expected a dotted",
        ),
        ({"tools": [entry(class_name="afm.nope.X")]}, r"'afm\.nope\.X' cannot be imported: No module named"),
        (
            {"tools": [entry(class_name="afm.tools.code.CodeTol")]},
            r"afm\.tools\.code has no class 'CodeTol'; did you mean 'CodeTool'",
        ),
        ({"tools": [entry(class_name="pathlib.Path")]}, r"'pathlib\.Path' is no tool class"),
        ({"tools": [entry(class_name="..a.Foo")]}, r"'\.\.a\.Foo' cannot be imported: TypeError"),
        ({"tools": [entry(class_name="afm.tools.web_tool.WebTool")]}, r"WebTool' is no tool class"),
        ({"tools": [entry(urls=["http://a:99999"])]}, r"urls: got 'http://a:99999', expected an address"),
        (
            {"tools": [entry(sandbox={"backend": "docker"})]},
            r"config\.sandbox\.backend: got 'docker' \(str\), expected a sandbox backend",
        ),
        (
            {"tools": [entry(class_name="verl.tools.search_tool.SearchTool")]},
            r"class_name: 'verl\.tools\.search_tool\.SearchTool' is a tool of verl's, here it is "
            r"afm\.tools\.wiki_search\.WikiSearchTool, with its settings in configs/tools/wiki_rag\.yaml",
        ),
        (
            {"tools": [entry(class_name="verl.tools.gsm8k_tool.Gsm8kTool")]},
            r"which our loops cannot call; docs/tools\.md",
        ),
        (
            {"tools": [entry(nsjail_path="/opt/nsjail", max_obs_length=512)]},
            r"max_obs_length: a setting of AFM's code tool; write max_observation_chars: 1536",
        ),
        (
            {"tools": [entry(nsjail_path="/opt/nsjail", urls=["http://127.0.0.1:9002"])]},
            r"nsjail_path stands alone",
        ),
    ],
)
def test_a_wrong_file_is_explained(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_tools(data)
    assert str(caught.value).startswith("tools configuration: ")


def test_the_path_of_nsjail_may_stand_where_afm_has_it() -> None:
    sandbox = CodeSettings.model_validate({"nsjail_path": "/opt/nsjail"}).sandbox
    assert sandbox is not None
    assert sandbox.options() == {"backend": "nsjail", "nsjail_path": "/opt/nsjail"}
    assert load_tools({"tools": [entry(nsjail_path="/opt/nsjail")]})


@pytest.mark.parametrize(
    "module", ["code_executor", "web_search_v2", "crawl_page_v2", "search_tool", "visual_inspector"]
)
def test_every_tool_of_afm_names_a_class_and_a_file_of_ours(module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools({"tools": [entry(class_name=f"verl.tools.{module}.Tool")]})
    found = re.search(r"here it is (\S+), with its settings in (\S+) ", str(caught.value))
    assert found is not None
    declared = (ROOT / found[2]).read_text("utf-8")
    assert f"class_name: {found[1]}" in declared


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my tools.yaml"
    with pytest.raises(ConfigError, match=r"my tools\.yaml: no such file"):
        load_tools(path)
    path.write_text("tools:\n- class_name: 3\n  tool_schema: {function: {name: x}}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"my tools\.yaml: tools\[0\]\.class_name: got 3 \(int\), expected a"
    ):
        load_tools(path)
