"""From the work of a team of agents to trajectories that one model can learn from."""

from afm.distill.collect import Team, collect
from afm.distill.filters import Filter, FormatFilter, Funnel, QualityFilter, run_filters
from afm.distill.merge import RoleMap, merge_attempt, merge_log
from afm.distill.record import Event, EventKind, EventLog, Recorder, read_attempts, read_events
from afm.distill.run import DistillSummary, distill
from afm.distill.team import ScriptedMathTeam

__all__ = [
    "DistillSummary",
    "Event",
    "EventKind",
    "EventLog",
    "Filter",
    "FormatFilter",
    "Funnel",
    "QualityFilter",
    "Recorder",
    "RoleMap",
    "ScriptedMathTeam",
    "Team",
    "collect",
    "distill",
    "merge_attempt",
    "merge_log",
    "read_attempts",
    "read_events",
    "run_filters",
]
