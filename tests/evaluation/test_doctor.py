import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from loopback import LoopbackServer
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.commands import app
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
    Path("eval.yaml").write_text(
        "name: mine\ndata: tasks.jsonl\nagent: agent.yaml\nrounds: 2\noutput_dir: out\n"
    )
    return Path("eval.yaml")


class Doctor:
    def __init__(self, base: Path, model: Path) -> None:
        self.diagnose = lambda words: diagnose(base, [f"model={model}", *words])

    def errors(self, *words: str) -> dict[str, str]:
        return of(self.diagnose(words), Level.ERROR)

    def warnings(self, *words: str) -> dict[str, str]:
        return of(self.diagnose(words), Level.WARNING)

    def fine(self, *words: str) -> dict[str, str]:
        return of(self.diagnose(words), Level.OK)


@pytest.fixture
def doctor(base: Path, model: Path) -> Doctor:
    return Doctor(base, model)


def of(findings: list[Finding], level: Level) -> dict[str, str]:
    return {one.subject: one.text for one in findings if one.level is level}


def test_a_sound_evaluation_is_described_and_nothing_is_written(base: Path, model: Path) -> None:
    findings = diagnose(base, [f"model={model}"])
    assert {one.level for one in findings} == {Level.OK}
    sound = of(findings, Level.OK)
    assert sound["data"].startswith("4 questions x 2 rounds = 8 episodes, sha256 ")
    assert sound["rewards"] == "judged by math (4); formula correct * format"
    assert "configuration, weights and tokenizer" in sound["model"]
    assert sound["context"].startswith("an episode has up to 90 tokens after its prompt, the model ")
    assert not Path("out").exists()


def test_without_a_model_all_the_rest_is_looked_at(base: Path) -> None:
    findings = diagnose(base, [])
    assert of(findings, Level.ERROR) == {"model": "missing; set model=DIR or model=http://HOST:PORT"}
    assert {"data", "rewards", "agent"} <= of(findings, Level.OK).keys()


