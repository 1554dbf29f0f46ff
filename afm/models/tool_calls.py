"""How a chat-only model calls tools: a choice that settings read without loading a model."""

from __future__ import annotations

from enum import StrEnum


class ToolCalls(StrEnum):
    """How a chat-only model calls tools."""

    TAGS = "tags"
    """In the agent's tags, as part of its text."""
    NATIVE = "native"
    """By the endpoint's own tool calls: one function a tool role, with the role's content as its one argument."""
