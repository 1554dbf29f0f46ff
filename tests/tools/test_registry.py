"""Tools from YAML: the shipped file works, a wrong one is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tool_entries import entry

from afm.errors import ConfigError
from afm.tools import load_tools
from afm.tools.code import CodeSettings, CodeTool

ROOT = Path(__file__).resolve().parents[2]


CODE = "code.CodeTool"


def code(**config: Any) -> dict[str, Any]:
    """A tools file with the code tool."""
    return {"tools": [entry(CODE, "code", **config)]}


def of_class(name: str) -> dict[str, Any]:
    """A tools file whose tool is of this class."""
    return {"tools": [entry(CODE, "code") | {"class_name": name}]}


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/tools/*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    tools = load_tools(path)
    assert tools
    for name, tool in tools.items():
        assert tool.name == name


def test_a_name_that_the_file_does_not_declare_is_told_with_those_it_has() -> None:
    tools = load_tools(code())
    with pytest.raises(
        ConfigError, match=r"^tools configuration: declares no tool 'weekday'; expected one of: code$"
    ):
        tools["weekday"]
    assert (tools.get("weekday"), "weekday" in tools) == (None, False)


@pytest.mark.sandbox
async def test_the_shipped_code_tool_runs_a_program_and_keeps_its_announcement() -> None:
    tool = load_tools(ROOT / "configs/tools/code_executor.yaml")["code"]
    result = await tool.call("```py\nprint(1 + 1)\n```")
    await tool.close()
    assert (result.text, result.ok) == ("2", True)
    assert isinstance(tool, CodeTool)
    assert tool.schema is not None
    assert tool.schema.model_dump()["function"]["parameters"]["required"] == ["code"]


@pytest.mark.slow
@pytest.mark.sandbox
async def test_limits_reach_the_program() -> None:
    tool = load_tools(code(limits={"wall_s": 1.0}, max_observation_chars=200))["code"]
    result = await tool.call("```py\nimport time\nprint('y' * 500, flush=True)\ntime.sleep(30)\n```")
    await tool.close()
    assert result.text.endswith("(The program was stopped: it ran longer than 1 seconds.)")
    assert len(result.text) == 200


def test_tools_with_equal_sandbox_settings_share_it() -> None:
    limited = entry(CODE, "c", sandbox={"max_parallel": 1})
    tools = load_tools({"tools": [entry(CODE, "a"), entry(CODE, "b"), limited]})
    first, second, third = (tools[name]._sandbox for name in "abc")  # type: ignore[attr-defined]
    assert first is second
    assert first is not third


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"tools: missing, but required"),
        ({"tools": [{"class_name": "x.Y"}]}, r"tools\[0\]\.tool_schema: missing"),
        ({"tools": [entry(CODE, "no blanks")]}, r"tools\[0\]\.tool_schema\.function\.name: got 'no blanks'"),
        ({"tools": code()["tools"] * 2}, r"tools\[1\]\.tool_schema\.function\.name: 'code' is used twice"),
        (of_class("CodeTool"), r"tools\[0\]\.class_name: got 'CodeTool', expected MODULE.CLASS"),
        (of_class("afm.nope.X"), r"'afm\.nope\.X' cannot be imported: No module named"),
        (of_class("afm.tools.code.CodeTol"), r"code has no class 'CodeTol'; did you mean 'CodeTool'"),
        (
            of_class("pathlib.Path"),
            r"'pathlib\.Path' is not a tool class: expected `@classmethod def from_config\(cls",
        ),
        (
            of_class("tool_entries.Blocking"),
            r"expected a method `async def call`, got tool_entries\.py:\d+: Blocking\.call ",
        ),
        (
            of_class("tool_entries.Nameless"),
            r"Nameless\.from_config made a tool with the name None, expected '\w+', which is context",
        ),
        (of_class("..a.Foo"), r"'\.\.a\.Foo' cannot be imported: TypeError"),
        (of_class("afm.tools.web_tool.WebTool"), r"WebTool' is not a tool class"),
        (code(urls=["http://a:99999"]), r"urls: got 'http://a:99999', expected an address"),
        (
            code(urls=["http://x:1"], sandbox={}),
            "either `urls` of code servers or a local `sandbox`, not both",
        ),
        (code(sandbox={"backend": "docker"}), r"sandbox\.backend: got 'docker' \(text\), expected a sandbox"),
        (of_class("verl.tools.gsm8k_tool.Gsm8kTool"), r"which our loops cannot call; docs/tools\.md"),
        (
            code(nsjail_path="/opt/nsjail", max_obs_length=512),
            r"max_obs_length: a setting of AFM's code tool; write max_observation_chars: 1536",
        ),
        (code(nsjail_path="/opt/nsjail", urls=["http://127.0.0.1:9002"]), r"nsjail_path cannot be combined"),
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
    assert load_tools(code(nsjail_path="/opt/nsjail"))


@pytest.mark.parametrize(
    "module", ["code_executor", "web_search_v2", "crawl_page_v2", "search_tool", "visual_inspector"]
)
def test_every_tool_of_afm_names_a_class_and_a_file_of_ours(module: str) -> None:
    with pytest.raises(ConfigError, match=rf"'verl\.tools\.{module}\.Tool' is a tool of verl") as caught:
        load_tools(of_class(f"verl.tools.{module}.Tool"))
    found = re.search(r"here it is (\S+), with its settings in (\S+) ", str(caught.value))
    assert found is not None
    assert f"class_name: {found[1]}" in (ROOT / found[2]).read_text("utf-8")


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my tools.yaml"
    with pytest.raises(ConfigError, match=r"my tools\.yaml: no such file"):
        load_tools(path)
    path.write_text("tools:\n- class_name: 3\n  tool_schema: {function: {name: x}}", encoding="utf-8")
    message = r"my tools\.yaml: tools\[0\]\.class_name: got 3 \(number\), expected text"
    with pytest.raises(ConfigError, match=message):
        load_tools(path)
