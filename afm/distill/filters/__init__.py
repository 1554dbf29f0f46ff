"""What decides whether a trajectory is good enough to learn from: stages with a reason per dropped row."""

from afm.distill.filters.base import Filter, Rule, dropped, run_filters, segments_of
from afm.distill.filters.contamination import ContaminationFilter, ContaminationSettings
from afm.distill.filters.funnel import Funnel, StageCount
from afm.distill.filters.near_duplicates import NearDuplicateSettings
from afm.distill.filters.plan import FilterPlan, build_stages, load_plan
from afm.distill.filters.quality import LanguageFilter, LanguageSettings, QualityFilter, QualitySettings
from afm.distill.filters.rules import (
    ComplexityFilter,
    ComplexitySettings,
    Correction,
    CorrectionSettings,
    FormatFilter,
    LengthFilter,
    LengthSettings,
    ReflectionFilter,
    ReflectionSettings,
    RepetitionFilter,
    RepetitionSettings,
)
from afm.distill.filters.run import FilterSummary, filter_files
from afm.distill.filters.sensitive import PersonalSettings, SecretSettings, SensitiveFilter

__all__ = [
    "ComplexityFilter",
    "ComplexitySettings",
    "ContaminationFilter",
    "ContaminationSettings",
    "Correction",
    "CorrectionSettings",
    "Filter",
    "FilterPlan",
    "FilterSummary",
    "FormatFilter",
    "Funnel",
    "LanguageFilter",
    "LanguageSettings",
    "LengthFilter",
    "LengthSettings",
    "NearDuplicateSettings",
    "PersonalSettings",
    "QualityFilter",
    "QualitySettings",
    "ReflectionFilter",
    "ReflectionSettings",
    "RepetitionFilter",
    "RepetitionSettings",
    "Rule",
    "SecretSettings",
    "SensitiveFilter",
    "StageCount",
    "build_stages",
    "dropped",
    "filter_files",
    "load_plan",
    "run_filters",
    "segments_of",
]
