import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response
from loopback import LoopbackServer
from starlette.requests import ClientDisconnect

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets import Task, read_tasks, write_tasks
from afm.distill.queries.askers import ChatAsker, EpisodeAsker, by_exact_match, by_reward, sample_of
from afm.distill.queries.sampling import FailedQuestions, QuerySettings, SampleLog, read_selection
from afm.distill.queries.select import known_questions, select_queries
from afm.endpoints.chat import EndpointSettings
from afm.errors import AfmError, ConfigError, DataError, EngineError, RewardError
from afm.models import SamplingParams
from afm.models.base import ScriptedModel
from afm.rewards import load_reward
from afm.seeds import derive_seed
from afm.trajectory.tags import author_segments

ROOT = Path(__file__).parents[2]
QA = ROOT / "configs/queries/qa.yaml"


class ChatServer(LoopbackServer):
    """Knows items whose number divides by 3 always, others sometimes (by the seed) or never.

    Attributes:
        refused: Status and text, or the choice, that questions about an item get, always; ``None`` is any item.
        faults: Whether some requests are answered with 429, 500 or half a JSON.
        down: Every request is answered with 500.
        hang_s: The first request is not answered for so long.
        served: Right and wrong replies by question.
        most: Requests in flight at the same time, at most.
        together: Nobody is answered before so many requests are in flight.
        allowed: So many requests are answered; the others wait.
    """

    def __init__(self):
        self.faults = self.down = False
        self.hang_s, self.most, self.requests, self._flying = 0.0, 0, 0, 0
        self.together, self.allowed = 1, math.inf
        self.served = Counter()
        self.refused = {}
        app = FastAPI()
        app.get("/v1/models")(lambda: {"data": [{"id": "small"}]})
        app.post("/v1/chat/completions", response_model=None)(self.completions)
        super().__init__(app, log_level="error", lifespan="off")
        self.url = f"{self.origin}/v1"

    async def completions(self, request: Request):
        try:
            body = await request.json()
        except ClientDisconnect:  # it was killed
            return Response(status_code=400)
        self._flying += 1
        self.requests += 1
        number = self.requests
        self.most = max(self.most, self._flying)
        await asyncio.sleep(self.hang_s if number == 1 else 0)
        while self.most < self.together or self.allowed <= 0:  # noqa: ASYNC110  set by the test's thread
            await asyncio.sleep(0.01)
        self.allowed -= 1
        self._flying -= 1
        return self._answer(body, number)

    def _answer(self, body, number):
        item = int(re.findall(r"item (\d+)\?", body["messages"][-1]["content"])[-1])
        refused = self.refused.get(item, self.refused.get(None))
        if isinstance(refused, tuple):
            status, text = refused
            return Response(text, status)
        if refused is not None:
            return {"choices": [refused]}
        if self.down:
            return Response("down", 500)
        if self.faults and number % 7 == 0:
            return Response("slow down", 429, {"Retry-After": "0"})
        if self.faults and number % 11 == 0:
            return Response("oops", 500)
        if self.faults and number % 13 == 0:
            return Response('{"choices": [{"mess')
        return self.completion(body, item)

    def completion(self, body, item):
        right = knows(item, body["seed"])
        text = f"<think>Hm.</think>\n<answer>The Name {item if right else 'none'}.</answer>"
        self.served[item, right] += 1
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def knows(item, seed):
    return {0: True, 1: seed % 5 == 0, 2: False}[item % 3]


@pytest.fixture
def server():
    server = ChatServer().start()
    yield server
    server.stop(forced=True)


def questions(count, source="search"):
    asked = "What is the name of item {}?".format
    fields = [{"id": f"q{n}", "question": asked(n), "ground_truth": [f"name {n}"]} for n in range(count)]
    return [Task(**one, data_source=source) for one in fields]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written_tasks(folder, *tasks):
    """Settings of a selection of these tasks into the folder's ``out``."""
    write_tasks(tasks, folder / "tasks.jsonl")
    return f"tasks={folder / 'tasks.jsonl'}", f"output_dir={folder / 'out'}"


@pytest.fixture
def select(afm):
    def run(*arguments, status=0):
        done = afm("data", "queries", *arguments, status=status)
        return done.stdout + done.stderr

    return run


def asker(server, **options):
    spec = without_tools(load_agent("mhqa"))
    sampling = {"temperature": 1.0, "max_tokens": 64}
    endpoint = EndpointSettings(**({"max_parallel": 8} | options))
    return ChatAsker(spec, server.url, "small", by_exact_match, **sampling, endpoint=endpoint)


