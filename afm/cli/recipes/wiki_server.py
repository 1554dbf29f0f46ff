"""Servers of one job's own: on a free port of this machine, and never outliving the job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    with loopback_server("wiki_search", [f"--index={index}"], log) as url, environment({_ADDRESS: url}):
        yield


@contextmanager
def loopback_server(name: str, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run ``tool_servers.NAME`` on a free port of this machine while the block runs; yields its address.

    Raises:
        ToolError: The server did not start.
    """
    words = [sys.executable, "-P", "-m", f"tool_servers.{name}", *arguments, "--host=127.0.0.1", "--port=0"]
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
                raise ToolError(f"the {name.replace('_', ' ')} server did not start; see {log}")
            yield first.removeprefix(_READY)
        finally:
            server.terminate()


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
