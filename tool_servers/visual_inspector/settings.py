"""Settings of the image server."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import read_file, validated
from tool_servers.shared.guard import DEFAULT_PORTS


class InspectorSettings(BaseModel):
    """The YAML of the image server.

    Attributes:
        folder: Pictures below it may be named by their path; ``VISION_IMAGE_FOLDER`` when ``None``.
        trusted: ``host:port`` pairs that are read although they are not public, e.g. a test site on this machine.
        ports: Ports of public hosts.
        max_bytes: Of a picture's file.
        max_pixels: Width times height; larger pictures are refused before they are unpacked.
        max_side: Pixels of the longer side that the model is sent; larger pictures are scaled down.
        fetch_s: For one picture, redirects included.
        decode_s: For unpacking one picture; then its worker is killed.
        workers: Pictures unpacked at the same time; at most four, one for each core, when ``None``.
        model_s: For the model's answer, repetitions included.
        max_tokens: Of the model's answer.
        cached_answers: Answers kept.
        cached_s: For how long.
        max_parallel: Requests at work at the same time.
        max_waiting: Requests that may wait; further ones get status 429.
        max_wait_s: The longest wait; then status 429.
        request_s: The longest time for a request that does not say how long its sender waits.
        finish_s: How long requests may go on when the server is told to stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = None
    trusted: tuple[str, ...] = ()
    ports: tuple[int, ...] = tuple(sorted(DEFAULT_PORTS))
    max_bytes: int = Field(default=20 << 20, ge=1024)
    max_pixels: int = Field(default=50_000_000, ge=1)
    max_side: int = Field(default=2048, ge=16)
    fetch_s: float = Field(default=30.0, gt=0)
    decode_s: float = Field(default=10.0, gt=0)
    workers: int | None = Field(default=None, ge=1)
    model_s: float = Field(default=60.0, gt=0)
    max_tokens: int = Field(default=1_000, ge=16)
    cached_answers: int = Field(default=10_000, ge=1)
    cached_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    max_parallel: int = Field(default=32, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=20.0, gt=0)
    request_s: float = Field(default=90.0, gt=0)
    finish_s: float = Field(default=10.0, gt=0)

    def worker_count(self) -> int:
        """Pictures unpacked at the same time."""
        return self.workers or min(4, len(os.sched_getaffinity(0)))


def load_inspector_settings(path: Path | None) -> InspectorSettings:
    """The settings in a YAML, the defaults without one.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    if path is None:
        return InspectorSettings()
    return validated(InspectorSettings, read_file(path, "image server settings"), str(path))
