"""The image server: a vision model looks at pictures for agents."""
