"""A local page over any number of episodes, with an index, search, and comparison of two episodes.

Only :mod:`afm.evaluation.viewer.server` needs FastAPI. The rest uses SQLite and JSON lines.
"""

from afm.evaluation.viewer.index import EpisodeIndex
from afm.evaluation.viewer.query import Filters, Listing, Order, facets, listing

__all__ = ["EpisodeIndex", "Filters", "Listing", "Order", "facets", "listing"]
