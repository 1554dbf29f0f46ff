"""The image server: looks at pictures for agents with a vision model."""
