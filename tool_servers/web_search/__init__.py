"""The web search server: Serper, SearxNG, or an index of local pages."""
