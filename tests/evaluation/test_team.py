import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from loopback import LoopbackServer

from afm.cli.recipes import wiki_server
from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
from afm.datasets.encyclopaedia.relations import find_fact, read_chain
from afm.datasets.mini_world import WorldSplit
from afm.distill.event_log import EventKind, read_events
from afm.trajectory import load_records

ROOT = Path(__file__).parents[2]
TASKS = 12
CONFIG = ROOT / "configs/tiny/eval/mhqa_world.yaml"
TEAM = ROOT / "configs/distill/mhqa.yaml"
_SAYS = {"You plan the work": "plan", "You work for a team": "search", "You watch over": "reflect"}
_SAYS |= {"You write the final": "write", "You check a suggested": "check"}
_NOTED = re.compile(r"\(([\w ]+) of (\w+ \w+): ([\w ]+)\)")


class Endpoint(LoopbackServer):
    """Plays every member by rules, over HTTP.

    Attributes:
        usage: What it reports of a request with so many characters in and out; ``None`` for nothing.
        wrong: Questions that are answered wrongly.
        silly: Questions whose planner never says anything of use.
        down: Whether every request fails.
        delay_s: Before each reply.
    """

    def __init__(self):
        self.usage = lambda read, wrote: {"prompt_tokens": read, "completion_tokens": wrote}
        self.wrong, self.silly, self.down, self.delay_s = set(), set(), False, 0.0
        self.asked = Counter()
        app = FastAPI()
        app.post("/v1/chat/completions", response_model=None)(self.completions)
        super().__init__(app, log_level="error", lifespan="off")

    async def completions(self, request: Request):
        from fastapi.responses import JSONResponse

        system, user = (message["content"] for message in (await request.json())["messages"])
        await asyncio.sleep(self.delay_s)
        if self.down:
            return JSONResponse({"error": "out of order"}, 400)
        question = re.search(r"^Question: (.*)$", user, re.MULTILINE)[1]
        self.asked[question] += 1
        part = next(part for words, part in _SAYS.items() if system.startswith(words))
        text = json.dumps(getattr(self, f"_{part}")(question, read_chain(question), user))
        answer = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        usage = self.usage(len(system + user), len(text))
        return answer | ({} if usage is None else {"usage": usage})

    def _plan(self, question, chain, user):
        return {"steps": [] if question in self.silly else [f"Find fact {n}" for n in range(len(chain.asks))]}

    def _search(self, question, chain, user):
        known = {(asks, name): gives for asks, name, gives in _NOTED.findall(user)}
        name, place = chain.start, int(re.search(r"^Your sub-task: Find fact (\d+)", user, re.MULTILINE)[1])
        for asks in chain.asks[:place]:
            name = known[asks, name]
        asks = chain.asks[place]
        fact = find_fact(user, asks, name)
        if fact is None:
            return {"tool": "wiki_search", "argument": f"{asks} of {name}"}
        return {"thought": "Found.", "finding": f"({asks} of {name}: {fact.gives})"}

    def _reflect(self, question, chain, user):
        good = {"grade": "good", "why": "Fine."}
        return dict.fromkeys(("information_conflict", "tool_effectiveness", "trajectory_monitoring"), good)

    def _write(self, question, chain, user):
        return {"answer": "nobody knows" if question in self.wrong else _NOTED.findall(user)[-1][2]}

    def _check(self, question, chain, user):
        return {"findings": "Stated.", "score": 4}


