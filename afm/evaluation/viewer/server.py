"""The viewer's server: a page, its two assets, and JSON about episodes. For this machine only."""

# FastAPI reads the annotations of its endpoints, and is imported late: so annotations are no texts here.

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.agents.load import MODEL_AGENT_FILE, MODEL_AGENTS_DIR
from afm.errors import ConfigError, DataError, MissingExtraError
from afm.evaluation.compare import agents_of
from afm.evaluation.manifest import MANIFEST_FILE, read_manifest
from afm.evaluation.page import blocks_of
from afm.evaluation.viewer.index import NAMED, EpisodeIndex, Progress
from afm.evaluation.viewer.query import Filters, Order, episode_row, facets, listing, numbered, place_of
from afm.trajectory.io import load_advantages
from afm.trajectory.record import Record
from afm.trajectory.types import Author

if TYPE_CHECKING:
    from fastapi import FastAPI


Decode = Callable[[Sequence[int]], str]
_AS_RECORDED = {"id", "agent", "model", "question", "verdict", "stop", "cost", "kept", "reason", "error"}
_MAX_TOKENS = 40_000
_FOLDERS_UP = 4


def read_episode(path: str, start: int, length: int) -> Record:
    """The record at an offset of a file.

    Raises:
        DataError: The file changed since it was indexed.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return Record.model_validate_json(file.read(length))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"cannot be read at byte {start}: {first}; was the file changed?", path=path
        ) from None


def episode_view(record: Record, path: str) -> dict[str, Any]:
    """What the page needs of an episode, as JSON."""
    spec = agent_of(path, record.agent, record.agent_digest)
    return record.model_dump(include=_AS_RECORDED) | {
        "prompt": spec.user_message(record.question) if spec else "",
        "ground_truth": _text(record.ground_truth),
        "provenance": _text(record.provenance) if record.provenance else "",
        "blocks": list(_blocks(record, spec)),
        "has_tokens": record.response_ids is not None,
        "spec_found": spec is not None,
    }


def token_view(record: Record, decode: Decode | None, advantages: Any = None) -> list[dict[str, Any]]:
    """Each token of the response, with what was logged of it.

    Its text (its number without a tokenizer), whether it is trained on, its log-probability and its advantage.

    Args:
        advantages: One number, or a list with one for each token.
    """
    ids = (record.response_ids or ())[:_MAX_TOKENS]
    mask, logprobs = record.response_mask or (), record.logprobs or ()
    each = _for_each(advantages, len(ids))
    return [
        {
            "text": decode([token]) if decode else f"{token} ",
            "trained": bool(mask[at]) if at < len(mask) else None,
            "logprob": logprobs[at] if at < len(logprobs) and (at >= len(mask) or mask[at]) else None,
            "advantage": each[at] if at >= len(mask) or mask[at] else None,
        }
        for at, token in enumerate(ids)
    ]


def _for_each(numbers: Any, tokens: int) -> list[float | None]:
    """One number for the whole response, or one for each of its tokens; anything else is none."""
    several = numbers if isinstance(numbers, list) else [numbers] * tokens
    known = [_finite(number) for number in several[:tokens]]
    return known + [None] * (tokens - len(known))


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _blocks(record: Record, spec: AgentSpec | None) -> Iterator[dict[str, Any]]:
    calls = iter(record.calls)
    tools = spec.tool_roles if spec else {}
    for block in blocks_of(record, spec):
        shown = asdict(block)
        if block.author is Author.AGENT and block.role in tools and (call := next(calls, None)) is not None:
            shown |= {"tool": call.tool, "seconds": call.seconds, "ok": call.ok, "duplicate": call.duplicate}
        yield shown


@lru_cache(maxsize=256)
def agent_of(path: str, name: str, digest: str) -> AgentSpec | None:
    """The declaration an episode was made with: beside its file or some folders up, else a shipped one of its name.

    Roles are what is needed of it, so one of the same name with another digest is better than none.
    """
    folders = Path(path).resolve().parents[:_FOLDERS_UP]
    own = f"{MODEL_AGENTS_DIR}/{name}.yaml"
    places = (MODEL_AGENT_FILE, own, f"sft/{MODEL_AGENT_FILE}", f"sft/{own}")
    candidates = [folder / place for folder in folders for place in places]
    own_spec = _of_evaluation(Path(path).with_name(MANIFEST_FILE), name)
    specs = [] if own_spec is None else [own_spec]
    shipped = (name,) if name in shipped_agents() else ()
    for source in (*(file for file in candidates if file.is_file()), *shipped):
        try:
            spec = load_agent(source)
        except ConfigError:
            continue
        if spec.name == name:
            specs.append(spec)
    return next((spec for spec in specs if spec.digest == digest), specs[0] if specs else None)


def _of_evaluation(manifest: Path, name: str) -> AgentSpec | None:
    """The agent of that name in the manifest of an evaluation, if there is one."""
    try:
        agents = agents_of(read_manifest(manifest)) if manifest.is_file() else None
    except DataError:
        return None
    return agents.specs.get(name) if agents else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)


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
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse, Response
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "servers") from error

    app = FastAPI(openapi_url=None)
    _secure(app)
    _add_lists(app, index)
    _add_episodes(app, index, decode)

    @app.get("/api/status")
    def status() -> dict[str, Any]:
        return asdict(follower.progress) | {"failure": follower.failure, "path": str(index.path)}

    folder = files("afm.evaluation.viewer") / "static"

    @app.get("/{name:path}")
    def asset(name: str) -> Response:
        if name not in _ASSETS:
            return JSONResponse({"error": "not found"}, 404)
        file, kind = _ASSETS[name]
        return Response((folder / file).read_text("utf-8"), media_type=kind)

    return app


def _secure(app: "FastAPI") -> None:
    """Answers this machine only, with the headers of :data:`_HEADERS`, and errors as JSON."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse

    @app.middleware("http")
    async def for_this_machine(request: Request, call_next: Any) -> Any:
        # A page of another site may have its name resolve to this machine: its requests bear that name.
        if not _is_own_name(request.headers.get("host", "")):
            return PlainTextResponse("Invalid host header", 400)
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(KeyError)
    async def absent(request: Request, error: KeyError) -> JSONResponse:
        return JSONResponse({"error": f"there is no episode {error}"}, 404)

    @app.exception_handler(DataError)
    async def unreadable(request: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)


def _add_lists(app: "FastAPI", index: EpisodeIndex) -> None:
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
            return asdict(listing(connection, filters, order=order, offset=offset, limit=limit))

    @app.get("/api/find")
    def find(name: str, file: str = "") -> dict[str, Any]:
        with closing(index.connect()) as connection:
            return {"number": numbered(connection, name, file)}


def _add_episodes(app: "FastAPI", index: EpisodeIndex, decode: Decode | None) -> None:
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
