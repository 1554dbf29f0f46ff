"""A recording proxy in front of OpenAI-compatible endpoints."""
