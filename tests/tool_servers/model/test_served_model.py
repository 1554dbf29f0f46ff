"""Our completions server, and `afm serve model`, which starts replicas and stops them together."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from loopback import LoopbackServer

from afm.agents import AgentSpec, save_agent
from afm.cli.serve_model import ModelEngine, Wanted, servers
from afm.endpoints.chat import EndpointSettings
from afm.errors import ConfigError, EngineError, UsageError
from afm.models import SamplingParams, load_model
from afm.models.load import TransformersModel
from afm.models.openai import OpenAIModel
from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import run_episode
from afm.trajectory.record import StopReason
from tool_servers.model import ModelServer

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "evaluation/serve_model.sh"
KEY = "sk-0123456789abcdef"
PROMPTS = [[number, 6, 7] for number in range(5, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served model")
    train_tokenizer(["Tom has 12 apples. <answer>4</answer>"] * 50, folder, vocab_size=300)
    create_tiny_model(folder, folder, seed=1)
    save_agent(agent("short", max_response_tokens=12), folder / "agent.yaml")
    return folder


def agent(name: str, **limits: float) -> AgentSpec:
    """Return an agent that answers immediately."""
    roles, transitions = {"answer": {"kind": "answer"}}, {"start": ("answer",)}
    return AgentSpec(name=name, roles=roles, transitions=transitions, limits=limits)


class Running(LoopbackServer):
    """A server in a thread; counts its requests."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.model = TransformersModel(folder, threads=1, device="cpu", name="tiny")
        self.asked = 0
        app = ModelServer(self.model, key).app()

        async def counting(scope, receive, send):
            self.asked += scope.get("path") == "/v1/completions"
            await app(scope, receive, send)

        super().__init__(counting)
        self.url = self.origin
        self.start()


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[Running, Running]]:
    both = Running(folder), Running(folder)
    yield both
    for one in both:
        one.stop()


async def test_several_addresses_share_the_work_and_give_what_one_model_gives(folder: Path, pair) -> None:
    local = TransformersModel(folder, threads=1, device="cpu")
    model = load_model(f"{pair[0].url},{pair[1].url}/v1", tokenizer=folder)
    assert (model.name, model.context_tokens) == ("tiny", local.context_tokens)
    params = SamplingParams(20, temperature=0.9, top_p=0.9, top_k=30, seed=3)
    theirs = await asyncio.gather(*(model.generate(prompt, params) for prompt in PROMPTS))
    ours = await asyncio.gather(*(local.generate(prompt, params) for prompt in PROMPTS))
    assert [one.token_ids for one in theirs] == [one.token_ids for one in ours]
    assert [one.finish for one in theirs] == [one.finish for one in ours]
    assert pair[0].asked == pair[1].asked == len(PROMPTS) / 2
    pair[1].stop()
    again = await asyncio.gather(*(model.generate(prompt, params) for prompt in PROMPTS))
    assert [one.token_ids for one in again] == [one.token_ids for one in ours]
    assert pair[0].asked == len(PROMPTS) * 3 / 2
    await asyncio.gather(model.close(), local.close())


async def test_a_generation_ends_on_the_server_when_its_episode_is_out_of_time(folder: Path, pair) -> None:
    """A closed connection cancels the generation, so the episode does not wait for it."""
    server = pair[0]
    model = load_model(server.url, tokenizer=folder)
    assert model.cancellable
    sampling = SamplingParams(10**6, temperature=0)  # greedy, this model repeats one token and never ends
    episode = await run_episode(agent("endless", max_seconds=0.5), model, {}, "Tom?", sampling=sampling)
    assert episode.stop is StopReason.SECONDS
    engine = server.model._engine
    for _ in range(1200):
        if not len(engine._batch):
            break
        await asyncio.sleep(0.05)
    assert len(engine._batch) == 0
    assert engine.stats.sampled_tokens < model.context_tokens / 2
    await model.close()


async def test_a_server_scores_given_tokens_and_shows_its_tokenizer(folder: Path, pair) -> None:
    local = TransformersModel(folder, threads=1, device="cpu")
    served = load_model(pair[0].url, tokenizer=folder)
    assert isinstance(served, OpenAIModel)
    ids = served.encode("Tom has 12 apples. <answer>4</answer>")
    assert await served.score(ids) == pytest.approx(await local.score(ids), abs=1e-6)
    assert await served.served_ids("Tom has 12") == served.encode("Tom has 12")[1:]
    with pytest.raises(EngineError, match="context"):
        await local.score([5] * (local.context_tokens + 1))
    await asyncio.gather(served.close(), local.close())


