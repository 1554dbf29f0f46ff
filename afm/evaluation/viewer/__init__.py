"""A local page over any number of episodes: indexed, searchable, read one by one or side by side.

:mod:`afm.evaluation.viewer.server` is what needs FastAPI; the rest is SQLite and JSON lines.
"""

from afm.evaluation.viewer.index import EpisodeIndex
from afm.evaluation.viewer.query import Filters, Listing, Order, facets, listing

__all__ = ["EpisodeIndex", "Filters", "Listing", "Order", "facets", "listing"]
