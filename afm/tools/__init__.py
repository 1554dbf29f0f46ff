"""Tools that agents call: their interface, the shipped tools, and the registry that loads them."""

from afm.tools.base import Tool, ToolContext, ToolResult, ToolSchema
from afm.tools.registry import check_tools, load_tools

__all__ = ["Tool", "ToolContext", "ToolResult", "ToolSchema", "check_tools", "load_tools"]
