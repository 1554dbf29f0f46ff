"""The web search server: a search service with a key, a SearxNG, or an index of pages of one's own."""