async def selected(tasks, server, out, known=(), **options):
    one = asker(server, attempts=options.pop("attempts", 6))
    try:
        return await select_queries(tasks, one, out, QuerySettings(**options), known=known)
    finally:
        await one.close()


def test_the_shipped_selections_are_those_of_the_paper():
    def shipped(name, *settings):
        return read_selection(
            ROOT / f"configs/queries/{name}.yaml", ["tasks=q", "model=m", "output_dir=o", *settings]
        )

    qa, web, code, math_ = shipped("qa"), shipped("web", "sft=[]"), shipped("code"), shipped("math")
    assert (qa.agent, qa.samples, qa.with_tools, qa.max_rate, qa.most_right) == ("mhqa", 32, False, 0.3, 9)
    assert web == qa.model_copy(update={"agent": "web", "target": 10_427})
    assert (code.samples, code.with_tools, code.most_right, code.max_tokens) == (8, True, 7, None)
    assert (code.agent, code.ability, code.tools.name) == ("code", "coding", "code_executor.yaml")
    assert math_ == code.model_copy(update={"agent": "math", "ability": "math"})
    with pytest.raises(ConfigError, match=r"web_agent_sft\.json: no such file, so overlap"):
        shipped("web")
    with pytest.raises(AfmError, match="expected at most 86400"):  # as the endpoint expects
        shipped("qa", "timeout_s=1.0e+6")


@pytest.mark.slow
def test_the_script_of_the_web_agent_selects_and_makes_rl_rows(server, tmp_path):
    write_tasks(questions(24), tmp_path / "tasks.jsonl")
    sft = [{"instruction": "Rules.\n\nQuestion: What is the name of item 2?", "input": "", "output": "x"}]
    (tmp_path / "sft.json").write_text(json.dumps(sft))
    settings = {"MODEL": server.url, "SFT": tmp_path / "sft.json", "OUT": tmp_path / "queries"}
    settings |= {"RL_DIR": tmp_path / "rl", "VALIDATION": "1"}
    settings |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [ROOT / "data/web_agent/select_queries.sh", tmp_path / "tasks.jsonl", "target=9"]
    subprocess.run(words, env=os.environ | {key: str(value) for key, value in settings.items()}, check=True)
    dropped = Counter(row["reason"] for row in rows_of(tmp_path / "queries/dropped.jsonl"))
    assert dropped["in the SFT data"] == 1
    assert dropped["r_q above 0.3"] >= 8  # a third is always known
    assert sum(dropped.values()) == 24 - 9
    train, val = (list(read_tasks(tmp_path / f"rl/{name}.parquet")) for name in ("train", "val"))
    assert (len(train), len(val)) == (8, 1)
    assert all(task.extra_info["r_q"] <= 0.3 and task.extra_info["r_q_samples"] == 32 for task in train)


def test_a_selection_of_a_file_checks_its_sft_data_and_abilities(select, server, tmp_path):
    tasks = [
        task.model_copy(update={"ability": "math" if n % 2 else "coding"})
        for n, task in enumerate(questions(6))
    ]
    config = tmp_path / "own.yaml"
    start = (config, *written_tasks(tmp_path, *tasks), f"model={server.url}")

    config.write_text("{agent: web, samples: 2, ability: math}")
    assert "of 3 questions kept, 6 samples taken" in select(*start)
    printed = select(*start, "ability=maths", status=1)
    assert "no row has the ability 'maths', only 'coding', 'math'; choose with ability=" in printed
    for text, message in (
        ("{agent: web, sft: [none.json]}", "none.json: no such file, so overlap with the SFT data cannot"),
        ("{agent: web, sampels: 2}", "did you mean 'samples'"),
    ):
        config.write_text(text)
        assert message in select(*start, status=1)


