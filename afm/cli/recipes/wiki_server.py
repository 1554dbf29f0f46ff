"""A wiki server of one job's own: on a free port of this machine, and never outliving the job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afm.errors import ToolError
from afm.processes import tied_environment

_ADDRESS = "WIKI_RAG_SERVER_URL"
_READY = "listening on "


@contextmanager
def wiki_server(index: Path, log: Path) -> Iterator[None]:
    """Serve ``index`` while the block runs; wiki search tools without an address of their own find it.

    The address is in the environment, hence known to processes started within the block, too.

    Args:
        log: Receives what the server writes to standard error.

    Raises:
        ToolError: The server did not start.
    """
    words = [sys.executable, "-P", "-m", "tool_servers.wiki_search"]
    words += [f"--index={index}", "--host=127.0.0.1", "--port=0"]
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            words, env=tied_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        assert server.stdout is not None
        try:
            first = server.stdout.readline().strip()  # empty when it ended
            if not first.startswith(_READY):
                raise ToolError(f"the wiki server did not start; see {log}")
            with _environment(_ADDRESS, first.removeprefix(_READY)):
                yield
        finally:
            server.terminate()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
