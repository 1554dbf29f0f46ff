"""Measure the overhead of `afm eval` over a plain script, and the time to resume a run of 100,000 episodes.

    .venv/bin/python benchmarks/bench_eval.py --episodes 2000 --parallel 64 --rows 100000 --out eval.json

Overhead: a server on the loopback, in a separate process, answers every completion immediately with the next lines of a
script. An episode has two completions, with a call of a tool that takes no time between them. The rival in the same run is a
thread pool of the same width. It posts the same bodies with httpx, decodes and compares the answers and writes a JSON line
per episode, without parsing, masks, limits, retries, verdicts or resumption. Both must produce the same texts first.

Resume: a run with ``--rows`` finished episodes and one missing episode resumes. The report has the seconds from the call of
``evaluate`` to the first generation of that episode, the seconds of the whole call, and those of a plain script that
collects the ids with ``json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timing import environment, report, summary

from afm.agents import load_agent
from afm.datasets import Task
from afm.endpoints.chat import EndpointSettings
from afm.evaluation import Conditions, evaluate
from afm.evaluation.run import FinishedEpisodes
from afm.models import SamplingParams
from afm.models.base import ScriptedModel
from afm.models.openai import OpenAIModel
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer
from afm.rewards import load_reward
from afm.tools import ToolResult
from afm.trajectory.io import load_records

CALL = "<plan>Compute 6 * 7.</plan>\n<think>A program.</think>\n<code>\n```py\nprint(6 * 7)\n```\n</code>"
ANSWER = "<reflection>One number.</reflection>\n<think>That is it.</think>\n<answer>\\boxed{42}</answer>"
SPEC = load_agent("math").model_copy(update={"prompt": "", "question_format": "{question}"})
SAMPLING = SamplingParams(max_new_tokens=512)
ROUNDS = 100
Seconds = tuple[float, float]
"""Wall-clock seconds, and processor seconds of this process, which a busy machine changes less."""


class AtOnce:
    """A code tool that returns the result without running anything."""

    name = "code"

    async def call(self, argument: str) -> ToolResult:
        """Return the result."""
        return ToolResult("42")

    async def close(self) -> None:
        """Do nothing; there is nothing to close."""


def tasks(count: int) -> list[Task]:
    """Return ``count`` questions with the answer 42."""
    return [
        Task(id=f"q{number}", question=f"What is 6 * 7? ({number})", ground_truth="42", data_source="nq")
        for number in range(count)
    ]


def serve(folder: Path) -> None:
    """Run the server: answer with the call, or, after an observation, with the answer."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    codec = ChatTokenizer.load(folder)
    bodies = [_choice(codec.encode(text)) for text in (CALL, ANSWER)]
    first = len(codec.encode_prompt(SPEC.prompt_messages(tasks(1)[0].question)))

    async def completions(request: Any) -> Response:
        called = len(json.loads(await request.body())["prompt"]) > first + 20
        return Response(bodies[called], media_type="application/json")

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", access_log=False, timeout_keep_alive=600
    )
    socket = config.bind_socket()
    print(socket.getsockname()[1], flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[socket]))


