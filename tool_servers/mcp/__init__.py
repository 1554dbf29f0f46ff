"""Our tools for any MCP client (Model Context Protocol)."""
