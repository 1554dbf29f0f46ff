"""Agents: their declaration (:class:`AgentSpec`), the shipped ones, and loading of your own."""

from __future__ import annotations

from afm.agents.load import (
    MODEL_AGENT_FILE,
    MODEL_AGENTS_DIR,
    adapter_base,
    agent_of_model,
    holds_model,
    lacks_model,
    load_agent,
    model_folder,
    save_agent,
    save_agents,
    saved_agents,
    shipped_agents,
)
from afm.agents.prompt_source import PromptMode, PromptSource, PromptTemplate
from afm.agents.spec import START, AgentSpec, AnswerFormat, Grade, LimitOverrides, Limits, RoleKind, RoleSpec

__all__ = [
    "MODEL_AGENTS_DIR",
    "MODEL_AGENT_FILE",
    "START",
    "AgentSpec",
    "AnswerFormat",
    "Grade",
    "LimitOverrides",
    "Limits",
    "PromptMode",
    "PromptSource",
    "PromptTemplate",
    "RoleKind",
    "RoleSpec",
    "adapter_base",
    "agent_of_model",
    "holds_model",
    "lacks_model",
    "load_agent",
    "model_folder",
    "save_agent",
    "save_agents",
    "saved_agents",
    "shipped_agents",
]
