"""The viewer's server: a page, its two assets, and JSON about episodes. For this machine only."""
# FastAPI reads the annotations of its endpoints, and is imported late: so annotations are no texts here.

import logging
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from afm.errors import DataError, MissingExtraError
from afm.evaluation.viewer.episode import Decode, episode_view, read_episode, token_view
from afm.evaluation.viewer.index import NAMED, EpisodeIndex, Progress
from afm.evaluation.viewer.query import Filters, Order, episode_row, facets, listing, numbered, place_of
from afm.trajectory.io import load_advantages

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger(__name__)
_ASSETS = {
    "": ("viewer.html", "text/html"),
    "viewer.css": ("viewer.css", "text/css"),
    "viewer.js": ("viewer.js", "text/javascript"),
}
# Whatever an episode holds, the page runs no script but its own and asks nobody else for anything.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOSTS = {"127.0.0.1", "localhost", "::1"}

_Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What SQLite can compare with."""


class Follower(threading.Thread):
    """Keeps an index up with its files, from a thread of its own.

    Attributes:
        progress: How far it is.
        failure: Why it stopped, empty while it works.
    """

    def __init__(self, index: EpisodeIndex, *, every_s: float = 1.0) -> None:
        super().__init__(name="afm-view-index", daemon=True)
        self.progress = Progress(0, 0, 0, 0, 0)
        self.failure = ""
        self._index = index
        self._every_s = every_s
        self._ended = threading.Event()

    def run(self) -> None:
        """Index again and again until :meth:`stop`."""
        while not self._ended.is_set():
            try:
                for progress in self._index.refresh():
                    self.progress = progress
                    if self._ended.is_set():
                        return
                self.failure = ""
            except Exception as error:  # noqa: BLE001 - the thread's border: shown on the page, tried again
                self.failure = f"{type(error).__name__}: {error}"
                _log.warning("the index could not be brought up to date: %s", self.failure)
            self._ended.wait(self._every_s)

    def stop(self) -> None:
        """End soon."""
        self._ended.set()


def _is_own_name(host: str) -> bool:
    """Whether a Host header names this machine; Starlette's own check takes no address of IPv6."""
    try:
        return urlsplit(f"//{host}").hostname in _HOSTS
    except ValueError:
        return False


def make_app(index: EpisodeIndex, follower: Follower, decode: Decode | None = None) -> "FastAPI":
    """The application.

    Args:
        index: Of what is shown.
        follower: Asked how far the index is.
        decode: Text of token ids; without it tokens are shown as numbers.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, PlainTextResponse, Response
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "servers") from error

    app = FastAPI(openapi_url=None)

    @app.middleware("http")
    async def for_this_machine(request: Request, call_next: Any) -> Any:
        # A page of another site may have its name resolve to this machine: its requests bear that name.
        if not _is_own_name(request.headers.get("host", "")):
            return PlainTextResponse("Invalid host header", 400)
        return await call_next(request)

    @app.middleware("http")
    async def secured(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(KeyError)
    async def absent(request: Request, error: KeyError) -> JSONResponse:
        return JSONResponse({"error": f"there is no episode {error}"}, 404)

    @app.exception_handler(DataError)
    async def unreadable(request: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.get("/api/status")
    def status() -> dict[str, Any]:
        return asdict(follower.progress) | {"failure": follower.failure, "path": str(index.path)}

    @app.get("/api/facets")
    def names() -> dict[str, Any]:
        with closing(index.connect()) as connection:
            return facets(connection)

    @app.get("/api/episodes")
    def episodes(
        request: Request,
        text: str = "",
        step: _Number | None = None,
        question: _Number | None = None,
        order: Order = Order.FILE,
        offset: _Number = 0,
        limit: int = 100,
    ) -> dict[str, Any]:
        filters = Filters(_names(request.query_params), step, text, question)
        with closing(index.connect()) as connection:
            return asdict(listing(connection, filters, order=order, offset=offset, limit=limit))

    @app.get("/api/find")
    def find(name: str, file: str = "") -> dict[str, Any]:
        with closing(index.connect()) as connection:
            return {"number": numbered(connection, name, file)}

    @app.get("/api/episodes/{number}")
    def episode(number: _Number) -> dict[str, Any]:
        with closing(index.connect()) as connection:
            row, place = episode_row(connection, number), place_of(connection, number)
        return {"row": row} | episode_view(read_episode(*place), place[0])

    @app.get("/api/episodes/{number}/tokens")
    def tokens(number: _Number) -> list[dict[str, Any]]:
        with closing(index.connect()) as connection:
            place = place_of(connection, number)
        record = read_episode(*place)
        return token_view(record, decode, load_advantages(Path(place[0])).get(record.id))

    folder = files("afm.evaluation.viewer") / "static"

    @app.get("/{name:path}")
    def asset(name: str) -> Response:
        if name not in _ASSETS:
            return JSONResponse({"error": "not found"}, 404)
        file, kind = _ASSETS[name]
        return Response((folder / file).read_text("utf-8"), media_type=kind)

    return app


def _names(given: Mapping[str, str]) -> dict[str, str]:
    return {kind: given[kind] for kind in (*NAMED, "tool") if kind in given}
