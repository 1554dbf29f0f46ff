"""Tools that agents call: their interface, the ones we ship, and the registry that loads them."""

from afm.tools.base import Tool, ToolResult
from afm.tools.registry import ToolContext, ToolSchema, load_tools

__all__ = ["Tool", "ToolContext", "ToolResult", "ToolSchema", "load_tools"]
