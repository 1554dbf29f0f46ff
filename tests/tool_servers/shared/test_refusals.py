"""What no handler takes is refused in the form of all refusals."""

from __future__ import annotations

import httpx
from pydantic import BaseModel

from tool_servers.shared.endpoint import Endpoint
from tool_servers.shared.settings import ServerSettings


class Ask(BaseModel):
    q: str


async def work(asked):
    return {"answer": asked.q}


async def close():
    pass


async def test_unknown_paths_and_methods_are_errors_in_json():
    app = Endpoint("try", "/ask", Ask, work, ServerSettings(), work_s=5, token=None, close=close).app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/ask", json={"q": "x"})).json() == {"answer": "x"}
        unknown, wrong = await client.get("/other"), await client.get("/ask")
    assert (unknown.status_code, unknown.json()) == (
        404,
        {"error": "GET /other: Not Found", "kind": "request"},
    )
    assert (wrong.status_code, wrong.json()["error"]) == (405, "GET /ask: Method Not Allowed")