@pytest.fixture
def endpoint(monkeypatch):
    server = Endpoint().start()
    monkeypatch.setenv("TEACHER_BASE_URL", f"{server.origin}/v1")
    yield server
    server.stop(forced=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_encyclopaedia(
        folder, Encyclopaedia(200, seed=0), sizes={WorldSplit.TRAIN: TASKS}, seed=0, hops=[1, 2]
    )
    build = [sys.executable, "-m", "tool_servers.wiki_search.build", str(folder / "corpus.jsonl")]
    subprocess.run([*build, f"--output-dir={folder / 'index'}"], check=True, capture_output=True)
    with wiki_server(folder / "index", folder / "log"):
        yield folder


def words(world, out, *more):
    prices = "prices={prompt: 1.0, completion: 2.0, tools: {wiki_search: 0.001}}"
    return ["eval", str(CONFIG), f"data={world / 'train.jsonl'}", f"output_dir={out}", prices, *more]


@pytest.fixture
def evaluate(afm, world):
    return lambda out, *more, status=0: afm(*words(world, out, *more), status=status)


def questions(world):
    return [json.loads(line)["question"] for line in (world / "train.jsonl").read_text().splitlines()]


def test_a_team_behind_an_endpoint_is_judged_and_counted(tmp_path, world, endpoint, evaluate):
    wrong, silly = questions(world)[:2]
    endpoint.wrong, endpoint.silly = {wrong}, {silly}

    done = evaluate(tmp_path / "out", f"team={TEAM}", "team.models.fast.price={prompt: 0, completion: 4}")

    assert f"{TASKS} of {TASKS} episodes scored" in done.stdout
    records = {record.question: record for record in load_records(tmp_path / "out/episodes.jsonl")}
    assert len(records) == TASKS
    for question, record in records.items():
        team, cost = record.provenance["team"], record.cost
        assert record.verdict.score == (question not in (wrong, silly))
        if question == silly:
            assert "planner: no usable reply" in record.reason
            assert (record.stop, record.error, cost.tool_calls) == ("end_of_text", "", 0)
            continue
        assert cost.tool_calls == len(record.calls) == len(read_chain(question).asks)
        members = team["members"]

        def total(key, members=members):
            return sum(one[key] for one in members.values())

        assert cost.generations == total("requests") == endpoint.asked[question]
        assert (cost.read_tokens, cost.agent_tokens) == (total("prompt_tokens"), total("completion_tokens"))
        assert cost.unmetered == 0
        prices = {name: (0.0, 4.0) if name in ("searcher", "writer") else (2.0, 8.0) for name in members}
        spent = sum(
            one["prompt_tokens"] * prices[name][0] + one["completion_tokens"] * prices[name][1]
            for name, one in members.items()
        )
        assert cost.model_usd == pytest.approx(spent / 1e6)
        assert team["messages"][-1] == {"member": "writer", "text": record.text.split("<answer>")[1][:-9]}
        assert {one["member"] for one in team["messages"]} >= {"planner", "searcher", "verifier"}
    metrics = metrics_of(tmp_path / "out")
    assert metrics["pass_at_1"]["value"] == pytest.approx((TASKS - 2) / TASKS)
    assert metrics["format_valid"] is None, "a team has no format of its own"


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_tokens_that_an_endpoint_does_not_report_are_unknown_and_not_0(tmp_path, world, endpoint, evaluate):
    endpoint.usage = lambda read, wrote: None

    done = evaluate(tmp_path / "out", f"team={TEAM}", "limit=2")

    for record in load_records(tmp_path / "out/episodes.jsonl"):
        assert record.cost.unmetered == record.cost.generations > 0
        assert all("prompt_tokens" not in one for one in record.provenance["team"]["members"].values())
    metrics = metrics_of(tmp_path / "out")
    assert (metrics["agent_tokens"], metrics["usd"]) == (None, None)
    assert list(metrics["per_solved"]) == ["tool_calls"]
    assert "agent tokens –" in done.stdout


def test_a_dead_endpoint_is_an_error_and_no_score(tmp_path, world, endpoint, evaluate):
    endpoint.down = True

    done = evaluate(tmp_path / "out", f"team={TEAM}", "limit=2", "max_failed_share=1")

    assert "0 of 2 episodes scored" in done.stdout
    for record in load_records(tmp_path / "out/episodes.jsonl"):
        assert record.verdict is None
        assert "out of order" in record.error


@pytest.mark.slow
def test_killed_and_started_again_no_episode_is_lost_doubled_or_paid_twice(
    tmp_path, world, endpoint, evaluate
):
    endpoint.delay_s = 0.05
    out = tmp_path / "out"
    more = (f"team={TEAM}", "rounds=2", "parallel=4")
    command = [sys.executable, "-m", "afm.cli.main", *words(world, out, *more)]
    for goal in (3, 13):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and lines(out / "episodes.jsonl") < goal:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    endpoint.delay_s = 0.0
    evaluate(out, *more)
    ids = [record.id for record in load_records(out / "episodes.jsonl")]
    assert len(ids) == len(set(ids)) == 2 * TASKS
    ends = Counter(
        event.task_id for event in read_events(out / "team_events.jsonl") if event.kind is EventKind.FINAL
    )
    assert ends == Counter(ids)
    other = evaluate(out, *more, "team.limits.rounds=1", status=1)
    assert "holds a run with other settings" in other.stderr


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_an_answer_that_was_not_judged_yet_is_not_asked_for_again(tmp_path, world, endpoint, evaluate):
    requests = []
    for _ in range(2):
        evaluate(tmp_path / "out", f"team={TEAM}", "limit=3")
        requests.append(endpoint.asked.total())
        assert lines(tmp_path / "out/episodes.jsonl") == 3
        (tmp_path / "out/episodes.jsonl").unlink()  # as a kill between answer and verdict leaves it
    assert requests[0] == requests[1]


def test_a_spent_budget_ends_the_run_and_a_larger_one_goes_on(tmp_path, world, endpoint, evaluate):
    out = tmp_path / "out"
    stopped = evaluate(out, f"team={TEAM}", "parallel=2", "team.budget.tokens=60000", status=1)
    assert "the budget is spent" in stopped.stderr
    assert 0 < lines(out / "episodes.jsonl") < TASKS
    spent = sum(one.prompt_tokens + one.completion_tokens for one in read_events(out / "team_events.jsonl"))
    assert spent <= 60_000

    evaluate(out, f"team={TEAM}", "parallel=2")
    assert lines(out / "episodes.jsonl") == TASKS


def test_the_scripted_team_plays_by_its_name(tmp_path, world, evaluate):
    done = evaluate(tmp_path / "out", "team=scripted", "seed=1")
    assert "pass@1 100.0 %" in done.stdout
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["settings"]["model"] == {"name": "scripted_wiki", "digest": None, "team": {"members": {}}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["team=nowhere.yaml"], "nowhere.yaml"),
        (["team=scripted", "team.name=x"], "the scripted team has no file for overrides"),
        ([f"team={TEAM}", "team.limit.rounds=1"], "did you mean 'limits'?"),
        ([f"team={ROOT / 'configs/distill/wiki.yaml'}"], "is not a role of agent 'mhqa'"),
    ],
)
def test_wrong_teams_are_refused_before_anything_runs(tmp_path, evaluate, monkeypatch, options, message):
    monkeypatch.setenv("TEACHER_BASE_URL", "http://127.0.0.1:9")
    failed = evaluate(tmp_path / "out", *options, "--dry-run", status=None)
    assert failed.returncode in (1, 2), failed.stdout
    assert message in failed.stderr