@pytest.mark.slow
def test_killed_and_started_again_no_sample_is_lost_or_doubled(server, tmp_path):
    tasks, samples = questions(12), 16
    server.faults = True
    out = tmp_path / "out"
    words = [sys.executable, "-m", "afm.cli.main", "data", "queries", "configs/queries/qa.yaml", "agent=web"]
    words += [*written_tasks(tmp_path, *tasks), f"model={server.url}", f"samples={samples}", "seed=3"]
    server.allowed = 120
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(12_000):
            log = out / "samples.jsonl"
            if log.exists() and log.read_bytes().count(b"\n") >= 60:
                break
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    server.allowed = math.inf
    with (out / "samples.jsonl").open("ab") as file:
        file.write(b'{"task": "q1", "ke')  # what a kill may leave
    before = (out / "samples.jsonl").read_bytes().count(b"\n")
    assert 60 <= before < len(tasks) * samples

    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    rows = rows_of(out / "samples.jsonl")
    taken = Counter((row["task"], row["sample"]) for row in rows)
    assert set(taken) == {(task.id, number) for task in tasks for number in range(samples)}
    assert set(taken.values()) == {1}
    assert f"samples of earlier starts: {before}" in done.stdout
    right = {
        task.id: sum(knows(n, derive_seed(3, task.id, number)) for number in range(samples))
        for n, task in enumerate(tasks)
    }
    kept, dropped = list(read_tasks(out / "kept.jsonl")), rows_of(out / "dropped.jsonl")
    rates = {task.id: task.extra_info["r_q"] for task in kept}
    assert rates == {name: count / 16 for name, count in right.items() if count <= 4}
    over = {name: count / 16 for name, count in right.items() if count > 4}
    assert {row["id"]: row["r_q"] for row in dropped} == over
    assert {row["reason"] for row in dropped} == {"r_q above 0.3"}
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert counts == {"tasks": 12, "kept": len(kept), "dropped": len(dropped)}


async def test_sixty_four_requests_are_in_flight(server, tmp_path):
    server.together = 64
    one = asker(server, max_parallel=64)
    summary = await select_queries(questions(8), one, tmp_path, QuerySettings(samples=32))
    await one.close()
    assert (summary.sampled, server.most) == (8 * 32, 64)


@pytest.mark.slow
def test_a_request_that_hangs_is_asked_again(select, server, tmp_path):
    server.hang_s = 30.0
    start = (QA, *written_tasks(tmp_path, *questions(1)), f"model={server.url}")
    printed = select(*start, "samples=4", "timeout_s=1")
    assert "0 of 1 question kept, 4 samples taken" in printed
    assert "without `sft` nothing was compared with the SFT data" in printed
    assert server.requests == 5


async def test_another_threshold_more_samples_and_more_tasks_use_what_is_there(server, tmp_path):
    first = await selected(questions(6), server, tmp_path, samples=4)
    assert (first.sampled, first.resumed, first.kept, dict(first.dropped)) == (24, 0, 4, {"r_q above 0.3": 2})
    second = await selected(questions(6), server, tmp_path, samples=4, max_rate=None)
    assert (second.sampled, second.resumed) == (0, 24)
    assert dict(second.dropped) == {"solved by every sample": 2}
    third = await selected(questions(7), server, tmp_path, samples=5)
    assert (third.sampled, third.resumed) == (6 + 5, 24)
    fewer = await selected(questions(6), server, tmp_path, samples=2)
    assert (fewer.sampled, fewer.resumed) == (0, 12)
    other = [task.model_copy(update={"ground_truth": ["none"]}) for task in questions(6)]
    changed = await selected(other, server, tmp_path, samples=4)
    assert changed.sampled == 24


async def test_samples_of_another_model_or_seed_are_not_mixed(server, tmp_path):
    async def refused(error, message, **options):
        with pytest.raises(error, match=message):
            await selected(questions(1), server, tmp_path, samples=1, **options)

    await selected(questions(1), server, tmp_path, samples=1)
    await refused(ConfigError, r"run with other settings \(seed: 0 -> 1\); choose another", seed=1)
    with SampleLog(tmp_path / "samples.jsonl"):
        await refused(ConfigError, "another run is writing here")
    (tmp_path / "samples.jsonl").write_text("{}\n")
    await refused(DataError, r"samples\.jsonl:1: not a JSON object with the keys task")


async def test_a_server_that_is_down_ends_the_run_and_keeps_the_samples(server, tmp_path):
    await selected(questions(2), server, tmp_path, samples=4)
    server.down = True
    settings = {"samples": 4, "attempts": 1, "failures_in_a_row": 2, "max_parallel": 1}
    with pytest.raises(EngineError, match=r"of 16 samples are missing.*status 500.*same command again"):
        await selected(questions(4), server, tmp_path, **settings)
    server.down = False
    summary = await selected(questions(4), server, tmp_path, samples=4)
    assert (summary.resumed, summary.sampled, summary.kept + sum(summary.dropped.values())) == (8, 8, 4)


