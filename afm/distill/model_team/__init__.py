"""A team of agents with models behind it: planner, tool agents, reflector, verifier, writer."""