@pytest.mark.slow
def test_a_team_and_a_model_are_compared_on_cost(tmp_path, world, endpoint, tiny_model, evaluate, afm):
    team, model = tmp_path / "the team", tmp_path / "model"
    evaluate(team, f"team={TEAM}", "team.models.strong.price={prompt: 2, completion: 8}")
    evaluate(model, f"model={tiny_model}", "limits.max_response_tokens=24", "sampling.temperature=0.5")

    page = afm("report", team, model)
    text = afm("eval", "compare", model, team).stdout

    file = Path(page.stdout.strip())
    (saved,) = json.loads(file.with_suffix(".json").read_text())["savings"]
    assert (saved["team"], saved["model"], saved["questions"]) == ("the team", "model", TASKS)
    rows = {(row["quantity"], row["per"]): row for row in saved["rows"]}
    costs = [record.cost for record in load_records(team / "episodes.jsonl")]
    read, calls = (sum(getattr(cost, key) for cost in costs) for key in ("read_tokens", "tool_calls"))
    usd = sum(cost.model_usd for cost in costs) + 0.001 * calls
    assert rows["prompt tokens", "task"]["team"] == pytest.approx(read / TASKS)
    assert rows["tool calls", "task"]["difference"]["value"] == pytest.approx(-calls / TASKS)
    assert rows["dollars", "task"]["team"] == pytest.approx(usd / TASKS)
    assert rows["tokens", "solved task"]["model"] is None, "it solves nothing"
    for shown in (file.read_text(), file.with_suffix(".md").read_text()):
        assert "Team against model" in shown
        assert "planner gpt-4.1" in shown.replace("\\", "")
    assert "the team (team) and model (model) on the same 12 questions." in text
    assert "tool calls per solved task" in text