async def test_when_all_servers_are_gone_that_is_an_error(folder: Path) -> None:
    gone = "http://127.0.0.1:1,http://127.0.0.1:9"
    once = EndpointSettings(attempts=1)
    model = OpenAIModel(gone, ChatTokenizer.load(folder), name="tiny", context_tokens=99, endpoint=once)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:[19]/v1/completions: ConnectError"):
        await model.generate([5], SamplingParams(5))
    await model.close()
    with pytest.raises(ConfigError, match="host2: expected http"):
        load_model("http://127.0.0.1:1,host2", tokenizer=folder)


def test_requests_are_answered_as_vllm_answers_them(folder: Path) -> None:
    server = Running(folder, KEY)
    ask = {"model": "tiny", "prompt": "Tom has", "max_tokens": 4, "temperature": 0, "top_k": -1}
    try:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client:

            def answer(**more: object) -> httpx.Response:
                return client.post("/v1/completions", json=ask | more)

            reply = answer(return_token_ids=True).json()
            choice = reply["choices"][0]
            assert choice["finish_reason"] == "length"
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert reply["usage"]["completion_tokens"] == 4
            assert answer(model="other").status_code == 404
            wrong = answer(max_tokens=0)
            assert (wrong.status_code, "max_tokens" in wrong.json()["error"]["message"]) == (400, True)
            constrained = answer(response_format={"type": "json_object"})
            assert (constrained.status_code, "does not constrain" in constrained.text) == (400, True)
            assert (answer(prompt=[5] * 5000).status_code, client.get("/health").status_code) == (400, 200)
        assert httpx.post(f"{server.url}/v1/completions", json=ask).status_code == 401
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        server.stop()


def free_ports(count: int) -> int:
    """Return the first of consecutive free ports, outside the range that the kernel uses for connections."""
    for first in range(20_000 + os.getpid() % 700 * 10, 32_000, 10):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no port is free")


def environment(folder: Path, **variables: object) -> dict[str, str]:
    """Return the environment of the script for this model."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"MODEL": folder, "PATH": path} | variables
    return os.environ | {"AFM_MODEL_API_KEY": ""} | {name: str(value) for name, value in own.items()}


class Serving:
    """`evaluation/serve_model.sh` as a process."""

    def __init__(self, folder: Path, logs: Path, replicas: int, *words: str) -> None:
        self.port = free_ports(replicas)
        self.process = subprocess.Popen(
            [str(SCRIPT), "--engine", "own", "--logs", str(logs), *words],
            env=environment(folder, REPLICAS=replicas, PORT=self.port),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready: "):
                return line
        raise AssertionError("it ended")

    def workers(self) -> list[int]:
        """Return the process ids of the replicas."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def end(self) -> tuple[int, str]:
        printed, _ = self.process.communicate(timeout=300)
        return self.process.returncode, printed


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_an_evaluation_uses_all_replicas_and_ctrl_c_ends_them(folder: Path, tmp_path: Path) -> None:
    serving = Serving(folder, tmp_path / "logs", 2, "--name", "tiny")
    words = re.findall(r"(?:'[^']*'|\S)+", serving.wait_ready().partition("CONFIG ")[2])
    workers = serving.workers()
    assert len(workers) == 2
    task = {"question": "What is 1?", "answer": "1", "data_source": "gsm8k"}
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"id": f"q{n}"} | task) + "\n" for n in range(6))
    )
    config = tmp_path / "eval.yaml"
    config.write_text(f"name: mine\ndata: {tmp_path}/tasks.jsonl\nagent: {folder}/agent.yaml\n")
    command = [sys.executable, "-m", "afm.cli.main", "eval", str(config), f"output_dir={tmp_path}/out"]
    command += [word.replace("'", "") for word in words]
    evaluated = subprocess.run(command, capture_output=True, text=True)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "6 of 6 episodes scored" in evaluated.stdout
    os.kill(serving.process.pid, signal.SIGINT)
    status, printed = serving.end()
    assert (status, printed.strip()) == (130, "stopped")
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_when_one_replica_dies_all_end_with_an_error(folder: Path, tmp_path: Path) -> None:
    serving = Serving(folder, tmp_path / "logs", 2)
    serving.wait_ready()
    workers = serving.workers()
    os.kill(workers[1], signal.SIGKILL)
    status, printed = serving.end()
    assert status == 1
    assert "ended with status -9" in printed
    assert f"listening on http://127.0.0.1:{serving.port + 1}" in printed  # the last lines of its log
    assert not any(map(alive, workers))


