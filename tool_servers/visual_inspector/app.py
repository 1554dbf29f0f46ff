"""The image server's HTTP interface: ``POST /inspect``; the rest as in :mod:`tool_servers.shared.endpoint`.

``{"image": "https://a.org/map.png", "question": "...", "seconds": 60}`` gives ``{text, kind, cached, width, height, format}``;
a picture that could not be had has a ``kind`` and says why in ``text``.
"""

from __future__ import annotations

from fastapi import FastAPI

from afm.errors import ConfigError
from afm.settings import Environment
from tool_servers.shared.cache import open_cache
from tool_servers.shared.endpoint import Endpoint
from tool_servers.shared.fetch import Fetcher, FetchLimits
from tool_servers.shared.guard import Policy
from tool_servers.shared.metrics import Gauge
from tool_servers.shared.settings import cache_place
from tool_servers.visual_inspector.inspecting import Inspector, InspectRequest
from tool_servers.visual_inspector.sources import Decoder, PictureSource
from tool_servers.visual_inspector.vision import InspectorSettings, open_vision_model

PATH = "/inspect"
_LATE_S = 5.0
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
"""What a picture may be called on its way; its content decides."""


def inspector_app(settings: InspectorSettings, environment: Environment, token: str | None) -> FastAPI:
    """The application.

    Raises:
        ConfigError: No vision model is set, the folder does not exist, or the cache cannot be opened.
    """
    model = open_vision_model(settings, environment)
    folder = settings.folder or environment.vision_image_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"folder of pictures {folder}: no such folder (VISION_IMAGE_FOLDER)")
    limits = FetchLimits(
        max_bytes=settings.max_bytes, total_s=settings.fetch_s, types=_TYPES, accept="image/*"
    )
    fetcher = Fetcher(Policy(frozenset(settings.ports), frozenset(settings.trusted)), limits)
    cache = open_cache(
        cache_place(environment), "vision", max_entries=settings.cached_answers, ttl_s=settings.cached_s
    )
    inspector = Inspector(
        PictureSource(fetcher, folder, settings.max_bytes),
        Decoder(settings.worker_count(), settings.decode_s, settings.max_pixels, settings.max_side),
        model,
        cache,
        request_s=settings.request_s,
    )
    endpoint = Endpoint(
        "vision",
        PATH,
        InspectRequest,
        inspector.answer,
        settings,
        work_s=settings.request_s + _LATE_S,
        token=token,
        metrics=(
            inspector.pictures,
            Gauge("afm_vision_cache_errors", "Cache operations that failed.", lambda: cache.errors),
        ),
        close=inspector.close,
    )
    return endpoint.app()