CRASH = (500, "assertion failed")


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((400, "maximum context length is 4096 tokens"), "4096 tokens"),
        ({"message": {"content": ""}, "finish_reason": "content_filter"}, "content_filter"),
        ({"message": {"content": None}, "finish_reason": "stop"}, "'stop'"),
        (CRASH, "status 500"),
    ],
)
async def test_a_question_that_the_server_refuses_is_dropped_and_named(server, tmp_path, refusal, message):
    server.refused = {1: refusal}

    summary = await selected(questions(6), server, tmp_path, samples=3, attempts=1)

    assert dict(summary.dropped) == {"cannot be sampled": 1, "r_q above 0.3": 2}
    assert (summary.kept, summary.sampled, list(summary.unsampled)) == (3, 15, ["q1"])
    [row] = [row for row in rows_of(tmp_path / "dropped.jsonl") if row["id"] == "q1"]
    assert re.fullmatch(f"cannot be sampled: \\w+Error: .*{message}.*", row["reason"])
    assert "r_q" not in row
    strict = {"samples": 3, "attempts": 1, "on_bad_rows": FailedQuestions.ERROR}
    with pytest.raises(EngineError, match=r"3 of 18 samples are missing, [123] of them failed \(of 'q1'\)"):
        await selected(questions(6), server, tmp_path / "whole", **strict)
    assert not (tmp_path / "whole/kept.jsonl").exists()


@pytest.mark.parametrize("status", [400, 401])
async def test_a_server_that_refuses_everything_is_an_error_that_loses_nothing(server, tmp_path, status):
    server.refused = {None: (status, "no")}
    with pytest.raises(EngineError, match=f"8 of 8 samples are missing, .*status {status}"):
        await selected(questions(4), server, tmp_path, samples=2)
    server.refused = {}
    await selected(questions(2), server, tmp_path, samples=2)
    server.refused = {None: (status, "the key was revoked")}
    with pytest.raises(EngineError, match=r"4 of 8 samples are missing, .* \(of 'q2', 'q3'\).*revoked"):
        await selected(questions(4), server, tmp_path, samples=2)
    server.refused = {}
    summary = await selected(questions(4), server, tmp_path, samples=2)
    assert (summary.resumed, summary.sampled, summary.kept + sum(summary.dropped.values())) == (4, 4, 4)


async def test_one_fault_of_many_questions_is_not_the_questions(server, tmp_path):
    server.refused = dict.fromkeys((1, 2, 4), CRASH)
    with pytest.raises(EngineError, match="3 of 6 samples are missing"):
        await selected(questions(6), server, tmp_path, samples=1, attempts=1, failures_in_a_row=2)


async def test_faults_that_may_pass_are_never_the_questions(server, tmp_path):
    """Half of a question's samples are there; a crash of the others says nothing about it."""
    await selected(questions(4), server, tmp_path, samples=2)
    server.refused = {1: CRASH}
    with pytest.raises(EngineError, match=r"2 of 16 samples are missing, 2 of them failed \(of 'q1'\)"):
        await selected(questions(4), server, tmp_path, samples=4, attempts=1)
    server.refused = {}
    assert (await selected(questions(4), server, tmp_path, samples=4)).sampled == 2


async def test_questions_of_the_sft_data_and_repeated_ones_are_not_asked(server, tmp_path):
    sft = [
        {"instruction": "Rules.\n\nQuestion: what is THE name of item 1", "input": "", "output": "x"},
        {"instruction": "Rules.", "input": "What is the name of item 2?", "output": "x"},
    ]
    (tmp_path / "sft.json").write_text(json.dumps(sft))
    (tmp_path / "records.jsonl").write_text('{"id": "r", "question": "What is name of item 4?"}\n')
    known = known_questions([tmp_path / "sft.json", tmp_path / "records.jsonl"])
    again = Task(id="again", question="what is the name of item 5", ground_truth=["name 5"])
    bad = Task(id="bad", question="What is the name of item 8?", ground_truth=[])
    tasks = [*questions(6), again, bad]

    summary = await selected(tasks, server, tmp_path / "out", known=known, samples=2)

    assert dict(summary.dropped) == {
        "in the SFT data": 3,
        "repeats a question": 1,
        "r_q above 0.3": 2,
        "cannot be judged": 1,
    }
    reasons = {row["id"]: row["reason"] for row in rows_of(tmp_path / "out/dropped.jsonl")}
    assert {name for name, reason in reasons.items() if reason == "in the SFT data"} == {"q1", "q2", "q4"}
    assert "holds no answer" in reasons["bad"]
    assert {item for item, _ in server.served} == {0, 3, 5, 8}
    with pytest.raises(DataError, match="task id 'q0' occurs twice"):
        await selected([*questions(1), *questions(1)], server, tmp_path, samples=2)
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: no question"):
        known_questions([tmp_path / "bad.jsonl"])


