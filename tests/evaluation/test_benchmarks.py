import json
from itertools import combinations
from pathlib import Path

import oracle
import pytest
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.commands import app
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


def settings_of(sampling, limits, rounds):
    """A row of `PUBLISHED`, but for the episodes in flight."""
    drawn = [sampling[key] for key in ("temperature", "top_p", "top_k")]
    return (*drawn, *(limits[f"max_{key}"] for key in ("turn_tokens", "response_tokens", "turns")), rounds)


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name) -> None:
    config = load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"])
    limits = config.routes().first.limits
    questions, judge, (*settings, parallel) = PUBLISHED[name]
    assert settings_of(vars(config.sampling), vars(limits), config.rounds) == tuple(settings)
    assert config.sampling.max_new_tokens == limits.max_turn_tokens
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
    assert [*BENCHMARKS["triviaqa"].departures(settings)] == ["questions: 17944 here, 11313 published"]
    graded = settings | {"reward": {"formula": "correct * format"}}
    assert "score: correct * format here, correct published" in BENCHMARKS["triviaqa"].departures(graded)


def test_every_published_benchmark_has_its_settings_and_a_cpu_twin() -> None:
    both = {"t_eval", "hallucination", "unseen_tools_web", "unseen_tools_code"}
    extra = {"eval": both | {"web", "qa", "math", "code"}, "tiny/eval": both | {"math_world", "mhqa_world"}}
    names = {*PUBLISHED, "svamp", "gsm8k"}
    for folder, others in extra.items():
        assert {path.stem for path in (ROOT / "configs" / folder).glob("*.yaml")} - others == names
    assert set(BENCHMARKS) == names
    for name in names:
        whole, twin = (load_config(ROOT / f"configs/{folder}/{name}.yaml", ["model=m"]) for folder in extra)
        for part in ("data", "reader", "rewards"):
            assert getattr(whole, part) == getattr(twin, part), name
        assert whole.routes().first.declared.name == twin.routes().first.declared.name
        assert twin.limit is not None


DOWNLOADED = (
    "afm data download benchmarks --output-dir {folder}/raw --only {name}",
    "--data {folder}/raw --output-dir {folder}/eval --only {name}",
)
FROM_AFM = (
    "afm data download web_agent --output-dir {folder}/raw --only benchmarks\n",
    "web_agent --data {folder}/raw --output-dir {folder} --only benchmarks\n",
)


@pytest.mark.parametrize(
    ("name", "agent", "says"),
    [
        *((name, agent, DOWNLOADED) for name, agent in (("webwalker", "web"), ("hotpotqa", "mhqa"))),
        ("codecontests", "code", DOWNLOADED),
        ("browsecomp", "web", ("--only browsecomp\nor name a file",)),
        ("gaia", "web", ("Fetch it from AFM, which asks 103 of its questions", *FROM_AFM)),
        ("hle", "web", ("Fetch it from AFM, which asks 500 of its questions", *FROM_AFM)),
    ],
)
def test_absent_data_is_an_error_that_names_the_commands(name, agent, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_tasks(load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"]))
    wanted = [text.format(name=name, folder=f"data/{agent}_agent") for text in says]
    assert [text for text in wanted if text not in str(caught.value)] == []


def test_what_the_commands_prepare_is_what_the_settings_read() -> None:
    def readers(name):
        config = load_config(ROOT / f"configs/eval/{name}.yaml", ["model=m"])
        return config.data[0], config.reader

    def own_steps(name):
        steps = read_hub_sets(ROOT / f"configs/data/{name}.yaml").sets[name].prepare
        return [step.model_copy(update={"name": name}) for step in steps if step.name == f"eval/{name}"]

    sets = read_hub_sets(ROOT / "configs/data/benchmarks.yaml").sets
    for name, benchmark in BENCHMARKS.items():
        steps = sets[name].prepare if not benchmark.own_list else own_steps(name)
        assert bool(steps) == benchmark.prepared
        if benchmark.prepared:
            file, reader = readers(name)
            assert [step.name or name for step in steps] == [file.stem]
            assert {step.reader for step in steps} == {reader}
    choice = {
        step.name: step
        for step in read_hub_sets(ROOT / "configs/data/web_agent.yaml").sets["benchmarks"].prepare
    }
    for name in ("gaia", "hle"):
        step = choice[f"eval/{name}"]
        assert readers(name) == (Path(f"data/web_agent/eval/{name}.jsonl"), step.reader)


@pytest.mark.slow
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
    assert departures(manifest) == known_departures(name)


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
    questions, _, (*settings, rounds, parallel) = PUBLISHED[name]
    temperature, top_p, top_k, turn, response, _ = settings
    held, sources = manifest["settings"], manifest["sources"]
    played = settings_of(held["sampling"], held["limits"], held["rounds"])
    assert played[:-1] == tuple(settings)
    requests = {(body["temperature"], body["top_p"], max(0, body["top_k"])) for body in asked}
    assert requests == {(temperature, top_p, top_k)}
    assert max(body["max_tokens"] for body in asked) == (turn or response)
    assert parallel is None or sources["parallel"] == parallel
    published = sources["benchmark"]["published"]
    assert (published.get("questions"), published["rounds"]) == (questions, rounds)
    wanted = {"questions": held["data"]["tasks"] != questions, "rounds": held["rounds"] != rounds}
    assert departures(manifest) == {word for word, differs in wanted.items() if differs} | known_departures(
        name
    )


def departures(manifest):
    return {text.partition(":")[0] for text in manifest["sources"]["benchmark"]["departures"]}


def known_departures(name):
    """What differs from the published run by default: the script of the web agent, and tests that a row does not hold."""
    if PUBLISHED[name][2] is WEB:
        script = {"suggested answers", "full context", "steps", "repeats", "attempts"}
        return script | {"prompt", "judge's text"}
    return {"prompt", "tests"} if name.startswith("livecodebench") else {"prompt"}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["nq", "livecodebench_v4"])
def test_a_cpu_twin_runs_the_same_path(name, tmp_path, shared, server) -> None:
    data = shared(REAL[name])
    more = ("limit=2", "limits.max_response_tokens=2000")
    metrics, _ = evaluated(name, server, data, tmp_path / "out", *more, folder="configs/tiny/eval")
    assert (metrics["episodes"], metrics["pass_at_1"]["value"]) == (4, 1.0)
