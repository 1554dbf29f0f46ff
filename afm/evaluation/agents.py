"""The agents of an evaluation, one or several where each row chooses, and what its manifest says of them."""

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
    """What the episodes of each agent need, by its key in ``agents:``. ``originals`` are agents with all their tools."""

    routes: Routes
    tools: Mapping[str, Mapping[str, Tool]]
    rewards: Mapping[str, Reward]
    prompts: Mapping[str, PromptSource]
    originals: Mapping[str, AgentSpec] = field(default_factory=dict)

    @property
    def agents(self) -> Agents:
        """Their declarations."""
        return Agents({spec.name: spec for spec in self.routes.specs}, self.originals)

    async def close(self) -> None:
        """Free what tools and rewards hold."""
        tools = {id(tool): tool for opened in self.tools.values() for tool in opened.values()}
        rewards = {id(reward): reward for reward in self.rewards.values()}
        await asyncio.gather(
            *(tool.close() for tool in tools.values()), *(reward.close() for reward in rewards.values())
        )


@dataclass(frozen=True, slots=True)
class Agents:
    """The declarations that records were made with, by the name that records have, the first one first."""

    specs: Mapping[str, AgentSpec]
    originals: Mapping[str, AgentSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, agents: AgentSpec | Agents, original: AgentSpec | None = None) -> Agents:
        """One agent as the only one; several as they are."""
        if isinstance(agents, Agents):
            return agents
        return cls({agents.name: agents}, {} if original is None else {agents.name: original})

    @property
    def first(self) -> AgentSpec:
        """The main one."""
        return next(iter(self.specs.values()))

    def declared(self, record: Record) -> AgentSpec:
        """That of a record; the main one for a name that is not known."""
        return self.specs.get(record.agent, self.first)

    def original(self, record: Record) -> AgentSpec | None:
        """The agent of a record with its tools, where they were taken away."""
        return self.originals.get(self.declared(record).name)


def describe_agent(spec: AgentSpec, original: AgentSpec | None) -> dict[str, Any]:
    """What a manifest says of an agent; ``original`` is the one before its tools were taken away."""
    before = {} if original is None else {"without_tools_of": original.dump()}
    return {"name": spec.name, "digest": spec.digest, "spec": spec.dump(), **before}


def describe_row_agents(agents: RowAgents, tasks: list[Task]) -> dict[str, Any]:
    """What a manifest says of several agents, by key in ``agents:``: everything that their scores depend on."""
    own = {route.name: _of_route(tasks, agents.routes, route) for route in agents.routes}
    return {route.name: _entry(route, agents, own[route.name]) for route in agents.routes}


def describe_prompt(tasks: list[Task], spec: AgentSpec, prompt: PromptSource) -> dict[str, Any]:
    """What tells the prompts of two runs apart; nothing for an agent's own, for which its digest speaks."""
    if prompt.mode is PromptMode.OWN:
        return {}
    return {"prompt": prompt.told | {"sha256": _prompt_checksum(tasks, spec, prompt)}}


def content_of(source: Path | dict[str, Any] | None, what: str) -> dict[str, Any] | None:
    """The settings in a YAML, or as they are; ``None`` without settings."""
    return None if source is None else read_mapping(source, what)[1]


def with_judge_text(reward: dict[str, Any] | None) -> dict[str, Any] | None:
    """The reward with the digest of its judge's own prompt in place of the path: a score depends on the text."""
    judge = (reward or {}).get("judge")
    if reward is None or not isinstance(judge, dict) or not judge.get("prompt"):
        return reward
    digest = JudgeText.load(Path(str(judge["prompt"]))).digest
    return {**reward, "judge": {**judge, "prompt": f"sha256 {digest}"}}


def _entry(route: Route, agents: RowAgents, tasks: list[Task]) -> dict[str, Any]:
    """Everything that the scores of one agent of several depend on."""
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
    """Over the chats that the tasks are asked with, in order."""
    digest = hashlib.sha256()
    for task in tasks:
        chat = prompt.messages(spec, task.question, task.prompt)
        digest.update(json.dumps(chat, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