async def test_the_draw_is_in_proportion_to_the_data_sources(server, tmp_path):
    sizes = {"nq": 3, "hotpotqa": 6, "popqa": 11}
    names = [source for source, size in sizes.items() for _ in range(size)]
    tasks = [
        Task(id=f"t{n}", question=f"What about item {3 * n + 2}?", ground_truth="x", data_source=source)
        for n, source in enumerate(names)
    ]
    summary = await selected(tasks, server, tmp_path, samples=1, target=7)
    # 7/20 of 3, 6 and 11 are 1.05, 2.1 and 3.85: whole parts 1, 2, 3, and the last place goes to 0.85.
    drawn = Counter(task.data_source for task in read_tasks(tmp_path / "kept.jsonl"))
    assert drawn == {"nq": 1, "hotpotqa": 2, "popqa": 4}
    assert dict(summary.dropped) == {"not drawn": 13}
    first = (tmp_path / "kept.jsonl").read_bytes()
    await selected(tasks, server, tmp_path, samples=1, target=7)
    assert (tmp_path / "kept.jsonl").read_bytes() == first
    everyone = await selected(tasks, server, tmp_path, samples=1, target=50)
    assert everyone.kept == 20


async def test_a_reward_that_fails_for_all_is_no_fault_of_the_questions(tmp_path):
    """Its server ends after the third of six verdicts, and is there again for the second start."""
    spec = without_tools(load_agent("mhqa"))
    verdicts = 0

    async def judge(sample):
        nonlocal verdicts
        verdicts += 1
        if 3 < verdicts < 100:
            raise RewardError("the judge does not answer")
        return False

    one = EpisodeAsker(spec, ScriptedModel(lambda text: "Name 0"), {}, judge, SamplingParams(200))
    settings = QuerySettings(samples=1, max_parallel=1)
    with pytest.raises(EngineError, match=r"3 of 6 samples are missing.*the judge does not answer"):
        await select_queries(questions(6), one, tmp_path, settings)
    assert not (tmp_path / "dropped.jsonl").exists()
    verdicts = 100

    summary = await select_queries(questions(6), one, tmp_path, settings)

    assert (summary.resumed, summary.kept) == (3, 6)


async def test_a_partly_right_answer_is_no_solved_question():
    """By F1 "Name 0 of them" shares half of its words with "name 0", "Name 0" all."""
    spec = load_agent("mhqa")
    reward = load_reward({"by_source": {"search": "f1"}})
    judge, [task] = by_reward(reward), questions(1)

    for text, right in (("Other", False), ("Name 0 of them", False), ("Name 0", True)):
        answer = author_segments(f"<think>T.</think>\n<answer>{text}</answer>", spec)
        assert await judge(sample_of(spec, task, answer)) is right
    await reward.close()


async def test_episodes_of_a_model_in_this_process_without_tools(tmp_path):
    spec = without_tools(load_agent("mhqa"))

    def script(text):
        return "<think>T.</think>\n<answer>Name 1 | name 1</answer>" if "item 1?" in text else "Name 0"

    one = EpisodeAsker(spec, ScriptedModel(script), {}, by_exact_match, SamplingParams(200))
    summary = await select_queries(questions(3), one, tmp_path, QuerySettings(samples=3))
    # Item 0: one line without tags is the answer. Item 1: both answers are gold. Item 2: "Name 0" is not.
    assert [row["id"] for row in rows_of(tmp_path / "dropped.jsonl")] == ["q0", "q1"]
    assert summary.kept == 1


