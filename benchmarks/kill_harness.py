"""Check that 64 parallel episodes of a program survive SIGKILL for programs, engine and gateway.

    .venv/bin/python benchmarks/kill_harness.py --out kill_harness.json

`afm eval` plays all questions at the same time, each with a bare program of three turns, against `tool_servers model` with a
tiny random model. After some episodes, SIGKILL goes to programs, then to the engine, which restarts at the same address,
and then to the process with the gateway. The same command is repeated until it succeeds, with further kills of programs.
Each program answers with a digest of everything that it sent and received. The checks are:

- every episode exists once, and episodes that had ended before a kill are unchanged, byte by byte;
- the recorded chat matches the digest of the program and the question of the episode;
- the recorded chat matches the samples of the same model in this process for the episode's seed. Only an episode whose
  program was killed may match the seed of the second attempt instead;
- no process of a program outlives the gateway.

Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from timing import environment, report

PROGRAM = '''
import hashlib, json, os, sys, time, urllib.error, urllib.request
task = json.load(sys.stdin)
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
def ask(messages):
    """As OpenAI's client: a failure of the server is tried again."""
    body = json.dumps({"model": os.environ["AFM_MODEL"], "messages": messages, "max_tokens": 12}).encode()
    for attempt in range(3):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
                return json.load(reply)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == 2:
                raise
            time.sleep(0.5)
history = []
for turn in range(3):
    history.append({"role": "user", "content": f"{task['question']} turn {turn}"})
    history.append(ask(history))
    time.sleep(int(task["id"][1:]) % 32 * 0.2)  # so that they end one after the other
said = json.dumps([[message["role"], message["content"]] for message in history])
with open(os.environ["AFM_VERDICT"], "w") as file:
    json.dump({"answer": hashlib.sha256(said.encode()).hexdigest(), "score": 1.0}, file)
