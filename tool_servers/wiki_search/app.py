"""The wiki server's HTTP interface; clients of Search-R1's retrieval server work unchanged.

| request | answer |
|---|---|
| ``POST /retrieve`` | ``{"queries": [..], "topk": 3, "return_scores": true}`` to ``{"result": [[{"document", "score"}]]}``; the passages alone without ``return_scores`` |
| ``GET /health`` | 200; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Queries are written by models, so an odd one never fails its batch. Only the beginning of a query that is too long is searched
for, and ``notes`` in the answer, a list of ``{"query": number, "note": text}``, says so. Bytes that are not UTF-8 and halves of
surrogate pairs become U+FFFD.

Every other status is ``{"error": "..."}``: 400 no valid request, 401 no token, 408 the body came too slowly, 413 too large,
429 busy (with ``Retry-After``), 503 the search failed or took too long.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from afm.trajectory.observation import whole_characters
from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission, BusyError
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Durations, Gauge, page
from tool_servers.shared.requests import GoneError, TooLargeError, bounded_body, refused
from tool_servers.wiki_search.batching import Batcher
from tool_servers.wiki_search.index import Index, WikiServerSettings

_log = logging.getLogger(__name__)
_BODY_S = 15.0
_GONE = 499  # nobody reads it
_BATCH = {"bm25": 8, "dense": 256, "hybrid": 64}


def _text(value: Any) -> Any:
    return whole_characters(value) if isinstance(value, str) else value


class RetrieveRequest(BaseModel):
    """The body of ``POST /retrieve``; unknown keys are passed over.

    Attributes:
        topk: Passages for each query; the server's default when absent or 0.
        return_scores: Whether scores come with the passages.
    """

    queries: list[Annotated[str, BeforeValidator(_text)]]
    topk: StrictInt | None = None
    return_scores: bool = False


class WikiServer:
    """Answers queries that come by HTTP.

    Args:
        token: What requests must carry; ``None`` lets everyone in.
    """

    def __init__(self, index: Index, settings: WikiServerSettings, token: str | None) -> None:
        self._index, self._settings, self._token = index, settings, token
        self._batcher = Batcher(
            index.engine, index.store, most=_BATCH[index.engine_name], threads=settings.workers()
        )
        self._admission = Admission(settings.max_parallel, settings.max_waiting, settings.max_wait_s)
        self._answered = Count(
            "afm_wiki_answered_total", "Requests answered.", "engine", (index.engine_name,)
        )
        self._refused = Count(
            "afm_wiki_refused_total",
            "Requests that got no passages.",
            "why",
            ("busy", "gone", "request", "search", "token", "too_large"),
        )
        self._seconds = Durations(
            "afm_wiki_request_seconds",
            "Time of a request, waiting included.",
            (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
        )
        self._metrics = (
            self._answered,
            self._refused,
            self._seconds,
            Gauge("afm_wiki_running", "Requests at work now.", lambda: self._admission.running),
            Gauge("afm_wiki_waiting", "Requests waiting now.", lambda: self._admission.waiting),
        )

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/retrieve", self.retrieve, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=routes, lifespan=self._life, exception_handlers={HTTPException: refused})

    async def retrieve(self, request: Request) -> Response:
        """Search for each query."""
        if not allowed(request.headers, self._token):
            return self._no_token()
        began = time.monotonic()
        try:
            asked = self._asked(await bounded_body(request, self._settings.max_request_bytes, _BODY_S))
        except TooLargeError as error:
            return self._refusal(413, "too_large", str(error), {"Connection": "close"})
        except TimeoutError:
            return self._refusal(408, "request", f"the request did not arrive within {_BODY_S:g} s")
        except GoneError:
            return self._refusal(_GONE, "gone", "the client has left")
        except ValueError as error:
            return self._refusal(400, "request", str(error))
        try:
            result = await self._search(asked)
        except BusyError as error:
            return self._refusal(429, "busy", str(error), {"Retry-After": str(error.retry_after_s)})
        except TimeoutError:
            return self._refusal(503, "search", f"the search took longer than {self._settings.search_s:g} s")
        except Exception as error:  # noqa: BLE001  the process border: its type alone is told
            _log.exception("/retrieve failed")
            return self._refusal(503, "search", f"the search failed ({type(error).__name__})")
        self._answered.add(self._index.engine_name)
        self._seconds.add(time.monotonic() - began)
        notes = self._notes(asked)
        further = b',"notes":' + json.dumps(notes).encode() if notes else b""
        return Response(b'{"result":' + result + further + b"}", media_type="application/json")

    async def health(self, _: Request) -> Response:
        """That the server answers, and with what."""
        facts = {"engine": self._index.engine_name, "passages": self._index.manifest.passages}
        return JSONResponse(
            {"status": "ok", **facts, "running": self._admission.running, "waiting": self._admission.waiting}
        )

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        if not allowed(request.headers, self._token):
            return self._no_token()
        return PlainTextResponse(page(self._metrics), media_type=CONTENT_TYPE)

    async def _search(self, asked: RetrieveRequest) -> bytes:
        async with self._admission.place(), asyncio.timeout(self._settings.search_s):
            k = asked.topk or self._settings.topk
            k = min(k, self._index.manifest.passages)
            queries = [query[: self._settings.max_query_chars] for query in asked.queries]
            return await self._batcher.search(queries, k, scored=asked.return_scores)

    def _notes(self, asked: RetrieveRequest) -> list[dict[str, Any]]:
        most = self._settings.max_query_chars
        return [
            {
                "query": number,
                "note": f"the query has {len(query)} characters; only its first {most} were searched for",
            }
            for number, query in enumerate(asked.queries)
            if len(query) > most
        ]

    def _asked(self, body: bytes) -> RetrieveRequest:
        try:
            asked = RetrieveRequest.model_validate(json.loads(body.decode("utf-8", "replace")))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"body: Invalid JSON: {error}") from None
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}") from None
        limits = self._settings
        if len(asked.queries) > limits.max_queries:
            raise ValueError(f"queries: got {len(asked.queries)}, expected at most {limits.max_queries}")
        if not 0 <= (asked.topk or 0) <= limits.max_topk:
            raise ValueError(f"topk: got {asked.topk}, expected 1 to {limits.max_topk}")
        return asked

    def _no_token(self) -> JSONResponse:
        return self._refusal(401, "token", "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def _refusal(
        self, status: int, why: str, message: str, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        self._refused.add(why)
        return JSONResponse({"error": message}, status_code=status, headers=headers)

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher.start()
        yield
        await self._batcher.stop()
        self._index.store.close()
