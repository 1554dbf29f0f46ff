"""What the servers' YAMLs have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import read_file, validated
from afm.settings import Environment
from tool_servers.shared.guard import DEFAULT_PORTS


class ServerSettings(BaseModel):
    """How much work a server takes on.

    Attributes:
        max_parallel: Requests at work at the same time.
        max_waiting: Requests that may wait for one of those places; further ones get status 429.
        max_wait_s: The longest wait; then status 429.
        finish_s: How long requests may go on when the server is told to stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    content: ClassVar[str] = "server settings"
    """What errors call the file's content."""

    max_parallel: int = Field(default=64, ge=1)
    max_waiting: int = Field(default=512, ge=0)
    max_wait_s: float = Field(default=20.0, gt=0)
    finish_s: float = Field(default=10.0, gt=0)

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """The settings in a YAML, the defaults without one; paths in it are relative to the working folder.

        Raises:
            ConfigError: Names the file, the key path, the value and what was expected.
        """
        return cls() if path is None else validated(cls, read_file(path, cls.content), str(path))


class FetcherSettings(ServerSettings):
    """What a server that fetches from the web for agents may fetch.

    Attributes:
        trusted: ``host:port`` pairs that are read although they are not public, e.g. a test site on this machine.
        ports: Ports of public hosts.
        max_bytes: Of what is fetched, as it comes and after decompression.
        fetch_s: For one fetch, redirects included.
        workers: Processes that take apart what was fetched; at most four, one for each core, when ``None``.
        cached_s: For how long results are kept.
        request_s: The longest time for a request that does not say how long its sender waits.
    """

    trusted: tuple[str, ...] = ()
    ports: tuple[int, ...] = tuple(sorted(DEFAULT_PORTS))
    max_bytes: int = Field(default=10 << 20, ge=1024)
    fetch_s: float = Field(default=30.0, gt=0)
    workers: int | None = Field(default=None, ge=1)
    cached_s: float = Field(default=3 * 3600.0, gt=0)
    request_s: float = Field(default=90.0, gt=0)

    def worker_count(self) -> int:
        """Processes that take apart what was fetched."""
        return self.workers or min(4, len(os.sched_getaffinity(0)))


def cache_place(environment: Environment) -> str:
    """``WEB_CACHE``, or a file in the user's cache folder."""
    secret = environment.web_cache
    return secret.get_secret_value() if secret else str(Path("~/.cache/afm/web.sqlite").expanduser())
