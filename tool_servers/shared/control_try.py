"""One real request to a server, to see that its work gets done and not merely that it is there."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx

_TIMEOUT_S = 90.0
_PRIVATE = "http://127.0.0.1:9/"
_QUERY = "long river"
_NO_LIST = (404, 405, 501)


def tried(name: str, url: str, token: str | None) -> str:
    """What came of it, in a few words.

    Raises:
        ValueError: The answer is wrong; says how.
        httpx.HTTPError: There was none.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
        match name:
            case "code":
                told = _answer(client.post("/run", json={"code": "print(6 * 7)"}))
                return _expected("a program printed", told.get("stdout"), "42\n")
            case "crawl_page":
                told = _answer(client.post("/crawl_page", json={"urls": _PRIVATE, "goal": "", "seconds": 30}))
                return _expected("a private address is", told["pages"][0]["kind"], "blocked")
            case "web_search":
                told = _answer(client.post("/search", json={"q": _QUERY, "num": 3}))
                return f"{len(told['organic'])} results"
            case "wiki_search":
                told = _answer(client.post("/retrieve", json={"queries": [_QUERY], "topk": 3}))
                return f"{len(told['result'][0])} passages"
            case "gateway":
                return _gateway(client.get("/v1/models"))
            case "model":
                [listed] = _answer(client.get("/v1/models"))["data"]
                body = {"model": listed["id"], "prompt": _QUERY, "max_tokens": 1}
                told = _answer(client.post("/v1/completions", json=body))
                return f"{listed['id']} continued a text by {told['usage']['completion_tokens']} token"
            case "visual_inspector":
                body = {"image": _dot(), "question": "Which colour is this picture?"}
                told = _answer(client.post("/inspect", json=body))
                return f"the model saw: {' '.join(told['text'].split())[:60]}"
            case _:
                return _mcp(client)


def _gateway(response: httpx.Response) -> str:
    """A gateway's list of models; that its endpoint has no such list is no fault of either."""
    if response.status_code in _NO_LIST:
        return f"the endpoint answers and lists no models (status {response.status_code})"
    return f"{len(_answer(response)['data'])} models behind it"


def _answer(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}: {response.text[:200]}")
    return response.json()


def _expected(what: str, got: Any, wanted: str) -> str:
    if got != wanted:
        raise ValueError(f"{what} {got!r}, expected {wanted!r}")
    return f"{what} {wanted.strip()}"


def _dot() -> str:
    from PIL import Image

    sink = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(sink, "PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


def _mcp(client: httpx.Client) -> str:
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "servers.sh", "version": "1"},
        },
    }
    response = client.post("/mcp", json=body, headers={"Accept": "application/json, text/event-stream"})
    return f"speaks MCP {_answer(response)['result']['protocolVersion']}"
