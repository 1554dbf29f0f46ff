"""`afm doctor` of evaluations: each thing that would end or spoil a run is said, with what to do, before it starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from loopback import LoopbackServer
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.main import app
from afm.datasets import Task, write_tasks
from afm.datasets.hub_sets import Lock, LockedFile, LockedSet
from afm.evaluation.config import load_config
from afm.evaluation.doctor import diagnose
from afm.evaluation.job import load_tasks, sources_of
from afm.evaluation.manifest import Conditions, claim, make_manifest
from afm.findings import Finding, Level
from afm.models.base import SamplingParams
from afm.models.tiny import create_tiny_model, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:1/v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(["What is 2 + 2?"] * 20, folder, vocab_size=280)
    create_tiny_model(folder, folder)
    return folder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound evaluation of an agent without tools."""
    for variable in ("GRM_BASE_URL", "GRM_API_KEY", "AFM_MODEL_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    known = {"ground_truth": "1", "data_source": "gsm8k"}
    write_tasks([Task(id=f"q{n}", question=f"What is {n}?", **known) for n in range(4)], "tasks.jsonl")
    agent = "name: short\nroles: {answer: {kind: answer}}\ntransitions: {start: [answer]}\nlimits: {max_response_tokens: 90}\n"
    Path("agent.yaml").write_text(agent, encoding="utf-8")
    config = Path("eval.yaml")
    config.write_text(
        "name: mine\ndata: tasks.jsonl\nagent: agent.yaml\nrounds: 2\noutput_dir: out\n", encoding="utf-8"
    )
    return config


def of(findings: list[Finding], level: Level) -> dict[str, str]:
    return {one.subject: one.text for one in findings if one.level is level}


def test_a_sound_evaluation_is_described_and_nothing_is_written(base: Path, model: Path) -> None:
    findings = diagnose(base, [f"model={model}"])
    assert {one.level for one in findings} == {Level.OK}
    told = of(findings, Level.OK)
    assert told["data"].startswith("4 questions x 2 rounds = 8 episodes, sha256 ")
    assert told["rewards"] == "judged by math (4); formula correct * format"
    assert "configuration, weights and tokenizer" in told["model"]
    assert told["context"].startswith("an episode has up to 90 tokens after its prompt, the model ")
    assert not Path("out").exists()


def test_without_a_model_all_the_rest_is_looked_at(base: Path) -> None:
    findings = diagnose(base, [])
    assert of(findings, Level.ERROR) == {"model": "none is given; say model=DIR or model=http://HOST:PORT"}
    assert {"data", "rewards", "agent"} <= of(findings, Level.OK).keys()


def test_what_a_model_folder_lacks_is_named(base: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text("{}")
    told = of(diagnose(base, [f"model={tmp_path}/half"]), Level.ERROR)["model"]
    assert told.endswith(
        "without weights (*.safetensors or pytorch_model*.bin), tokenizer (tokenizer.json); copy the whole model"
    )
    assert "no such folder; train one" in of(diagnose(base, ["model=nowhere"]), Level.ERROR)["model"]


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server that lists two models, one with 64 positions."""
    app = FastAPI()
    app.get("/{path:path}")(lambda: {"data": [{"id": "small", "max_model_len": 64}, {"id": "other"}]})
    server = LoopbackServer(app).start()
    yield server.origin
    server.stop()


def test_an_endpoint_is_asked_what_it_serves(base: Path, model: Path, endpoint: str) -> None:
    words = [f"model={endpoint}", f"model.tokenizer={model}"]
    assert "serves other, small; choose with" in of(diagnose(base, words), Level.ERROR)["model"]
    assert "serves no 'smal'" in of(diagnose(base, [*words, "model.name=smal"]), Level.ERROR)["model"]
    found = diagnose(base, [*words, "model.name=small"])
    assert of(found, Level.OK)["model"] == f"small answers at {endpoint}"
    assert "up to 90 tokens after its prompt, the model 64 in all" in of(found, Level.WARNING)["context"]
    bare = of(diagnose(base, [words[0], "model.name=small"]), Level.ERROR)["model"]
    assert bare == "a server needs its tokenizer here; give model.tokenizer=DIR"
    silent = of(diagnose(base, ["model=http://127.0.0.1:1", words[1]]), Level.ERROR)["model"]
    assert "cannot be asked for its models" in silent


def test_every_tool_that_the_agent_calls_must_be_configured_and_there(base: Path, model: Path) -> None:
    agent = f"agent={ROOT}/afm/agents/web.yaml"
    lacking = of(diagnose(base, [f"model={model}", agent]), Level.ERROR)["tools"]
    assert lacking.startswith("agent 'web' calls crawl_page, web_search; `tools` has none")
    silent = [f"model={model}", agent, f"tools={ROOT}/configs/tools/search.yaml"]
    assert "no server answers at" in of(diagnose(base, silent), Level.WARNING)["tools"]


def test_a_judge_that_is_asked_for_must_answer(base: Path, model: Path, endpoint: str) -> None:
    judged = [f"model={model}", "rewards={by_source: {gsm8k: judge}}"]
    assert "exact match stands in" in of(diagnose(base, judged), Level.WARNING)["judge"]
    strict = [*judged, "rewards.judge.without_endpoint=abstain"]
    assert (
        "no answer would have a score; set GRM_BASE_URL" in of(diagnose(base, strict), Level.ERROR)["judge"]
    )
    dead = [*judged, f"rewards.judge.url={NOBODY}"]
    assert f"nobody answers at {NOBODY}" in of(diagnose(base, dead), Level.ERROR)["judge"]
    alive = diagnose(base, [*judged, f"rewards.judge.url={endpoint}/v1"])
    assert "export GRM_API_KEY" in of(alive, Level.WARNING)["judge"]
    assert "judge" not in of(alive, Level.ERROR)


def test_judges_that_choose_and_judge_again_are_looked_at(
    base: Path, model: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECOND_KEY", "k")
    chosen = [f"model={model}", "best_of.sizes=[2]", "rounds=4"]
    warned = of(diagnose(base, [*chosen, "agreement.repeats=2"]), Level.WARNING)
    assert warned["best_of"].startswith("left out: best-of-2 needs a judge: set GRM_BASE_URL")
    assert warned["agreement"].startswith("left out: agreement needs a judge: set GRM_BASE_URL")
    few = of(diagnose(base, [f"model={model}", "best_of.sizes=[3]", "rounds=2"]), Level.WARNING)
    assert few["best_of"] == "left out: best-of-3 needs 3 rounds, has 2"

    dead = of(diagnose(base, [*chosen, f"best_of.judge.url={NOBODY}"]), Level.ERROR)
    assert f"nobody answers at {NOBODY}" in dead["best_of"]
    told = "best_of.judge={url: URL, model: big, key_variable: SECOND_KEY}".replace("URL", f"{endpoint}/v1")
    again = f"agreement.judges=[{{url: {endpoint}/v1, control: false}}]"
    alive = diagnose(base, [*chosen, told, again])
    # 4 questions in 2 groups of 2 rounds; 16 episodes judged again.
    assert of(alive, Level.OK)["best_of"] == f"big at {endpoint}/v1, at most 8 calls"
    assert (
        "at most 16 calls, asked without a key; export GRM_API_KEY" in of(alive, Level.WARNING)["agreement"]
    )
    assert not of(alive, Level.ERROR)


@pytest.mark.parametrize(
    ("subject", "word", "told"),
    [
        ("prices", "prices={prompt: 1, completion: 2, tools: {search: 1}}", "the agent calls no such tool"),
        ("rewards", "data_source=gsm9k", "did you mean 'gsm8k'?"),
    ],
)
def test_what_would_end_the_run_is_named(base: Path, model: Path, subject: str, word: str, told: str) -> None:
    Path("tasks.jsonl").write_text('{"id": "a", "question": "q", "answer": "1"}\n')
    assert told in of(diagnose(base, [f"model={model}", word]), Level.ERROR)[subject]


def test_data_that_is_no_longer_what_it_was_is_told(base: Path, model: Path) -> None:
    Path("tasks.manifest.json").write_text(json.dumps({"counts": {"rows": 5}}))
    told = of(diagnose(base, [f"model={model}"]), Level.ERROR)["data"]
    assert told == "tasks.jsonl: 4 rows, 5 by its manifest; prepare the data again"
    Path("tasks.manifest.json").unlink()
    folder = Path("hub/nq")
    folder.mkdir(parents=True)
    whole = Path("tasks.jsonl").read_bytes()
    (folder / "t.jsonl").write_bytes(whole)
    locked = LockedFile(name="t.jsonl", size=len(whole), checksum=hashlib.sha256(whole).hexdigest())
    pinned = LockedSet(
        repository="a/b", kind="dataset", revision=None, patterns=("*",), commit="0" * 40, files=(locked,)
    )
    Lock(sets={"nq": pinned}).write(Path("hub/download.lock.json"))
    words = [f"model={model}", "data=hub/nq/t.jsonl"]
    assert "as " in of(diagnose(base, words), Level.OK)["data"]
    (folder / "t.jsonl").write_bytes(whole.replace(b"What is 3", b"What is 4"))
    assert "download it again" in of(diagnose(base, words), Level.ERROR)["data"]


def test_fewer_questions_than_published_cannot_be_compared(base: Path, model: Path) -> None:
    told = of(diagnose(base, [f"model={model}", "benchmark=aime24"]), Level.WARNING)["data"]
    assert told == "4 questions where 30 were published, so scores cannot be compared"


def test_an_earlier_run_goes_on_or_is_in_the_way(base: Path, model: Path) -> None:
    words = [f"model={model}"]
    config = load_config(base, words)
    Path("out").mkdir()
    conditions = Conditions(SamplingParams(90), rounds=2, sources=sources_of(config))
    claim(Path("out"), make_manifest(load_tasks(config), load_agent("agent.yaml"), str(model), conditions))
    Path("out/episodes.jsonl").write_text("{}\n{}\n{}\n")
    assert (
        of(diagnose(base, words), Level.OK)["output"] == "out holds 3 episodes of this run, which is resumed"
    )
    told = of(diagnose(base, [*words, "seed=1", "sampling.temperature=0.5"]), Level.ERROR)["output"]
    assert (
        "other settings (sampling.temperature: 1.0 -> 0.5, seed: 0 -> 1); choose another output_dir" in told
    )


def test_the_command_has_an_exit_status_and_json(base: Path, model: Path) -> None:
    fine = CliRunner().invoke(app, ["doctor", str(base), f"model={model}", "--json"])
    assert (fine.exit_code, json.loads(fine.stdout)["ok"]) == (0, True)
    broken = CliRunner().invoke(app, ["doctor", str(base), "--json"])
    told = json.loads(broken.stdout)
    assert (broken.exit_code, told["ok"], told["checked"]) == (1, False, str(base))
    assert told["findings"][0] == {
        "status": "fail",
        "subject": "model",
        "why": "none is given",
        "next_step": "say model=DIR or model=http://HOST:PORT",
    }


@pytest.mark.parametrize("name", ["gaia", "nq", "math500", "web", "qa", "unseen_tools_web"])
def test_shipped_settings_are_known_to_the_doctor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    findings = diagnose(ROOT / f"configs/eval/{name}.yaml", ["output_dir=out", "data=none.jsonl"])
    assert of(findings, Level.ERROR).keys() == {"model", "data"}
    assert "agent" in of(findings, Level.OK)
