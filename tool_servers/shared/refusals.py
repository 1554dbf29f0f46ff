"""Answers to what no handler takes, in the form of all other refusals."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


async def refused(request: Request, error: Exception) -> Response:
    """``{"error"}`` for a path that there is not (404) or a method that it does not take (405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(
        {"error": message, "kind": "request"}, status_code=error.status_code, headers=error.headers
    )
