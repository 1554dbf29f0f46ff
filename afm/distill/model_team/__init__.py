"""A team of agents with models behind it: planner, tool agents, reflector, verifier, writer."""

from afm.distill.model_team.settings import TeamSettings, read_team
from afm.distill.model_team.team import ModelTeam, load_team

__all__ = ["ModelTeam", "TeamSettings", "load_team", "read_team"]
