"""Settings of the image server."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tool_servers.shared.settings import FetcherSettings


class InspectorSettings(FetcherSettings):
    """The YAML of the image server.

    Attributes:
        folder: Pictures below it may be named by their path; ``VISION_IMAGE_FOLDER`` when ``None``.
        max_pixels: Width times height; larger pictures are refused before they are unpacked.
        max_side: Pixels of the longer side that the model is sent; larger pictures are scaled down.
        decode_s: For unpacking one picture; then its worker is killed.
        model_s: For the model's answer, repetitions included.
        max_tokens: Of the model's answer.
        cached_answers: Answers kept.
    """

    content: ClassVar[str] = "image server settings"

    folder: Path | None = None
    max_bytes: int = Field(default=20 << 20, ge=1024)
    max_pixels: int = Field(default=50_000_000, ge=1)
    max_side: int = Field(default=2048, ge=16)
    decode_s: float = Field(default=10.0, gt=0)
    model_s: float = Field(default=60.0, gt=0)
    max_tokens: int = Field(default=1_000, ge=16)
    cached_answers: int = Field(default=10_000, ge=1)
    cached_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    max_parallel: int = Field(default=32, ge=1)
    max_waiting: int = Field(default=256, ge=0)
