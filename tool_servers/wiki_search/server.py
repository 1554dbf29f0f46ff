"""The wiki search server: passages of a local corpus; clients of Search-R1's retrieval server work unchanged.

``POST /retrieve`` with ``{"queries": [..], "topk": 3, "return_scores": true}`` returns
``{"result": [[{"document", "score"}]]}``, or only the passages without ``return_scores``. A failed search gets status
503. For the rest, see :mod:`tool_servers.shared.endpoint`.

Models write the queries, so an odd query never fails its batch. Of a query that is too long, only the beginning is
used, and the answer reports it in ``notes``, a list of ``{"query": number, "note": text}``. Invalid UTF-8 and halves of
surrogate pairs become U+FFFD.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
from pydantic import BaseModel, BeforeValidator, Field, StrictInt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from afm.errors import ConfigError
from afm.trajectory.observation import whole_characters
from tool_servers.shared.command import CORES, Launch, NotSetUpError, ServerSettings, or_cores
from tool_servers.shared.endpoint import Endpoint, RefusalError
from tool_servers.shared.serve import ServedApp
from tool_servers.wiki_search.index import checked_manifest
from tool_servers.wiki_search.search import Batcher, Index, open_index, served_engine

PATH = "/retrieve"
_log = logging.getLogger(__name__)
_NO_INDEX = "no index; name its folder with --index, or as `index` in the YAML file"
_BATCH = {"bm25": 8, "dense": 256, "hybrid": 64}


class WikiServerSettings(ServerSettings):
    """The YAML of a wiki server."""

    content: ClassVar[str] = "wiki server settings"

    index: Path | None = None
    """Index folder that ``afm serve wiki build`` wrote."""
    engine: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    """``bm25``, ``dense``, ``hybrid``, or ``auto``: BM25 if the index has it, otherwise vectors."""
    model: str | None = None
    """Folder of the embedding model, if it has moved since the index was built."""
    device: str | None = None
    """Device of the embedding model."""
    topk: int = Field(default=3, ge=1)
    """Passages per query if the request names no number."""
    max_topk: int = Field(default=100, ge=1)
    """Largest number of passages per query."""
    max_queries: int = Field(default=4_096, ge=1)
    """Largest number of queries per request. Search-R1 sends 512 x 5."""
    max_query_chars: int = Field(default=8_192, ge=1)
    """Longest query. Of a longer one only the beginning is used, and the answer reports it."""
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest request. The default is the largest number of queries of the greatest length, at two bytes per character."""
    max_parallel: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=2_048, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    search_s: float = Field(default=60.0, gt=0)
    """Seconds for one search. Then the request gets status 503."""
    threads: Annotated[int, or_cores()] = Field(default=CORES, ge=1, validate_default=True)
    """Searches that run at the same time. ``null``: the number of cores."""


def _text(value: Any) -> Any:
    return whole_characters(value) if isinstance(value, str) else value


class RetrieveRequest(BaseModel):
    """The body of ``POST /retrieve``; unknown keys are ignored."""

    queries: list[Annotated[str, BeforeValidator(_text)]]
    topk: StrictInt | None = None
    """Passages per query; the server's default when absent or 0."""
    return_scores: bool = False
    """Whether to return scores with the passages."""


class WikiServer:
    """Answers queries over HTTP.

    Args:
        token: Token that requests must carry; ``None`` admits everyone.
    """

    def __init__(self, index: Index, settings: WikiServerSettings, token: str | None) -> None:
        self._index, self._settings = index, settings
        self._batcher = Batcher(
            index.engine, index.store, most=_BATCH[index.engine_name], threads=settings.threads
        )
        self._endpoint = Endpoint(
            "wiki", settings, token=token, max_bytes=settings.max_request_bytes, work_s=settings.search_s
        )

    def app(self) -> Starlette:
        """Return the application."""
        facts = {"engine": self._index.engine_name, "passages": self._index.manifest.passages}
        route = self._endpoint.post(PATH, self._parse, self._retrieve)
        return self._endpoint.app(route, life=self._life, facts=facts)

    def _parse(self, _: Request, body: bytes) -> RetrieveRequest:
        try:
            data = json.loads(body.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise RefusalError(400, "request", f"body: Invalid JSON: {error}") from None
        request = RetrieveRequest.model_validate(data)
        limits = self._settings
        if len(request.queries) > limits.max_queries:
            message = f"queries: got {len(request.queries)}, expected at most {limits.max_queries}"
            raise RefusalError(400, "request", message)
        if not 0 <= (request.topk or 0) <= limits.max_topk:
            message = f"topk: got {request.topk}, expected 1 to {limits.max_topk}"
            raise RefusalError(400, "request", message)
        return request

    async def _retrieve(self, request: RetrieveRequest) -> Response:
        most = self._settings.max_query_chars
        k = min(request.topk or self._settings.topk, self._index.manifest.passages)
        queries = [query[:most] for query in request.queries]
        try:
            result = await self._batcher.search(queries, k, scored=request.return_scores)
        except Exception as error:  # noqa: BLE001 - any engine error becomes status 503
            _log.exception("%s failed", PATH)
            raise RefusalError(503, "search", f"the search failed ({type(error).__name__})") from None
        notes = [
            {
                "query": number,
                "note": f"the query has {len(query)} characters; only the first {most} were used",
            }
            for number, query in enumerate(request.queries)
            if len(query) > most
        ]
        further = b',"notes":' + json.dumps(notes).encode() if notes else b""
        return Response(b'{"result":' + result + further + b"}", media_type="application/json")

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        self._batcher.start()
        yield
        await self._batcher.stop()
        self._index.store.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this server."""
    parser.add_argument("--index", type=Path, help="folder of the index")
    parser.add_argument("--engine", choices=("auto", "bm25", "dense", "hybrid"))
    parser.add_argument("--verify", action="store_true", help="first compare the checksums of all files")


def check(launch: Launch) -> None:
    """Check the files of the index.

    Raises:
        ConfigError: The index is missing or lacks a part.
        DataError: The index is unfinished, truncated, or mixed from different builds.
    """
    options, settings = launch.options, WikiServerSettings.read(launch.config)
    folder = options.index or settings.index
    if folder is None:
        raise NotSetUpError(_NO_INDEX)
    if not (folder / "manifest.json").is_file():
        message = (
            f"{folder}: no index here; build one with `afm serve wiki build CORPUS --output-dir {folder}`"
        )
        raise ConfigError(message) if options.index else NotSetUpError(message)
    served_engine(folder, checked_manifest(folder), options.engine or settings.engine)


def open_app(launch: Launch) -> ServedApp:
    """Open the application."""
    options, settings = launch.options, WikiServerSettings.read(launch.config)
    folder = options.index or settings.index
    if folder is None:
        raise ConfigError(_NO_INDEX)
    token = launch.address().token
    index = open_index(
        folder,
        options.engine or settings.engine,
        model=settings.model,
        device=settings.device,
        verify=options.verify,
    )
    return ServedApp(WikiServer(index, settings, token).app(), token, settings.finish_s)


def trial(client: httpx.Client) -> str:
    """Run one search."""
    [passages] = (
        client.post(PATH, json={"queries": ["long river"], "topk": 3}).raise_for_status().json()["result"]
    )
    return f"{len(passages)} passages"
