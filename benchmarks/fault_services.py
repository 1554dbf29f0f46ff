"""A model that calls its tool, and the servers to train it: a code server and a judge."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from fault_run import ROWS, make_inputs, write_questions
from reciting import learn_by_heart
from timing import REPO

from afm.models.tiny import create_tiny_model, train_tokenizer

CALL = "<plan>Run it.</plan><think>A sum.</think><code>\n```py\nprint(25)\n```\n</code>"
RESULT = "\n<observation>\n25\n</observation>\n"
ANSWER = "<reflection>25.</reflection><think>Done.</think><answer>\\boxed{25}</answer>"


def recite(folder: Path, steps: int, **changes: Any) -> Path:
    """Write the settings of a run whose model always calls the code tool once and then answers."""
    questions = [f"{number}+{number}?" for number in range(ROWS)]
    texts = [
        [
            (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False),
            *((CALL, True), (RESULT, False), (ANSWER, True)),
        ]
        for question in questions
    ]
    config = make_inputs(folder, steps, **{key: _plain(value) for key, value in changes.items()})
    train_tokenizer(["".join(piece for piece, _ in text) for text in texts], folder / "model", vocab_size=320)
    create_tiny_model(folder / "model", folder / "model", hidden_size=64, layers=2, heads=4, mlp=128)
    learn_by_heart(folder / "model", texts[::16], loss=0.02)
    write_questions(folder / "rl.parquet", [(question, "50") for question in questions])
    return config


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@dataclass
class Server:
    """A server that can be killed and started again on the same port."""

    words: list[str]
    port: int
    log: Path
    variables: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            SystemExit: It does not listen in time.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.words, stdout=log, stderr=log, cwd=REPO, start_new_session=True
            )
        begun = time.monotonic()
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if time.monotonic() - begun > 60:
                raise SystemExit(f"the server did not start; see {self.log}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server with ``kill -9``."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def tool_server(folder: Path) -> Iterator[Server]:
    """Run a code server, and write a ``tools.yaml`` with its address."""
    port = _free_port()
    tools = yaml.safe_load((REPO / "configs/tools/code_executor_remote.yaml").read_text())
    tools["tools"][0]["config"]["urls"] = [f"http://127.0.0.1:{port}"]
    (folder / "tools.yaml").write_text(yaml.safe_dump(tools))
    words = [sys.executable, "-P", "-m", "tool_servers", "code", "--port", str(port)]
    with _running(Server(words, port, folder / "code_server.log")) as server:
        yield server


@contextmanager
def judge(folder: Path) -> Iterator[Server]:
    """Run a judge with an OpenAI-compatible endpoint."""
    port = _free_port()
    variables = {
        "GRM_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "GRM_API_KEY": "none",
        "GRM_MODEL_NAME": "stern",
    }
    words = [sys.executable, str(Path(__file__)), str(port)]
    with _running(Server(words, port, folder / "judge.log", variables)) as server:
        yield server


class Judge(BaseHTTPRequestHandler):
    """Judges every answer as incorrect, with the real protocol."""

    def do_POST(self) -> None:
        """Answer one request for a ruling."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = body["messages"][-1]["content"]
        [(code, _)] = re.findall(r"^<data (\w+)>\n(.*)\n</data \1>$", user, re.MULTILINE | re.DOTALL)
        ruling = {"check": code, "rationale": "As compared.", "judgement": "incorrect"}
        message = {"message": {"content": json.dumps(ruling)}, "finish_reason": "stop"}
        reply = json.dumps({"choices": [message], "usage": {"total_tokens": 100}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
