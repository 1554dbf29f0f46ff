"""From the work of a team of agents to trajectories that one model can learn from."""

from afm.distill.filters import (
    Filter,
    FilterPlan,
    FilterSummary,
    FormatFilter,
    Funnel,
    QualityFilter,
    run_filters,
)
from afm.distill.math_team import ScriptedMathTeam
from afm.distill.merge import RoleMap, merge_attempt, merge_log
from afm.distill.record import Event, EventKind, EventLog, Recorder, read_attempts, read_events
from afm.distill.run import DistillSummary, Team, collect, distill
from afm.distill.wiki_team import CheckingWikiTeam, Flaws, ScriptedTeam, ScriptedWikiTeam, scripted_team

__all__ = [
    "CheckingWikiTeam",
    "DistillSummary",
    "Event",
    "EventKind",
    "EventLog",
    "Filter",
    "FilterPlan",
    "FilterSummary",
    "Flaws",
    "FormatFilter",
    "Funnel",
    "QualityFilter",
    "Recorder",
    "RoleMap",
    "ScriptedMathTeam",
    "ScriptedTeam",
    "ScriptedWikiTeam",
    "Team",
    "collect",
    "distill",
    "merge_attempt",
    "merge_log",
    "read_attempts",
    "read_events",
    "run_filters",
    "scripted_team",
]
