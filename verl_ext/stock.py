"""Our tools and our rewards for verl's own agent loops. Our agent loop takes both from its settings.

The YAML of ``actor_rollout_ref.rollout.multi_turn.tool_config_path`` has one entry per tool::

    tools:
      - class_name: verl_ext.stock.AfmTool
        config: {type: native, tools: /path/of/code_executor.yaml, name: code}

For rewards, set ``reward.custom_reward_function.path=pkg://verl_ext.stock``, ``name=compute_score`` and, in
``reward_kwargs``, the ``agent`` and optionally the ``rewards`` YAML. The text alone decides who wrote what, so an
observation that the model forged counts as real. Lengths are unknown (no overlong shaping). Our agent loop knows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from afm.agents import AgentSpec, load_agent
from afm.configuration import Settings, read_mapping, validated
from afm.errors import AfmError, ConfigError, RewardError, suggestion
from afm.rewards import Reward, Sample, load_reward
from afm.tools import Tool, ToolSchema, load_tools
from afm.tools.base import working_toward
from afm.tools.registry import ToolsFile
from afm.trajectory import author_segments
from afm.trajectory.observation import neutralise


class ToolSettings(Settings):
    """The ``config`` of an entry."""

    type: str = "native"
    """A key of verl."""
    tools: Path
    """Path of a tool YAML, absolute or relative to the working folder of the run."""
    name: str | None = None
    """Name of a tool in the file. A file with one tool needs no name."""


class AfmTool(BaseTool):
    """A tool of a tool YAML, with the schema there.

    Results are sanitized as in our own loop: no hidden characters, no tags of chat templates. verl truncates them to
    ``multi_turn.max_tool_response_length``. The agent gets a failure as text.

    Raises:
        ConfigError: The settings are wrong, or the entry has a second schema.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        if tool_schema is not None:
            raise ConfigError(
                f"tool_config_path: the entry of {config.get('tools')} has a tool_schema; the schema is in the tool "
                "YAML, remove it here"
            )
        settings = validated(ToolSettings, dict(config), "tool_config_path")
        tools, schemas = _opened(settings.tools)
        name = _chosen(settings, list(tools))
        self._tool, self._function = tools[name], schemas[name].function
        super().__init__(config, OpenAIFunctionToolSchema.model_validate(schemas[name].model_dump()))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **unused: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the tool once, as verl's ``BaseTool.execute`` requires. The reward is always 0."""
        try:
            argument = self._function.argument(parameters)
            with working_toward(_question(agent_data), ""):
                result = await self._tool.call(argument)
        except (AfmError, ValueError) as error:
            return ToolResponse(text=f"The tool {self.name} failed: {error}"), 0.0, {"ok": False}
        return ToolResponse(text=neutralise(result.text)), 0.0, {"ok": result.ok}


@cache
def _opened(path: Path) -> tuple[dict[str, Tool], dict[str, ToolSchema]]:
    """Return tools and schemas of a file by name. The entries of one process share the opened tools."""
    label, data = read_mapping(path, "tools")
    schemas = {
        entry.tool_schema.function.name: entry.tool_schema
        for entry in validated(ToolsFile, data, label).tools
    }
    return load_tools(path), schemas


def _chosen(settings: ToolSettings, names: list[str]) -> str:
    name = settings.name or (names[0] if len(names) == 1 else None)
    if name is None:
        raise ConfigError(f"{settings.tools} holds {', '.join(names)}; set name to one of them")
    if name not in names:
        raise ConfigError(f"{settings.tools} has no tool {name!r}; {suggestion(name, names)}")
    return name


def _question(agent_data: Any) -> str:
    """Return the last message of the user, for tools whose answer depends on it."""
    messages = getattr(agent_data, "messages", None) or []
    asked = [message["content"] for message in messages if message.get("role") == "user"]
    return asked[-1] if asked and isinstance(asked[-1], str) else ""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    agent: str = "math",
    rewards: str | None = None,
    **unused: Any,
) -> dict[str, float]:
    """Score one response. Every key except ``score`` becomes a metric.

    Raises:
        RewardError: The reward abstained. verl then drops the sample and does not count it as wrong.
    """
    spec, reward = _judges(agent, rewards)
    info = dict(extra_info or {})
    verdict = await reward.score(
        Sample(
            spec=spec,
            data_source=data_source,
            question=str(info.get("question", "")),
            segments=author_segments(solution_str, spec),
            ground_truth=ground_truth,
            extra_info=info,
        )
    )
    if verdict.score is None:
        raise RewardError(f"the reward abstained (data_source {data_source!r}): {verdict.evidence}")
    solved = verdict.parts.get("correct", 0.0) * verdict.parts.get("format", 0.0)
    return {"score": verdict.score, "acc": solved, **verdict.parts}


@cache
def _judges(agent: str, rewards: str | None) -> tuple[AgentSpec, Reward]:
    return load_agent(agent), load_reward(None if rewards is None else Path(rewards))