def _choice(ids: list[int]) -> bytes:
    choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": None, "token_ids": ids}
    choice["logprobs"] = {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": [-0.5] * len(ids)}
    return json.dumps({"choices": [choice]}).encode()


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run a server during the block; yield its address."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()


async def ours(url: str, codec: ChatTokenizer, wanted: list[Task], parallel: int, out: Path) -> Seconds:
    """Return the seconds of one evaluation."""
    model = OpenAIModel(
        url, codec, name="m", context_tokens=8192, endpoint=EndpointSettings(max_parallel=parallel)
    )
    reward = load_reward()
    begun, busy = time.perf_counter(), time.process_time()
    await evaluate(
        wanted, SPEC, model, {"code": AtOnce()}, reward, out, Conditions(SAMPLING), parallel=parallel
    )
    seconds = time.perf_counter() - begun, time.process_time() - busy
    await asyncio.gather(model.close(), reward.close())
    return seconds


def plain(
    url: str, codec: ChatTokenizer, bodies: list[tuple[bytes, bytes]], parallel: int, out: Path
) -> Seconds:
    """Return the seconds of the same requests in a thread pool that writes a line per episode."""
    import httpx

    limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
    begun, busy = time.perf_counter(), time.process_time()
    with (
        httpx.Client(timeout=60, limits=limits) as client,
        out.open("w", encoding="utf-8") as lines,
        ThreadPoolExecutor(parallel) as pool,
    ):

        def episode(pair: tuple[bytes, bytes]) -> str:
            texts = []
            for body in pair:
                reply = client.post(f"{url}/completions", content=body).raise_for_status().json()
                texts.append(codec.decode(reply["choices"][0]["token_ids"]))
            return json.dumps({"text": texts, "correct": "{42}" in texts[1]}) + "\n"

        for line in pool.map(episode, bodies):
            lines.write(line)
    return time.perf_counter() - begun, time.process_time() - busy


def bodies_of(out: Path, codec: ChatTokenizer) -> list[tuple[bytes, bytes]]:
    """Reconstruct the requests of an evaluation from its episodes."""
    found = []
    for record in load_records(out / "episodes.jsonl"):
        prompt, response, mask = (
            record.prompt_ids or (),
            record.response_ids or (),
            record.response_mask or (),
        )
        call = mask.index(0)
        observed = call + mask[call:].index(1)
        both = (list(prompt), [*prompt, *response[:observed]])
        found.append(tuple(_body(ids) for ids in both))
    return found  # type: ignore[return-value]


def _body(ids: list[int]) -> bytes:
    fixed: dict[str, Any] = {"model": "m", "max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "logprobs": 1}
    fixed |= {"stop": list(SPEC.stop_strings), "include_stop_str_in_output": True, "return_token_ids": True}
    return json.dumps(fixed | {"prompt": ids}).encode()


async def checked(url: str, codec: ChatTokenizer, wanted: list[Task], out: Path) -> list[tuple[bytes, bytes]]:
    """Return the bodies that both sides send; check that every episode has two generations and one call."""
    model = OpenAIModel(url, codec, name="m", context_tokens=8192)
    reward = load_reward()
    metrics = await evaluate(
        wanted, SPEC, model, {"code": AtOnce()}, reward, out, Conditions(SAMPLING), keep_tokens=True
    )
    await asyncio.gather(model.close(), reward.close())
    assert metrics.pass_at_1 is not None
    assert (metrics.pass_at_1.value, metrics.tool_calls) == (1.0, 1.0), metrics
    return bodies_of(out, codec)


def overhead(folder: Path, episodes: int, parallel: int, runs: int) -> dict[str, Any]:
    """Return the seconds of both, which alternate, and the difference per episode."""
    train_tokenizer(
        [CALL, ANSWER, "What is 6 * 7? <observation>\n42\n</observation>"] * 50,
        folder / "words",
        vocab_size=420,
    )
    codec, wanted = ChatTokenizer.load(folder / "words"), tasks(episodes)
    seconds: dict[str, list[Seconds]] = {"afm eval": [], "thread pool": []}
    with server(folder / "words") as url:
        bodies = asyncio.run(checked(url, codec, wanted, folder / "checked"))
        for number in range(runs + 1):
            taken = asyncio.run(ours(url, codec, wanted, parallel, folder / f"ours{number}"))
            rival = plain(url, codec, bodies, parallel, folder / "plain.jsonl")
            if number:
                seconds["afm eval"].append(taken)
                seconds["thread pool"].append(rival)
    figures: dict[str, Any] = {"episodes": episodes, "parallel": parallel}
    for name, column in (("clock", 0), ("processor", 1)):
        found = {who: summary([one[column] for one in rows]) for who, rows in seconds.items()}
        mine, theirs = found["afm eval"]["median_s"], found["thread pool"]["median_s"]
        figures[name] = {
            "seconds": found,
            "overhead_ms_an_episode": round(1000 * (mine - theirs) / episodes, 3),
            "times_thread_pool": round(mine / theirs, 2),
        }
    return figures


def finished_run(out: Path, wanted: list[Task], rows: int) -> None:
    """Write a run without its last episode."""
    speak = ScriptedModel(
        lambda text: ANSWER if "</observation>" in text.rpartition("assistant: ")[2] else CALL
    )

    async def one_episode() -> None:
        reward = load_reward()
        await evaluate(wanted[:1], SPEC, speak, {"code": AtOnce()}, reward, out, Conditions(SAMPLING))
        await reward.close()

    asyncio.run(one_episode())
    (record,) = load_records(out / "episodes.jsonl")
    for file in out.iterdir():
        file.unlink()
    with FinishedEpisodes(out / "episodes.jsonl") as episodes:
        for number in range(rows):
            task, turn = wanted[number % len(wanted)], number // len(wanted)
            seen = {"task": task.id, "round": turn}
            one = record.model_copy(
                update={"id": f"{task.id}#{turn}", "question": task.question, "provenance": seen}
            )
            episodes.write(one)
    lines = (out / "episodes.jsonl").stat().st_size
    print(f"{rows} rows, {lines / 1e6:.0f} MB", file=sys.stderr)


def resumed(out: Path, wanted: list[Task], rounds: int) -> dict[str, float]:
    """Return the seconds to the first generation, and of the whole call."""
    first: list[float] = []

    def speak(text: str) -> str:
        first.append(time.perf_counter())
        return ANSWER if "</observation>" in text.rpartition("assistant: ")[2] else CALL

    async def work() -> None:
        reward = load_reward()
        await evaluate(
            wanted,
            SPEC,
            ScriptedModel(speak),
            {"code": AtOnce()},
            reward,
            out,
            Conditions(SAMPLING, rounds=rounds),
        )
        await reward.close()

    begun = time.perf_counter()
    asyncio.run(work())
    return {"to_work_s": round(first[0] - begun, 2), "whole_call_s": round(time.perf_counter() - begun, 2)}


def resume(folder: Path, rows: int) -> dict[str, Any]:
    """Resume a run of ``rows`` episodes that lacks one."""
    rounds = min(ROUNDS, rows)
    wanted, out = tasks(rows // rounds), folder / "many"
    out.mkdir()
    finished_run(out, wanted, len(wanted) * rounds - 1)
    file = out / "episodes.jsonl"
    result: dict[str, Any] = {"rows": len(wanted) * rounds, "megabytes": round(file.stat().st_size / 1e6)}
    begun = time.perf_counter()
    with file.open("rb") as lines:
        ids = {json.loads(line)["id"] for line in lines}
    result["plain_script_reads_ids_s"] = round(time.perf_counter() - begun, 2)
    assert len(ids) == len(wanted) * rounds - 1
    result |= resumed(out, wanted, rounds)
    result["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--part", choices=("overhead", "resume"), help="only this one")
    parser.add_argument(
        "--smoke", action="store_true", help="few episodes and rows, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    episodes, rows, runs = (40, 2000, 1) if given.smoke else (given.episodes, given.rows, given.runs)
    found: dict[str, Any] = {"environment": environment(["httpx", "pydantic", "fastapi", "uvicorn"])}
    with tempfile.TemporaryDirectory(prefix="bench_eval") as name:
        if given.part != "resume":
            found["overhead"] = overhead(Path(name), episodes, given.parallel, runs)
        if given.part != "overhead":
            found["resume"] = resume(Path(name), rows)
    report(found, given.out)


if __name__ == "__main__":
    main()
