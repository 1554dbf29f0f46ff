"""Agents: their declaration (:class:`AgentSpec`), the ones we ship, and how to load your own."""

from __future__ import annotations

from afm.agents.load import (
    MODEL_AGENT_FILE,
    agent_of_model,
    load_agent,
    model_folder,
    save_agent,
    shipped_agents,
)
from afm.agents.spec import START, AgentSpec, AnswerFormat, Grade, Limits, RoleKind, RoleSpec

__all__ = [
    "MODEL_AGENT_FILE",
    "START",
    "AgentSpec",
    "AnswerFormat",
    "Grade",
    "Limits",
    "RoleKind",
    "RoleSpec",
    "agent_of_model",
    "load_agent",
    "model_folder",
    "save_agent",
    "shipped_agents",
]
