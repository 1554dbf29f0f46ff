"""Larger questions by model: proposed from passages, and kept when they prove to need every one of them."""

from afm.distill.expand.passages import Passage, groups, read_passages
from afm.distill.expand.run import ExpandSummary, expand_corpus
from afm.distill.expand.settings import ExpandSettings, read_expansion
from afm.distill.expand.team import ExpandTeam

__all__ = [
    "ExpandSettings",
    "ExpandSummary",
    "ExpandTeam",
    "Passage",
    "expand_corpus",
    "groups",
    "read_expansion",
    "read_passages",
]
