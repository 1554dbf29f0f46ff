"""The server of the viewer: a page, its assets, and JSON about episodes and their run. It serves this machine only."""

# FastAPI reads the annotations of its endpoints and is imported late, so annotations must not be strings here.

import logging
import threading
from contextlib import closing
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from afm.errors import DataError, MissingExtraError, first_fault
from afm.evaluation.page import template
from afm.evaluation.viewer.episodes import episode_view, read_episode, token_view
from afm.evaluation.viewer.index import NAMED, EpisodeIndex, Progress
from afm.evaluation.viewer.query import (
    Filters,
    Order,
    episode_row,
    facets,
    file_rows,
    listing,
    numbered,
    place_of,
)
from afm.evaluation.viewer.run_files import RunFiles
from afm.trajectory.record import load_advantages

if TYPE_CHECKING:
    from fastapi import FastAPI


_log = logging.getLogger(__name__)
PAGE, PALETTE = "viewer.html", "palette.css"
_KINDS = {".css": "text/css", ".js": "text/javascript"}
# Whatever an episode holds, the page only runs its own scripts and only sends requests to its own server.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOSTS = {"127.0.0.1", "localhost", "::1"}

_Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that SQLite can compare."""


class Follower(threading.Thread):
    """Keeps an index up to date in its own thread.

    Attributes:
        progress: Progress of the index.
        failure: The last error, empty without one.
    """

    def __init__(self, index: EpisodeIndex, *, every_s: float = 1.0) -> None:
        super().__init__(name="afm-view-index", daemon=True)
        self.progress = Progress(0, 0, 0, 0, 0)
        self.failure = ""
        self._index = index
        self._every_s = every_s
        self._ended = threading.Event()

    def run(self) -> None:
        """Refresh the index until :meth:`stop`."""
        while not self._ended.is_set():
            try:
                for progress in self._index.refresh():
                    self.progress = progress
                    if self._ended.is_set():
                        return
                self.failure = ""
            except Exception as error:  # noqa: BLE001 - border of the thread: the page shows it, and the next refresh tries again
                self.failure = f"{type(error).__name__}: {error}"
                _log.warning("the index could not be updated: %s", self.failure)
            self._ended.wait(self._every_s)

    def stop(self) -> None:
        """End the thread soon."""
        self._ended.set()


def _is_own_name(host: str) -> bool:
    """Whether a Host header names this machine. Starlette's own check does not accept IPv6 addresses."""
    try:
        return urlsplit(f"//{host}").hostname in _HOSTS
    except ValueError:
        return False


def assets() -> dict[str, str]:
    """Return the text of every file of the page by name. :data:`PALETTE` is rendered from the table of colours."""
    folder = files("afm.evaluation.viewer") / "static"
    texts = {file.name: file.read_text("utf-8") for file in folder.iterdir() if file.is_file()}
    return texts | {PALETTE: template("palette.css.j2").render()}


def make_app(index: EpisodeIndex, follower: Follower, run_files: RunFiles) -> "FastAPI":
    """Make the application.

    Args:
        index: Index of the episodes.
        follower: Thread that updates the index.
        run_files: Settings, logs and tokenizers of the run.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse, Response
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "servers") from error

    app = FastAPI(openapi_url=None)
    _secure(app)
    _add_lists(app, index, run_files)
    _add_episodes(app, index, run_files)
    _add_run(app, index, run_files)

    @app.get("/api/status")
    def status() -> dict[str, Any]:
        shown = {"path": str(index.path), "is_file": index.path.is_file()}
        return asdict(follower.progress) | {"failure": follower.failure} | shown

    texts = assets()
    page = texts.pop(PAGE)

    @app.get("/{name:path}")
    def asset(name: str) -> Response:
        if not name:
            return Response(page, media_type="text/html")
        if name not in texts:
            return JSONResponse({"error": "not found"}, 404)
        return Response(texts[name], media_type=_KINDS[Path(name).suffix])

    return app


def _secure(app: "FastAPI") -> None:
    """Answer only this machine, with :data:`_HEADERS`. Errors are JSON."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse

    @app.middleware("http")
    async def for_this_machine(request: Request, call_next: Any) -> Any:
        # Another site may let its name resolve to this machine. Its requests then have that name as host.
        if not _is_own_name(request.headers.get("host", "")):
            return PlainTextResponse("Invalid host header", 400)
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(KeyError)
    async def absent(request: Request, error: KeyError) -> JSONResponse:
        noun = {"files": "file", "logs": "log"}.get(request.url.path.split("/")[2], "episode")
        return JSONResponse({"error": f"there is no {noun} {error}"}, 404)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": first_fault(error)}, 422)

    @app.exception_handler(DataError)
    async def unreadable(request: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)


def _add_lists(app: "FastAPI", index: EpisodeIndex, run_files: RunFiles) -> None:
    from fastapi import Request

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
        query = request.query_params
        names = {kind: query[kind] for kind in (*NAMED, "tool") if kind in query}
        filters = Filters(names, step, text, question)
        with closing(index.connect()) as connection:
            files = run_files.table(file_rows(connection)) if order is Order.FILE else []
            first = [row["path"] for row in files if row["is_evaluation"]]
            return asdict(listing(connection, filters, order=order, offset=offset, limit=limit, first=first))

    @app.get("/api/find")
    def find(name: str, file: str = "") -> dict[str, Any]:
        with closing(index.connect()) as connection:
            return {"number": numbered(connection, name, file)}


def _add_episodes(app: "FastAPI", index: EpisodeIndex, run_files: RunFiles) -> None:
    @app.get("/api/episodes/{number}")
    def episode(number: _Number) -> dict[str, Any]:
        with closing(index.connect()) as connection:
            row, place = episode_row(connection, number), place_of(connection, number)
        return {"row": row} | episode_view(read_episode(*place), place[0])

    @app.get("/api/episodes/{number}/tokens")
    def tokens(number: _Number) -> dict[str, Any]:
        with closing(index.connect()) as connection:
            place = place_of(connection, number)
        record, file = read_episode(*place), Path(place[0])
        decode, note = run_files.decoder(file)
        return {"tokens": token_view(record, decode, load_advantages(file).get(record.id)), "note": note}


def _add_run(app: "FastAPI", index: EpisodeIndex, run_files: RunFiles) -> None:
    @app.get("/api/files")
    def table() -> list[dict[str, Any]]:
        with closing(index.connect()) as connection:
            return run_files.table(file_rows(connection))

    @app.get("/api/files/{number}")
    def about(number: _Number) -> dict[str, Any]:
        with closing(index.connect()) as connection:
            paths = {row["id"]: row["path"] for row in file_rows(connection)}
        return run_files.about(Path(paths[number])) | {"path": paths[number]}

    @app.get("/api/logs")
    def logs() -> list[dict[str, Any]]:
        return run_files.logs()

    @app.get("/api/logs/read")
    def read_log(name: str, begin: _Number | None = None, end: _Number | None = None) -> dict[str, Any]:
        return run_files.read_log(name, begin=begin, end=end)
