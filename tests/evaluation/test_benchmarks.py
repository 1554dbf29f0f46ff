"""Every benchmark of the published evaluation: settings, data, and real files through `afm eval`."""

import importlib.util
import json
from itertools import combinations
from pathlib import Path

import oracle
import pytest
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.main import app
from afm.datasets.hub_sets import read_hub_sets
from afm.errors import DataError
from afm.evaluation.benchmarks import BENCHMARKS
from afm.evaluation.benchmarks import QUESTIONS as QUESTIONS_SETTINGS
from afm.evaluation.config import load_config
from afm.evaluation.job import load_tasks
from afm.models.tiny import train_tokenizer
from afm.rewards.registry import BY_SOURCE, scorer_name
from afm.trajectory.io import load_records

ROOT = Path(__file__).resolve().parents[2]
TOTALS = {22328: ("nq", "triviaqa", "hotpotqa"), 29385: ("2wikimultihopqa", "musique", "bamboogle", "popqa")}
"""The two totals of AFM's question-answering evaluation, and the benchmarks whose sizes add up to them."""

WEB = (1.0, 0.9, 20, 4096, 32768, 36, 5, 30)
QUESTIONS = (0.0, 1.0, 0, None, 8192, 8, 1, None)
AVERAGED = (0.8, 1.0, 0, None, 32768, 12, 16, None)
ONCE = (0.8, 1.0, 0, None, 32768, 12, 1, None)
PUBLISHED = {
    "gaia": (103, "judge", WEB),
    "webwalker": (680, "judge", WEB),
    "browsecomp": (1266, "judge", WEB),
    "hle": (500, "judge", WEB),
    "nq": (3610, "exact_match", QUESTIONS),
    "triviaqa": (11313, "exact_match", QUESTIONS),
    "hotpotqa": (7405, "exact_match", QUESTIONS),
    "2wikimultihopqa": (12576, "exact_match", QUESTIONS),
    "musique": (2417, "exact_match", QUESTIONS),
    "bamboogle": (125, "exact_match", QUESTIONS),
    "popqa": (14267, "exact_match", QUESTIONS),
    "aime24": (30, "math", AVERAGED),
    "aime25": (30, "math", AVERAGED),
    "amc23": (40, "math", AVERAGED),
    "math500": (500, "math", ONCE),
    "olympiadbench": (675, "math", ONCE),
    "livecodebench_v4": (100, "code_tests", ONCE),
    "livecodebench_v5": (167, "code_tests", ONCE),
    "codecontests": (165, "code_tests", ONCE),
}
"""Section 6 of the reference: questions, what judges, then temperature, top-p, top-k, new tokens of a turn, tokens of an
episode, tool calls, rounds, episodes in flight."""

REAL = {
    "webwalker": "data/qa/webwalker_main.json",
    "nq": "data/qa/nq_full.jsonl",
    "aime24": "data/code_math/aime24.parquet",
    "aime25": "data/code_math/aime25.parquet",
    "amc23": "data/code_math/amc23.parquet",
    "math500": "data/code_math/math500.parquet",
    "livecodebench_v4": "data/code_math/livecodebench_v4.parquet",
}