'''
TURNS, TOKENS = 3, 12
MOST_STARTS = 6
DEAD_WITHIN_S = 20.0
"""Time for processes to end on a busy machine."""
MARK = b"AFM_EPISODE="


class Engine:
    """The CPU engine's server with a tiny random model, always at the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        words = [
            "-m",
            "tool_servers",
            "model",
            f"--port={self._port}",
            f"--model={self._folder}",
            "--name=tiny",
        ]
        with self._folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        until(self._answers, "the engine did not start")

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/v1/models").status_code == 200
        return False


class Evaluation:
    """An output folder of `afm eval`, and its process."""

    def __init__(self, folder: Path, name: str, config: Path) -> None:
        self.out, self._config = folder / name, config
        self._log = folder / f"{name}.log"

    def start(self) -> None:
        """Start the evaluation; always the same command."""
        words = ["-m", "afm.cli.main", "eval", str(self._config), f"output_dir={self.out}"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)

    def ended(self) -> int:
        """Return the number of finished episodes."""
        return len(self.lines())

    def lines(self) -> dict[str, bytes]:
        """Return finished episodes by id; fail if one occurs twice."""
        file, found = self.out / "episodes.jsonl", dict[str, bytes]()
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):
                row = json.loads(line)
                if row["id"] in found:
                    raise SystemExit(f"{file}: episode {row['id']} occurs twice")
                if not row.get("error"):
                    found[row["id"]] = line
        return found

    def chats(self) -> dict[str, list[str]]:
        """Return the texts of each finished episode, by the id of its question."""
        rows = {name.partition("#")[0]: json.loads(line) for name, line in self.lines().items()}
        return {
            name: [message["content"] for message in row["provenance"]["trajectories"][0]["messages"]]
            for name, row in rows.items()
        }

    def failure(self) -> str:
        """Return the end of the log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-1500:]


def until(done: Callable[[], bool], failure: str, seconds: float = 900.0) -> None:
    """Wait for a condition; fail if it takes too long."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise SystemExit(failure)
        time.sleep(0.05)


def programs() -> Iterator[tuple[int, str]]:
    """Yield the running processes of programs, with their questions."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if MARK in Path(entry.path, "environ").read_bytes():
                    task = Path(entry.path, "cwd").resolve().parent / "task.json"
                    yield int(entry.name), json.loads(task.read_text(encoding="utf-8"))["id"]


def kill_programs(kills: int) -> dict[int, str]:
    """Kill running programs; return them with their questions."""
    victims = dict(list(programs())[:kills])
    for process in victims:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return victims


def disturb(evaluation: Evaluation, engine: Engine, count: int, kills: int) -> dict[str, Any]:
    """Kill programs, engine and gateway; return what each kill hit."""
    evaluation.start()
    until(lambda: evaluation.ended() >= count // 8, "no episode ended: " + evaluation.failure())
    victims = kill_programs(kills)
    before_engine = evaluation.lines()
    engine.kill()
    time.sleep(1.0)
    engine.start()
    until(
        # Episodes that waited for the engine must be among the finished ones.
        lambda: (
            evaluation.ended() >= len(before_engine) + count // 4 or evaluation.process.poll() is not None
        ),
        "nothing ended after the engine came back",
    )
    before_gateway, at_work = evaluation.lines(), dict(programs())
    had_ended = evaluation.process.poll()
    evaluation.process.kill()
    evaluation.process.wait()
    end = time.monotonic() + DEAD_WITHIN_S
    while (outlived := set(at_work) & dict(programs()).keys()) and time.monotonic() < end:
        time.sleep(0.1)
    starts = 1
    while evaluation.ended() < count or evaluation.process.returncode:
        if starts == MOST_STARTS:
            raise SystemExit("the evaluation never succeeded: " + evaluation.failure())
        starts += 1
        evaluation.start()
        if starts == 2:
            until(lambda: len(dict(programs())) >= kills, "no programs after the gateway came back")
            victims |= kill_programs(kills)
        evaluation.process.wait()
    after = evaluation.lines()
    return {
        "episodes_before_engine": len(before_engine),
        "episodes_before_gateway": len(before_gateway),
        "programs_killed": len(victims),
        "programs_at_gateways_end": len(at_work),
        "gateway_had_ended": had_ended,
        "programs_outlived_gateway": len(outlived),
        "starts": starts,
        "changed": sum(after.get(name) != line for name, line in before_gateway.items()),
        "questions_killed": sorted(victims.values()),
    }


def faults(evaluation: Evaluation, count: int) -> dict[str, int]:
    """Count the inconsistencies within the recorded chats."""
    wrong = {"lost": count, "mixed_up": 0, "not_what_the_program_saw": 0, "turns": 0}
    for name, line in evaluation.lines().items():
        row, question = json.loads(line), name.partition("#")[0]
        trajectories = row["provenance"]["trajectories"]
        wrong["lost"] -= 1
        wrong["turns"] += [each["turns"] for each in trajectories] != [TURNS]
        messages = trajectories[0]["messages"]
        asked = [message["content"] for message in messages if message["role"] == "user"]
        wrong["mixed_up"] += asked != [f"{question}: 1+1? turn {turn}" for turn in range(TURNS)]
        said = json.dumps([[message["role"], message["content"]] for message in messages])
        digest = hashlib.sha256(said.encode()).hexdigest()
        wrong["not_what_the_program_saw"] += digest not in json.dumps(row["segments"])
    return wrong


async def undisturbed(folder: Path, names: Sequence[str], attempt: int) -> dict[str, list[str]]:
    """Return the chats of undisturbed programs with the same model in this process."""
    from afm.harness import ChatRenderer, ModelRequest, Session
    from afm.models import SamplingParams, load_model
    from afm.seeds import derive_seed, episode_seed

    model = load_model(str(folder / "model"), threads=1)
    renderer = ChatRenderer(model.tokenizer)

    async def play(name: str) -> list[str]:
        seed = episode_seed(0, name, 0)
        seed = derive_seed(f"{seed}/attempt {attempt}", bits=53) if attempt else seed
        session = Session(name, model, renderer, sampling=SamplingParams(TOKENS), seed=seed)
        history: list[dict[str, Any]] = []
        for turn in range(TURNS):
            history.append({"role": "user", "content": f"{name}: 1+1? turn {turn}"})
            history.append((await session.ask(ModelRequest(messages=history))).choices[0].message)
        return [message["content"] for message in history]

    chats = await asyncio.gather(*map(play, names))
    await model.close()
    return dict(zip(names, chats, strict=True))


def prepared(folder: Path, url: str, count: int) -> Path:
    """Write questions, program and settings."""
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    rows = [
        {"id": f"q{number}", "question": f"q{number}: 1+1?", "ground_truth": "2"} for number in range(count)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "name": "kills", "agent": "math", "data": str(folder / "tasks.jsonl"), "data_source": "mini_math",
        "model": {"path": url, "tokenizer": str(folder / "model")}, "parallel": count, "output_dir": "unused",
        "max_failed_share": 1.0, "sampling": {"max_new_tokens": TOKENS, "temperature": 1.0},
        "harness": {
            "command": ["python", str(folder / "program.py")], "concurrency": count, "reward": "harness",
            "timeout_s": 300,
        },
    }  # fmt: skip
    (folder / "eval.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "eval.yaml"


def main() -> int:
    """Run the checks; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--kills", type=int, default=6, help="programs to kill")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.episodes, options.kills = 12, 2
    count = options.episodes
    from afm.models.tiny import create_tiny_model, train_tokenizer

    with tempfile.TemporaryDirectory(prefix="kill_harness") as name:
        folder = Path(name)
        train_tokenizer(["Tom has 12 apples and 3 pears."] * 50, folder / "tokenizer", vocab_size=300)
        create_tiny_model(folder / "tokenizer", folder / "model", seed=0, hidden_size=32, layers=1)
        engine = Engine(folder / "model")
        config = prepared(folder, engine.url, count)
        try:
            engine.start()
            evaluation = Evaluation(folder, "played", config)
            reports = disturb(evaluation, engine, count, options.kills)
        finally:
            engine.kill()
        chats, killed = evaluation.chats(), set(reports.pop("questions_killed"))
        first, second = (asyncio.run(undisturbed(folder, [*chats], attempt)) for attempt in range(2))
        again = {name for name, chat in chats.items() if chat != first[name]}
        wrong = faults(evaluation, count) | {
            "changed": reports.pop("changed"),
            "other_than_undisturbed": len(again - killed)
            + sum(chats[name] != second[name] for name in again),
            "outlived": reports.pop("programs_outlived_gateway"),
            # The engine came back too late, and all episodes failed: the kill of the gateway hit nothing.
            "gateway_missed": int(reports.pop("gateway_had_ended") is not None),
        }
    found = {
        "environment": environment(["httpx", "uvicorn"]),
        "episodes": count,
        "disturbance": reports,
        "second_attempts": len(again),
        "wrong": wrong,
    }
    report(found, options.out)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
