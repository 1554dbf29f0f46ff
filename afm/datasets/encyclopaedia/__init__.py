"""A closed, generated encyclopaedia: corpus, web site and multi-hop questions with gold answers and gold paths."""

from afm.datasets.encyclopaedia.questions import Shape, generate
from afm.datasets.encyclopaedia.site import Site, site_server, write_corpus, write_encyclopaedia
from afm.datasets.encyclopaedia.world import Encyclopaedia

__all__ = ["Encyclopaedia", "Shape", "Site", "generate", "site_server", "write_corpus", "write_encyclopaedia"]