def test_what_a_model_folder_lacks_is_named(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text("{}")
    error = doctor.errors(f"model={tmp_path}/half")["model"]
    weights = "weights (*.safetensors or pytorch_model*.bin)"
    tokenizer = "tokenizer (tokenizer.json or tokenizer.model or vocab.json)"
    assert error.endswith(f"lacks {weights}, {tokenizer}; copy the whole model")
    assert "no such folder; train a model" in doctor.errors("model=nowhere")["model"]


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server that lists two models, one with 64 positions."""
    app = FastAPI()
    app.get("/{path:path}")(lambda: {"data": [{"id": "small", "max_model_len": 64}, {"id": "other"}]})
    server = LoopbackServer(app).start()
    yield server.origin
    server.stop()


def test_an_endpoint_is_asked_what_it_serves(doctor: Doctor, model: Path, endpoint: str) -> None:
    words = f"model={endpoint}", f"model.tokenizer={model}"
    assert "serves other, small; choose with" in doctor.errors(*words)["model"]
    assert "serves no 'smal'" in doctor.errors(*words, "model.name=smal")["model"]
    assert doctor.fine(*words, "model.name=small")["model"] == f"small answers at {endpoint}"
    assert (
        "up to 90 tokens after its prompt, the model 64 in total"
        in doctor.warnings(*words, "model.name=small")["context"]
    )
    bare = doctor.errors(words[0], "model.name=small")["model"]
    assert bare == "a server needs its tokenizer on this machine; set model.tokenizer=DIR"
    assert "did not list its models" in doctor.errors("model=http://127.0.0.1:1", words[1])["model"]


def test_every_tool_that_the_agent_calls_must_be_configured_and_there(doctor: Doctor) -> None:
    agent = f"agent={ROOT}/afm/agents/web.yaml"
    lacking = doctor.errors(agent)["tools"]
    assert lacking.startswith("agent 'web' calls crawl_page, web_search, but `tools` has none")
    assert (
        "no server answers at" in doctor.warnings(agent, f"tools={ROOT}/configs/tools/search.yaml")["tools"]
    )


def test_a_judge_that_is_asked_for_must_answer(doctor: Doctor, endpoint: str) -> None:
    judged = "rewards={by_source: {gsm8k: judge}}"
    assert "exact match is used" in doctor.warnings(judged)["judge"]
    strict = doctor.errors(judged, "rewards.judge.without_endpoint=abstain")["judge"]
    assert "no answer would get a score; set GRM_BASE_URL" in strict
    assert f"no answer from {NOBODY}" in doctor.errors(judged, f"rewards.judge.url={NOBODY}")["judge"]
    alive = judged, f"rewards.judge.url={endpoint}/v1"
    assert "export GRM_API_KEY" in doctor.warnings(*alive)["judge"]
    assert "judge" not in doctor.errors(*alive)


def test_judges_that_choose_and_judge_again_are_looked_at(
    doctor: Doctor, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECOND_KEY", "k")
    chosen = "best_of.sizes=[2]", "rounds=4"
    warned = doctor.warnings(*chosen, "agreement.repeats=2")
    for subject, what in (("best_of", "best-of-2"), ("agreement", "agreement")):
        assert warned[subject].startswith(f"skipped: {what} needs a judge: set GRM_BASE_URL")
    few = doctor.warnings("best_of.sizes=[3]", "rounds=2")["best_of"]
    assert few == "skipped: best-of-3 needs 3 rounds, has 2"
    assert f"no answer from {NOBODY}" in doctor.errors(*chosen, f"best_of.judge.url={NOBODY}")["best_of"]
    second = "best_of.judge={url: URL, model: big, key_variable: SECOND_KEY}".replace("URL", f"{endpoint}/v1")
    alive = *chosen, second, f"agreement.judges=[{{url: {endpoint}/v1, control: false}}]"
    # 4 questions in 2 groups of 2 rounds; 16 episodes judged again.
    assert doctor.fine(*alive)["best_of"] == f"big at {endpoint}/v1, at most 8 calls"
    keyless = "at most 16 calls, asked without a key; export GRM_API_KEY"
    assert keyless in doctor.warnings(*alive)["agreement"]
    assert not doctor.errors(*alive)


def test_what_would_end_the_run_is_named(doctor: Doctor) -> None:
    Path("tasks.jsonl").write_text('{"id": "a", "question": "q", "answer": "1"}\n')
    prices = "prices={prompt: 1, completion: 2, tools: {search: 1}}"
    assert "the agent calls no such tool" in doctor.errors(prices)["prices"]
    assert "did you mean 'gsm8k'?" in doctor.errors("data_source=gsm9k")["rewards"]


def test_data_that_is_no_longer_what_it_was_is_told(doctor: Doctor) -> None:
    Path("tasks.manifest.json").write_text(json.dumps({"counts": {"rows": 5}}))
    assert doctor.errors()["data"] == "tasks.jsonl: 4 rows, but 5 in its manifest; prepare the data again"
    file, whole = Path("hub/nq/t.jsonl"), Path("tasks.jsonl").read_bytes()
    file.parent.mkdir(parents=True)
    file.write_bytes(whole)
    locked = LockedFile(name="t.jsonl", size=len(whole), checksum=hashlib.sha256(whole).hexdigest())
    pinned = LockedSet(
        repository="a/b", kind="dataset", revision=None, patterns=("*",), commit="0" * 40, files=(locked,)
    )
    Lock(sets={"nq": pinned}).write(Path("hub/download.lock.json"))
    assert "matches " in doctor.fine(f"data={file}")["data"]
    file.write_bytes(whole.replace(b"What is 3", b"What is 4"))
    assert "download it again" in doctor.errors(f"data={file}")["data"]


def test_fewer_questions_than_published_cannot_be_compared(doctor: Doctor) -> None:
    warning = doctor.warnings("benchmark=aime24")["data"]
    assert warning == "4 questions here, 30 published, so scores cannot be compared"


def test_an_earlier_run_goes_on_or_is_in_the_way(base: Path, model: Path, doctor: Doctor) -> None:
    config = load_config(base, [f"model={model}"])
    Path("out").mkdir()
    conditions = Conditions(SamplingParams(90), rounds=2, sources=sources_of(config))
    claim(Path("out"), make_manifest(load_tasks(config), load_agent("agent.yaml"), str(model), conditions))
    Path("out/episodes.jsonl").write_text("{}\n{}\n{}\n")
    assert doctor.fine()["output"] == "out holds 3 episodes of this run, which is resumed"
    differs = "other settings (sampling.temperature: 1.0 -> 0.5, seed: 0 -> 1); choose another output_dir"
    assert differs in doctor.errors("seed=1", "sampling.temperature=0.5")["output"]


def test_the_command_has_an_exit_status_and_json(base: Path, model: Path) -> None:
    sound = CliRunner().invoke(app, ["doctor", str(base), f"model={model}", "--json"])
    assert (sound.exit_code, json.loads(sound.stdout)["ok"]) == (0, True)
    broken = CliRunner().invoke(app, ["doctor", str(base), "--json"])
    facts = json.loads(broken.stdout)
    assert (broken.exit_code, facts["ok"], facts["checked"]) == (1, False, str(base))
    step = "set model=DIR or model=http://HOST:PORT"
    finding = {"status": "fail", "subject": "model", "why": "missing", "next_step": step}
    assert facts["findings"][0] == finding


@pytest.mark.parametrize("name", ["gaia", "nq", "math500", "web", "qa", "unseen_tools_web"])
def test_shipped_settings_are_known_to_the_doctor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    findings = diagnose(ROOT / f"configs/eval/{name}.yaml", ["output_dir=out", "data=none.jsonl"])
    assert of(findings, Level.ERROR).keys() == {"model", "data"}
    assert "agent" in of(findings, Level.OK)