@pytest.mark.sandbox
async def test_programs_are_sampled_with_tools_and_dropped_when_all_solve_them(tmp_path, tools):
    spec = load_agent("math")
    tasks = [
        Task(id="easy", question="What is 6 times 7?", ground_truth="42", data_source="math_dapo"),
        Task(id="hard", question="What is 6 times 8?", ground_truth="48", data_source="math_dapo"),
    ]
    call = "<plan>Multiply.</plan>\n<think>T.</think>\n<code>\n```py\nprint(6 * 7)\n```\n</code>"
    end = "\n<reflection>Good.</reflection>\n<think>T.</think>\n<answer>\\boxed{42}</answer>"

    def script(text):
        shown = text.rpartition("assistant: ")[2]
        return end if "</observation>" in shown else call

    reward = load_reward()
    one = EpisodeAsker(spec, ScriptedModel(script), tools, by_reward(reward), SamplingParams(2000))
    settings = QuerySettings(samples=8, with_tools=True, max_rate=None, max_tokens=None, max_parallel=4)
    summary = await select_queries(tasks, one, tmp_path, settings)
    await reward.close()
    assert (summary.sampled, dict(summary.dropped)) == (16, {"solved by every sample": 1})
    [kept] = read_tasks(tmp_path / "kept.jsonl")
    assert (kept.id, kept.extra_info["r_q"]) == ("hard", 0.0)


@pytest.mark.slow
def test_samples_of_a_model_in_this_process_are_kept_from_other_rewards_and_tools(select, tmp_path):
    pytest.importorskip("torch")
    from afm.models.tiny import create_tiny_model, train_tokenizer

    tasks, tiny = questions(2, source="nq"), tmp_path / "tiny"
    train_tokenizer([task.question for task in tasks], tiny, vocab_size=300)
    create_tiny_model(tiny, tiny, seed=1)
    shipped = (ROOT / "configs/tools/code_executor.yaml").read_text()
    (tmp_path / "tools.yaml").write_text(shipped)
    (tmp_path / "reward.yaml").write_text("formula: correct\n")
    start = (ROOT / "configs/queries/math.yaml", "ability=", *written_tasks(tmp_path, *tasks), "samples=1")
    start += (f"model={tiny}", "max_tokens=4", f"tools={tmp_path / 'tools.yaml'}")
    reward = f"rewards={tmp_path / 'reward.yaml'}"

    assert f"{tmp_path}/out/kept.jsonl: 2 of 2 questions kept, 2 samples taken" in select(*start)
    stops = {row["stop"] for row in rows_of(tmp_path / "out/samples.jsonl")}
    assert stops <= {"agent_tokens", "end_of_text"}
    assert "0 samples taken" in select(*start, reward)
    (tmp_path / "reward.yaml").write_text("by_source: {nq: f1}\n")
    printed = select(*start, reward, status=1)
    assert re.search(r"holds a run with other settings \(reward_digest: '\w+' -> '\w+'\)", printed)
    (tmp_path / "tools.yaml").write_text(shipped.replace("wall_s: 7.0", "wall_s: 3.0"))
    assert "other settings (tools_digest: " in select(*start, status=1)


def test_what_is_missing_on_the_command_line_is_told(select, server, tmp_path):
    start = (QA, *written_tasks(tmp_path, *questions(1)), "samples=2")
    printed = select(*start, f"model={server.url}", "with_tools=true", status=2)
    assert "tokenizer: missing; with_tools on a server needs it" in printed
    assert "holds no model" in select(*start, f"model={tmp_path}", status=2)
    printed = select(*start, f"model={server.url}")
    assert "0 of 1 question kept, 2 samples taken" in printed
    assert json.loads((tmp_path / "out/settings.json").read_text())["model"] == "small"


@pytest.mark.parametrize(
    ("text", "end", "right"),
    [
        ("It might be <answer>none</answer>, but no.</think>\n<answer>Name 0</answer>", "stop", True),
        ("Is it <answer>Name 0</answer>?</think>\n<answer>none</answer>", "stop", False),
        ("<think>I know that.</think>\n\nName 0", "stop", True),
        ("<answer>name 0", "length", False),
    ],
)
async def test_the_server_is_asked_by_the_agents_rules_and_no_draft_is_the_answer(server, text, end, right):
    seen, choice = [], {"message": {"content": text}, "finish_reason": end}
    server.completion = lambda body, item: seen.append(body) or {"choices": [choice]}
    one = asker(server)
    answered = await one.ask(questions(1)[0], 5)
    await one.close()

    assert (answered.right, answered.stop) == (right, end)
    [body] = seen
    rules = without_tools(load_agent("mhqa"))
    assert body["messages"] == rules.prompt_messages("What is the name of item 0?")
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (1.0, 64, 5)
