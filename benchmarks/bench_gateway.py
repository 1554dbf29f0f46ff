"""Compare requests per second through both gateways with a direct connection to the endpoint and with LiteLLM's proxy.

    .venv/bin/python benchmarks/bench_gateway.py --litellm VENV/bin/litellm --out gateway.json

`direct` is an endpoint that answers immediately, `recording` is `afm serve gateway` in front of it, and `sessions` is the
gateway of harnesses with a model in its process that answers immediately. `litellm` is LiteLLM's proxy with one worker, in a
separate virtual environment (`pip install 'litellm[proxy]'`). They alternate. Each client keeps its connection and sends the
next request as soon as it has the answer. Every answer is checked. `first_ms` is the time to the first text of a stream.
Afterwards, many sessions are open at the same time. Each sends its turns over its own connection, and its trajectory is
checked token by token. On a busy machine, use `processor_ms`, the processor time of a request in the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from timing import environment, report

REPLY = "The mill stands at the river Ilm."
FIRST_WORD = b"The"
MESSAGES = [
    {"role": "system", "content": "You answer questions about an old town, briefly. " * 8},
    {"role": "user", "content": "Where is the mill? " * 10},
]
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": REPLY}}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
}


class Connection:
    """A persistent connection of a client, with the part of HTTP that these servers use."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *about: object) -> None:
        self._writer.close()

    def _send(self, path: str, body: Any) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    async def first_text(self, path: str, body: Any) -> float:
        """Return the seconds to the first word of a stream; read the stream to its end."""
        begun, first = time.perf_counter(), 0.0
        self._send(path, {**body, "stream": True})
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = await self._reader.read(1 << 16)
            assert piece, data.decode()
            data += piece
            if not first and FIRST_WORD in data:
                first = time.perf_counter() - begun
        assert first, data.decode()
        return first

    async def post(self, path: str, body: Any) -> Any:
        """Return the answer; raise if its status is not 200."""
        self._send(path, body)
        head_bytes = await self._reader.readuntil(b"\r\n\r\n")
        lines = head_bytes.decode("latin-1").lower().split("\r\n")
        size = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
        answer = await self._reader.readexactly(size)
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{path}: {lines[0]}: {answer[:300].decode()}")
        return json.loads(answer)


def streamed() -> bytes:
    """Return the reply as an OpenAI stream with a chunk per word."""
    about: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    deltas = [{"role": "assistant", "content": ""}, *({"content": f"{word} "} for word in REPLY.split())]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [json.dumps({**about, "choices": [choice]}) for choice in choices]
    chunks = [f"data: {event}\n\n" for event in (*events, "[DONE]")]
    body = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in chunks)
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return f"{head}{body}0\r\n\r\n".encode()


