"""The agents of an evaluation and their description in the manifest. Rows may choose between several agents."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, PromptMode, PromptSource
from afm.configuration import read_mapping
from afm.datasets import Task
from afm.rewards import Reward
from afm.rewards.judge_prompt import JudgeText
from afm.rollout.routes import Route, Routes
from afm.tools import Tool
from afm.trajectory.record import Record


@dataclass(frozen=True, slots=True)
class RowAgents:
    """What the episodes of each agent need, by key in ``agents:``. ``originals`` are the agents with all their tools."""

    routes: Routes
    tools: Mapping[str, Mapping[str, Tool]]
    rewards: Mapping[str, Reward]
    prompts: Mapping[str, PromptSource]
    originals: Mapping[str, AgentSpec] = field(default_factory=dict)

    @property
    def agents(self) -> Agents:
        """Declarations of the agents."""
        return Agents({spec.name: spec for spec in self.routes.specs}, self.originals)

    async def close(self) -> None:
        """Close tools and rewards."""
        tools = {id(tool): tool for opened in self.tools.values() for tool in opened.values()}
        rewards = {id(reward): reward for reward in self.rewards.values()}
        await asyncio.gather(
            *(tool.close() for tool in tools.values()), *(reward.close() for reward in rewards.values())
        )


@dataclass(frozen=True, slots=True)
class Agents:
    """Declarations of the agents of records, by name. The first is the main one."""

    specs: Mapping[str, AgentSpec]
    originals: Mapping[str, AgentSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, agents: AgentSpec | Agents, original: AgentSpec | None = None) -> Agents:
        """Wrap a single agent. Several are returned unchanged."""
        if isinstance(agents, Agents):
            return agents
        return cls({agents.name: agents}, {} if original is None else {agents.name: original})

    @property
    def first(self) -> AgentSpec:
        """The main agent."""
        return next(iter(self.specs.values()))

    def declared(self, record: Record) -> AgentSpec:
        """Return the agent of a record, the main one for an unknown name."""
        return self.specs.get(record.agent, self.first)

    def original(self, record: Record) -> AgentSpec | None:
        """Return the agent of a record with its tools, if they were removed."""
        return self.originals.get(self.declared(record).name)


def describe_agent(spec: AgentSpec, original: AgentSpec | None) -> dict[str, Any]:
    """Describe an agent for a manifest. ``original`` is the agent before its tools were removed."""
    before = {} if original is None else {"without_tools_of": original.dump()}
    return {"name": spec.name, "digest": spec.digest, "spec": spec.dump(), **before}


def describe_row_agents(agents: RowAgents, tasks: list[Task]) -> dict[str, Any]:
    """Describe several agents for a manifest, by key in ``agents:``: everything that their scores depend on."""
    own = {route.name: _of_route(tasks, agents.routes, route) for route in agents.routes}
    return {route.name: _entry(route, agents, own[route.name]) for route in agents.routes}


def describe_prompt(tasks: list[Task], spec: AgentSpec, prompt: PromptSource) -> dict[str, Any]:
    """Describe the prompts of a run for a manifest. Empty for the agent's own prompt, which its digest covers."""
    if prompt.mode is PromptMode.OWN:
        return {}
    return {"prompt": prompt.recorded | {"sha256": _prompt_checksum(tasks, spec, prompt)}}


def content_of(source: Path | dict[str, Any] | None, what: str) -> dict[str, Any] | None:
    """Return the settings, read from a YAML if ``source`` is a path. ``None`` without settings."""
    return None if source is None else read_mapping(source, what)[1]


def with_judge_text(reward: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the reward with a digest in place of the path of its judge's prompt: a score depends on the text."""
    judge = (reward or {}).get("judge")
    if reward is None or not isinstance(judge, dict) or not judge.get("prompt"):
        return reward
    digest = JudgeText.load(Path(str(judge["prompt"]))).digest
    return {**reward, "judge": {**judge, "prompt": f"sha256 {digest}"}}


def _entry(route: Route, agents: RowAgents, tasks: list[Task]) -> dict[str, Any]:
    """Describe everything that the scores of one of several agents depend on."""
    spec = route.declared
    return {
        "agent": describe_agent(spec, agents.originals.get(spec.name)),
        "data_sources": list(route.data_sources),
        "abilities": list(route.abilities),
        "tasks": len(tasks),
        "tools": content_of(route.tools, "tools"),
        "reward": with_judge_text(content_of(route.rewards, "rewards")),
        "limits": route.limits.model_dump(mode="json"),
        **describe_prompt(tasks, spec, agents.prompts[route.name]),
    }


def _of_route(tasks: list[Task], routes: Routes, route: Route) -> list[Task]:
    return [task for task in tasks if routes.find(task.data_source, task.ability) is route]


def _prompt_checksum(tasks: Iterable[Task], spec: AgentSpec, prompt: PromptSource) -> str:
    """Return a SHA-256 over the chats that ask the tasks, in order."""
    digest = hashlib.sha256()
    for task in tasks:
        chat = prompt.messages(spec, task.question, task.prompt)
        digest.update(json.dumps(chat, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
