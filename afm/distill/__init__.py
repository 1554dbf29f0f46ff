"""From the work of a team of agents to trajectories that one model can learn from."""
