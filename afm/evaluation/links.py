"""Where an episode can be looked at: addresses of `afm view` that work once it runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

VIEW_PORT = 8765
"""Of `afm view` in links, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ViewLinks:
    """Links into one run's episodes.

    Attributes:
        root: What `afm view` is to show.
        port: Where it is to listen.
    """

    root: Path
    port: int = VIEW_PORT

    @property
    def command(self) -> str:
        """What makes the links work."""
        return f"afm view {shlex.quote(str(self.root))} --port {self.port}"

    def to(self, record_id: str, episodes: Path) -> str:
        """The address of one episode of the file ``episodes``."""
        where = os.path.relpath(episodes.resolve(), self.root.resolve())
        # Half a surrogate pair has no place in an address.
        known = record_id.encode("utf-8", "replace").decode()
        return f"http://127.0.0.1:{self.port}/#" + urlencode({"find": known, "in": where})


def links_below(folders: Sequence[Path], port: int = VIEW_PORT) -> ViewLinks:
    """Links into several folders: the deepest one that holds them all is shown."""
    if len(folders) == 1:
        return ViewLinks(folders[0], port)
    return ViewLinks(Path(os.path.commonpath([folder.resolve() for folder in folders])), port)
