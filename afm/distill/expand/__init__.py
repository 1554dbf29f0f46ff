"""Larger questions by model: proposed from passages or from pages that tools find, and kept when they prove to need every one of them."""

from afm.distill.expand.passages import SourcePassage, groups, read_passages
from afm.distill.expand.run import ExpandSummary, expand_corpus, expand_web
from afm.distill.expand.settings import ExpandSettings, read_expansion
from afm.distill.expand.team import ExpandTeam, WebExpandTeam

__all__ = [
    "ExpandSettings",
    "ExpandSummary",
    "ExpandTeam",
    "SourcePassage",
    "WebExpandTeam",
    "expand_corpus",
    "expand_web",
    "groups",
    "read_expansion",
    "read_passages",
]