def test_a_port_that_is_taken_is_said_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, printed = Serving(folder, tmp_path / "logs", 1, "--port", port).end()
    assert status == 1
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in printed
    assert not (tmp_path / "logs").exists()


def planned(engine: ModelEngine, *, key: str | None = None, devices: tuple[str, ...] = (), **changed):
    wanted = {"model": Path("/m"), "name": "m", "host": "127.0.0.1", "port": 8000}
    wanted |= {"replicas": 2, "tensor_parallel": 2} | changed
    return servers(engine, Wanted(**wanted), devices=devices, threads=8, key=key)


def test_each_replica_has_gpus_of_its_own_and_keys_stay_out_of_commands() -> None:
    more = ("--max-model-len", "4096")
    vllm = planned(ModelEngine.VLLM, key=KEY, devices=("4", "5", "6", "7"), further=more)
    assert [one.environment for one in vllm] == [
        {"CUDA_VISIBLE_DEVICES": gpus, "VLLM_API_KEY": KEY} for gpus in ("4,5", "6,7")
    ]
    assert " ".join(vllm[1].command) == (
        "vllm serve /m --host 127.0.0.1 --port 8001 --served-model-name m --tensor-parallel-size 2 "
        "--logprobs-mode processed_logprobs --max-model-len 4096"
    )
    assert not any(KEY in word for one in vllm for word in one.command)
    sglang = planned(ModelEngine.SGLANG)
    assert " ".join(sglang[0].command[1:]) == (
        "-m sglang.launch_server --model-path /m --host 127.0.0.1 --port 8000 --served-model-name m --tp-size 2"
    )
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in sglang] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("engine", "options", "error", "message"),
    [
        (ModelEngine.VLLM, {"devices": ("0", "1", "2")}, UsageError, "2 replicas x 2 GPUs are 4, got 3"),
        (ModelEngine.SGLANG, {"key": KEY, "host": "0.0.0.0"}, ConfigError, "only on its command line"),
        (ModelEngine.OWN, {}, UsageError, "our own server uses one device"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine: ModelEngine, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        planned(engine, **options)


@pytest.mark.slow
def test_the_script_shows_its_commands_and_lets_nobody_in_without_a_key(folder: Path) -> None:
    def script(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), "--dry-run", "--engine", "vllm", *words]
        env = environment(folder, REPLICAS=2, TENSOR_PARALLEL=4, **variables)
        return subprocess.run(command, env=env, capture_output=True, text=True)

    shown = script()
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    second = f"CUDA_VISIBLE_DEVICES=4,5,6,7 vllm serve '{folder}' --host 127.0.0.1 --port 8001"
    assert lines[1].startswith(second)
    assert "model=http://127.0.0.1:8000,http://127.0.0.1:8001" in lines[2]
    refused = script("--host", "0.0.0.0")
    assert refused.returncode == 1
    assert "set AFM_MODEL_API_KEY to a random text" in refused.stderr
    secret = script("--host", "0.0.0.0", AFM_MODEL_API_KEY=KEY)
    assert (secret.returncode, KEY in secret.stdout, "VLLM_API_KEY=***" in secret.stdout) == (0, False, True)


async def test_a_chat_is_answered_in_the_models_own_template_with_its_usage(folder: Path, pair) -> None:
    server, _ = pair
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Tom has 12 apples."}]
    ids = server.model.encode_prompt(messages)
    said = await server.model.generate(ids, SamplingParams(12, temperature=0.0))
    whole = server.model.decode(said.token_ids)
    asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}

    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = (await client.post("/v1/chat/completions", json=asked)).json()
        stop = whole[3:5]
        stopped = (await client.post("/v1/chat/completions", json=asked | {"stop": [stop]})).json()
        refused = await client.post("/v1/chat/completions", json=asked | {"messages": []})
        stream = await client.post("/v1/chat/completions", json=asked | {"stream": True})
        long = {"messages": [{"role": "user", "content": "12 " * 9000}], "stream": True}
        full = await client.post("/v1/chat/completions", json=asked | long)

    assert answer["choices"][0]["message"] == {"role": "assistant", "content": whole}
    tokens = {"prompt_tokens": len(ids), "completion_tokens": len(said.token_ids)}
    assert answer["usage"] == tokens | {"total_tokens": sum(tokens.values())}
    assert stopped["choices"][0]["message"]["content"] == whole[: whole.find(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert (refused.status_code, refused.json()["error"]["message"][:8]) == (400, "messages")
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert stream.text.endswith("data: [DONE]\n\n")