@pytest.fixture(autouse=True)
def no_endpoints(monkeypatch):
    """Judges fall back to exact match unless a test says otherwise."""
    for name in ("GRM_BASE_URL", "GRM_API_KEY", "GRM_MODEL_NAME", "AFM_MODEL_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model that answers by rules; its tokenizer loads in no time, which a real one does not."""
    folder = tmp_path_factory.mktemp("tokenizer")
    specs = map(load_agent, ("web", "mhqa", "math", "code"))
    train_tokenizer([spec.user_message("Who?") for spec in specs], folder, vocab_size=1500)
    made = oracle.OracleServer(folder).start()
    made.words = [f"model={made.url}", "model.name=oracle", f"model.tokenizer={folder}"]
    yield made
    made.stop()


def evaluated(name, server, data, out, *more, reply=None, folder="configs/eval"):
    """Metrics and records of one run of the command."""
    path, words = ROOT / f"{folder}/{name}.yaml", [*server.words, f"data={data}", f"output_dir={out}", *more]
    config = load_config(path, words)
    spec = config.routes().first.declared
    server.learn(spec, load_tasks(config), reply or oracle.right(spec))
    done = CliRunner().invoke(app, ["eval", str(path), *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads((out / "metrics.json").read_text()), load_records(out / "episodes.jsonl")


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name) -> None:
    config = load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"])
    limits = config.routes().first.limits
    questions, judge, settings = PUBLISHED[name]
    temperature, top_p, top_k, turn, response, turns, rounds, parallel = settings
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (temperature, top_p, top_k)
    assert (limits.max_turn_tokens, limits.max_response_tokens, limits.max_turns) == (turn, response, turns)
    assert (config.sampling.max_new_tokens, config.rounds) == (turn, rounds)
    assert parallel is None or config.parallel == parallel
    assert (config.benchmark, BENCHMARKS[name].questions) == (name, questions)
    assert scorer_name(config.data_source, BY_SOURCE) == judge


def test_no_other_group_of_question_sets_gives_the_published_totals() -> None:
    sizes = {name: one.questions for name, one in BENCHMARKS.items() if one.settings is QUESTIONS_SETTINGS}
    groups = [group for k in range(1, len(sizes) + 1) for group in combinations(sizes, k)]
    found = {total: [g for g in groups if sum(sizes[name] for name in g) == total] for total in TOTALS}
    assert found == {total: [group] for total, group in TOTALS.items()}


def test_a_set_of_another_size_is_a_departure() -> None:
    """The split of TriviaQA that was prepared once has 17,944 questions."""
    settings = {
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "limits": {"max_turn_tokens": None, "max_response_tokens": 8192, "max_turns": 8},
        "rounds": 1,
        "data": {"tasks": 17944},
        "agent": {},
        "reward": {"formula": "correct"},
        "prompt": {"mode": "row"},
    }
    assert [*BENCHMARKS["triviaqa"].departures(settings)] == ["questions: 17944, published 11313"]
    graded = settings | {"reward": {"formula": "correct * format"}}
    assert "score: correct * format, published correct" in BENCHMARKS["triviaqa"].departures(graded)


def test_every_published_benchmark_has_its_settings_and_a_cpu_twin() -> None:
    unseen = {"unseen_tools_web", "unseen_tools_code"}
    shared = {"web", "qa", "math", "code", "t_eval", "hallucination"} | unseen
    for folder, extra in (
        ("configs/eval", shared),
        ("configs/tiny/eval", {"math_world", "mhqa_world", "t_eval", "hallucination"} | unseen),
    ):
        assert {path.stem for path in (ROOT / folder).glob("*.yaml")} - extra == set(PUBLISHED)
    assert set(BENCHMARKS) == set(PUBLISHED)
    for name in PUBLISHED:
        whole, twin = (
            load_config(ROOT / f"{folder}/{name}.yaml", ["model=m"])
            for folder in ("configs/eval", "configs/tiny/eval")
        )
        same = [
            (one.data, one.reader, one.rewards, one.routes().first.declared.name) for one in (whole, twin)
        ]
        assert same[0] == same[1]
        assert twin.limit is not None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(
            (
                name,
                (
                    f"afm data download benchmarks --output-dir data/{agent}_agent/raw --only {name}",
                    f"--data data/{agent}_agent/raw --output-dir data/{agent}_agent/eval --only {name}",
                ),
            )
            for name, agent in (("webwalker", "web"), ("hotpotqa", "mhqa"), ("codecontests", "code"))
        ),
        ("browsecomp", ("--only browsecomp\nor name a file",)),
        *(
            (
                name,
                (
                    f"Fetch it from AFM, which asks {count} of its questions",
                    "afm data download web_agent --output-dir data/web_agent/raw --only benchmarks\n",
                    "web_agent --data data/web_agent/raw --output-dir data/web_agent --only benchmarks\n",
                ),
            )
            for name, count in (("gaia", 103), ("hle", 500))
        ),
    ],
)
def test_absent_data_is_an_error_that_names_the_commands(name, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_tasks(load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"]))
    assert [text for text in says if text not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["gaia", "hle"])
def test_afms_choice_of_questions_is_prepared_to_where_the_settings_read_it(name) -> None:
    config = load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"])
    steps = read_hub_sets(ROOT / "configs/data/web_agent.yaml").sets["benchmarks"].prepare
    (step,) = (step for step in steps if step.name == f"eval/{name}")
    assert (config.data[0], step.reader) == (Path(f"data/web_agent/eval/{name}.jsonl"), config.reader)


def test_what_the_commands_prepare_is_what_the_settings_read() -> None:
    sets = read_hub_sets(ROOT / "configs/data/benchmarks.yaml").sets
    for name, one in BENCHMARKS.items():
        config = load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"])
        steps = sets[name].prepare
        assert bool(steps) == one.prepared
        if one.prepared:
            assert [step.name or name for step in steps] == [config.data[0].stem]
            assert {step.reader for step in steps} == {config.reader}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["webwalker", "nq", "aime24", "math500", "livecodebench_v4"])
def test_an_oracle_is_right_in_every_round_and_silence_in_none(name, tmp_path, shared, server) -> None:
    data = shared(REAL[name])
    rounds = PUBLISHED[name][2][6]
    more = ("limit=3", "rounds=2") if rounds > 2 else ("limit=6",)
    check_both_ends(name, tmp_path, server, data, *more)


@pytest.mark.proof
@pytest.mark.sandbox
@pytest.mark.parametrize("name", REAL)
def test_the_whole_file_in_all_published_rounds(name, tmp_path, shared, server) -> None:
    data = shared(REAL[name])
    records, manifest = check_both_ends(name, tmp_path, server, data)
    assert len(records) == PUBLISHED[name][0] * PUBLISHED[name][2][6]
    told = {word.partition(":")[0] for word in manifest["sources"]["benchmark"]["departures"]}
    assert told == known_departures(name)


def check_both_ends(name, tmp_path, server, data, *more):
    metrics, records = evaluated(name, server, data, tmp_path / "right", *more)
    rounds = {record.provenance["round"] for record in records}
    assert len(rounds) == metrics["rounds"]
    assert {record.verdict.score for record in records} == {1.0}
    assert (metrics["pass_at_1"]["value"], metrics["format_valid"]) == (1.0, 1.0)
    assert server.unknown == 0
    nothing, rows = evaluated(name, server, data, tmp_path / "silent", *more, reply=oracle.silent)
    assert (nothing["pass_at_1"]["value"], nothing["scored"]) == (0.0, metrics["episodes"])
    assert {record.verdict.score for record in rows} == {0.0}
    manifest = json.loads((tmp_path / "right/manifest.json").read_text())
    check_manifest(name, manifest, server.asked)
    return records, manifest


def check_manifest(name, manifest, asked):
    """The published settings stand in the manifest, and the model's server was asked with them."""
    questions, _, settings = PUBLISHED[name]
    temperature, top_p, top_k, turn, response, turns, rounds, parallel = settings
    sampling, limits = manifest["settings"]["sampling"], manifest["settings"]["limits"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (temperature, top_p, top_k)
    keys = ("max_turn_tokens", "max_response_tokens", "max_turns")
    assert [limits[key] for key in keys] == [turn, response, turns]
    assert {(body["temperature"], body["top_p"], max(0, body["top_k"])) for body in asked} == {
        (temperature, top_p, top_k)
    }
    assert max(body["max_tokens"] for body in asked) == (turn or response)
    assert parallel is None or manifest["sources"]["parallel"] == parallel
    published = manifest["sources"]["benchmark"]["published"]
    assert (published.get("questions"), published["rounds"]) == (questions, rounds)
    cut = manifest["settings"]["data"]["tasks"] != questions
    changed = {word.partition(":")[0] for word in manifest["sources"]["benchmark"]["departures"]}
    wanted = {"questions": cut, "rounds": manifest["settings"]["rounds"] != rounds}
    assert changed == {word for word, is_another in wanted.items() if is_another} | known_departures(name)


def known_departures(name):
    """What differs from the published run by default: the script of the web agent, and tests that a row does not hold."""
    if PUBLISHED[name][2] is WEB:
        script = {"suggested answers", "full context", "steps", "repeats", "attempts"}
        return script | {"prompt", "judge's text"}
    return {"prompt", "tests"} if name.startswith("livecodebench") else {"prompt"}


@pytest.fixture
def judge(monkeypatch):
    """The judge server of the tests of rewards, which compares words."""
    path = ROOT / "tests/rewards/conftest.py"
    spec = importlib.util.spec_from_file_location("judge_of_the_tests", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    made = loaded.JudgeServer().start()
    monkeypatch.setenv("GRM_BASE_URL", made.url)
    monkeypatch.setenv("GRM_MODEL_NAME", "test-judge")
    yield made
    made.stop()


@pytest.mark.sandbox
def test_answers_in_other_words_go_to_the_judge(tmp_path, shared, server, judge) -> None:
    """The judge accepts the same words in another order, which exact match does not."""
    more = ("limit=2", "rounds=2")

    def turned(task):
        words = " ".join(reversed(task.ground_truth.split()))
        return oracle.right(spec)(task.model_copy(update={"ground_truth": words}))

    data = shared(REAL["webwalker"])
    spec = load_config(ROOT / "configs/eval/webwalker.yaml", ["model=m"]).routes().first.declared
    metrics, _ = evaluated("webwalker", server, data, tmp_path / "a", *more, reply=turned)
    assert (metrics["pass_at_1"]["value"], metrics["scored"]) == (1.0, 4)
    assert judge.requests
    asked = len(judge.requests)
    metrics, _ = evaluated("webwalker", server, data, tmp_path / "b", *more, reply=oracle.silent)
    assert (metrics["pass_at_1"]["value"], metrics["scored"]) == (0.0, 4)
    assert len(judge.requests) == asked


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["nq", "livecodebench_v4"])
def test_a_cpu_twin_runs_the_same_path(name, tmp_path, shared, server) -> None:
    data = shared(REAL[name])
    more = ("limit=2", "limits.max_response_tokens=2000")
    metrics, _ = evaluated(name, server, data, tmp_path / "out", *more, folder="configs/tiny/eval")
    assert (metrics["episodes"], metrics["pass_at_1"]["value"]) == (4, 1.0)