async def endpoint() -> None:
    """Serve an endpoint that answers every request with the same reply."""
    stream = streamed()
    body = json.dumps(ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = head.encode() + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                size = [int(line[15:]) for line in lines if line.startswith("content-length:")]
                asked = await reader.readexactly(sum(size))
                writer.write(stream if b'"stream": true' in asked or b'"stream":true' in asked else answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def sessions(folder: Path) -> None:
    """Serve the gateway of harnesses; it opens sessions on demand, and `POST /v1/check` counts their wrong tokens."""
    from afm.harness import ChatRenderer, HarnessServer, Session
    from afm.models import FinishReason, Generation, TokenModel
    from afm.models.tiny import train_tokenizer
    from afm.models.tokenizer import ChatTokenizer

    texts = [REPLY, *(message["content"] for message in MESSAGES)]
    train_tokenizer(texts * 50, folder, vocab_size=400)
    codec = ChatTokenizer.load(folder)
    said = (*codec.encode(REPLY), codec.end_id)

    class Instant(TokenModel):
        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Generation:
            return Generation(said, (-1.0,) * len(said), FinishReason.END_OF_TEXT)

        async def stream(self, prompt_ids: Sequence[int], params: Any, on_token: Any) -> Generation:
            for token in said:
                on_token(token)
                await asyncio.sleep(0)
            return await self.generate(prompt_ids, params)

        async def close(self) -> None: ...

    model, renderer = Instant(codec, name="tiny", context_tokens=1 << 20), ChatRenderer(codec)

    class Opening(dict[str, Session]):
        def get(self, key: str, default: Any = None) -> Session:
            if not key.startswith("held"):  # a session with one request, closed when it ends
                return Session(key, model, renderer)
            if key not in self:
                self[key] = Session(key, model, renderer)
            return self[key]

    def wrong(session: Session) -> int:
        count = 0
        for trajectory in session.trajectories():
            for turn in trajectory.turns:
                count += trajectory.response_ids[turn.begin : turn.end] != said
            count += sum(trajectory.response_mask) != len(said) * sum(
                turn.trained for turn in trajectory.turns
            )
        return count + (len(session.trajectories()) != 1)

    async with HarnessServer() as server:
        opened = server.app.sessions = Opening()
        print(f"listening on {server.origin}", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(
                json.dumps({"sessions": len(opened), "wrong": sum(map(wrong, opened.values()))}), flush=True
            )


@contextlib.contextmanager
def process(words: Sequence[str]) -> Iterator[tuple[psutil.Process, int, Any]]:
    """Run a server in a separate process; yield the process and its port."""
    settings = {"GATEWAY_TOKEN": "", "SERVER_HOST": "127.0.0.1", "GATEWAY_UPSTREAM_API_KEY": ""}
    begun = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )
    assert begun.stdout is not None
    try:
        line = begun.stdout.readline()
        yield psutil.Process(begun.pid), int(line.rpartition(":")[2]), begun
    finally:
        begun.kill()
        begun.wait()


@contextlib.contextmanager
def litellm(program: str, url: str, folder: Path) -> Iterator[tuple[psutil.Process, int, Any]]:
    """Run LiteLLM's proxy in front of the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    model = {"model": "openai/tiny", "api_base": url, "api_key": "none"}
    settings = folder / "litellm.yaml"
    settings.write_text(yaml.safe_dump({"model_list": [{"model_name": "tiny", "litellm_params": model}]}))
    words = [program, "--config", str(settings), "--host", "127.0.0.1", "--port", str(port)]
    own = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOG": "ERROR",
        "PYTHONPATH": "",
    }
    with (folder / "litellm.log").open("wb") as log:
        begun = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | own)
    try:
        for _ in range(1500):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            if begun.poll() is not None:
                raise SystemExit(f"{program} ended: {(folder / 'litellm.log').read_text()[-1000:]}")
            time.sleep(0.2)
        yield psutil.Process(begun.pid), port, begun
    finally:
        begun.kill()
        begun.wait()


def path_of(name: str, session: str) -> str:
    """Return the path at which a server answers chats."""
    return f"/s/{session}/v1/chat/completions" if name == "sessions" else "/v1/chat/completions"


async def first_texts(name: str, port: int, seconds: float) -> list[float]:
    """Return the seconds to the first text of streams, one stream after another."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    async with Connection(port) as connection:
        while time.perf_counter() < end:
            path = path_of(name, f"first-{len(took)}-{end}")
            took.append(await connection.first_text(path, {"model": "tiny", "messages": MESSAGES}))
    return took


async def rate(name: str, port: int, clients: int, seconds: float) -> tuple[int, list[float]]:
    """Return the number of answered requests, and the seconds of each."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def ask(number: int) -> None:
        async with Connection(port) as connection:
            round_number = 0
            while (begun := time.perf_counter()) < end:
                path = path_of(name, f"rate-{clients}-{number}-{round_number}-{end}")
                round_number += 1
                body = {"model": "tiny", "messages": MESSAGES}
                answer = await connection.post(path, body)
                took.append(time.perf_counter() - begun)
                assert answer["choices"][0]["message"]["content"] == REPLY

    await asyncio.gather(*(ask(number) for number in range(clients)))
    return len(took), took


async def held(port: int, count: int, turns: int) -> int:
    """Open all sessions before the first one ends; return the number of their requests."""
    ready = asyncio.Barrier(count)

    async def play(number: int) -> None:
        async with Connection(port) as connection:
            history: list[Any] = list(MESSAGES)
            for turn in range(turns):
                await ready.wait()
                answer = await connection.post(
                    f"/s/held-{number}/v1/chat/completions", {"model": "tiny", "messages": history}
                )
                history += [answer["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]

    await asyncio.gather(*(play(number) for number in range(count)))
    return count * turns


@contextlib.asynccontextmanager
async def servers(
    folder: Path, program: str | None
) -> AsyncIterator[dict[str, tuple[psutil.Process, int, Any]]]:
    """Run all servers, including LiteLLM's if its program is named."""
    with contextlib.ExitStack() as stack:
        running = {"direct": stack.enter_context(process([__file__, "--serve", "endpoint"]))}
        url = f"http://127.0.0.1:{running['direct'][1]}/v1"
        words = ["-m", "tool_servers", "gateway", "--port=0", f"--upstream={url}", f"--log={folder / 'log'}"]
        running["recording"] = stack.enter_context(process(words))
        running["sessions"] = stack.enter_context(
            process([__file__, "--serve", "sessions", "--folder", str(folder)])
        )
        if program is not None:
            running["litellm"] = stack.enter_context(litellm(program, url, folder))
        yield running


def processor_s(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.user + times.system)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with servers(folder, options.litellm) as running:
        figures = ("rate", "p50_ms", "processor_ms", "first_ms")
        samples: dict[str, dict[str, list[float]]] = {
            name: {figure: [] for figure in figures} for name in running
        }
        for name, (_, port, _) in running.items():
            await rate(name, port, 2, options.seconds / 4)
        for _ in range(options.rounds):
            for name, (server, port, _) in running.items():
                begun = processor_s(server)
                count, _ = await rate(name, port, 16, options.seconds)
                samples[name]["rate"].append(count / options.seconds)
                samples[name]["processor_ms"].append(1000 * (processor_s(server) - begun) / count)
                _, took = await rate(name, port, 1, options.seconds / 2)
                samples[name]["p50_ms"].append(1000 * statistics.median(took))
                took = await first_texts(name, port, options.seconds / 4)
                samples[name]["first_ms"].append(1000 * statistics.median(took))
        for name, rows in samples.items():
            results[name] = {key: round(statistics.median(values), 3) for key, values in rows.items()}
        direct = results["direct"]
        for name in running.keys() - {"direct"}:
            results[name]["rate_of_direct"] = round(results[name]["rate"] / direct["rate"], 3)
            for figure in ("p50", "first"):
                more = results[name][f"{figure}_ms"] - direct[f"{figure}_ms"]
                results[name][f"{figure}_more_ms"] = round(more, 3)
        _, port, served = running["sessions"]
        begun_s = time.perf_counter()
        requests = await held(port, options.sessions, 3)
        results["held"] = {"requests": requests, "seconds": round(time.perf_counter() - begun_s, 2)}
        served.stdin.write("\n")
        served.stdin.flush()
        results["held"] |= json.loads(served.stdout.readline())
        assert results["held"]["sessions"] == options.sessions
        assert results["held"]["wrong"] == 0
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--litellm", metavar="PROGRAM", help="LiteLLM's program, in its own environment")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--serve", choices=["endpoint", "sessions"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(endpoint() if options.serve == "endpoint" else sessions(options.folder))
        return
    if options.smoke:
        options.rounds, options.seconds, options.sessions = 1, 0.5, 20
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(options, Path(name)))
    report(
        {"results": results, "environment": environment(["uvicorn", "h11", "httptools", "httpx"])},
        options.out,
    )


if __name__ == "__main__":
    main()
