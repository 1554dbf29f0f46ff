"""Agent foundation models: one language model trained to work like a team of agents."""

__version__ = "0.1.0"
