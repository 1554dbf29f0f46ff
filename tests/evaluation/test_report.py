import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.errors import ConfigError, DataError
from afm.evaluation import Conditions, paired_difference, summarise
from afm.evaluation.benchmarks import PublishedScore
from afm.evaluation.compare import short_names
from afm.evaluation.failures import scan
from afm.evaluation.manifest import Sources, make_manifest
from afm.evaluation.report import write_comparison, write_report, write_run_report
from afm.evaluation.report_input import (
    BenchmarkNote,
    Command,
    Fact,
    Pair,
    PublishedFigure,
    ReportInput,
    StageDifference,
    StageResult,
    ViewLinks,
)
from afm.evaluation.wording import (
    difference_words,
    dollars,
    figure,
    headline,
    number,
    percent,
    points,
    rounds_words,
)
from afm.models.base import SamplingParams
from afm.trajectory.io import RecordWriter
from afm.trajectory.record import Verdict
from afm.trajectory.tags import Author, Segment

HOSTILE = (
    "</div></pre><script>alert(1)</script><img src=x onerror=alert(2)><style>*{display:none}</style>"
    '" onmouseover="alert(3)\' <iframe src="http://evil.example"></iframe> {{ 7*7 }} {% raw %} ‮ \x00 \x1b[2J \ud800'
)


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.all_text = " ".join("".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)

    def lacks(self, *texts):
        return [text for text in texts if text not in self.all_text]


@pytest.fixture
def shown(tmp_path):
    """The page of a run's folder."""
    return lambda folder: Page(write_run_report(folder, tmp_path / "page.html"))


@pytest.fixture
def hostile_page(tmp_path, record, solver):
    """A page of which every text is hostile."""
    spec = solver.spec()
    said = f"<plan>{HOSTILE}</plan>{HOSTILE}<code>{HOSTILE}"
    parts = [(Author.AGENT, said), (Author.ENVIRONMENT, HOSTILE)]
    episode = record(
        "x",
        0.0,
        **dict.fromkeys(("question", "ground_truth", "model"), HOSTILE),
        segments=tuple(Segment(Author(author), text) for author, text in parts),
        verdict=Verdict.model_construct(score=0.0, parts={}, evidence=HOSTILE, seconds=0.0),
    )
    figure = PublishedFigure(PublishedScore(HOSTILE, 1.0, HOSTILE, HOSTILE), None, HOSTILE)
    note = BenchmarkNote(HOSTILE, (figure,), (HOSTILE,))
    metrics, file = summarise([record("x", 0.0)]), Path("runs/x/episodes.jsonl")
    run = ReportInput(
        title=HOSTILE,
        spec=spec,
        facts=(Fact(HOSTILE, HOSTILE),),
        stages=(StageResult(HOSTILE, metrics, file, HOSTILE, scan([episode], spec), note),),
        pairs=(Pair(HOSTILE, ((HOSTILE, episode),)),),
        commands=(Command(HOSTILE, HOSTILE),),
        notes=(HOSTILE,),
        links=ViewLinks(Path("runs/x")),
    )
    return write_report(run, tmp_path / "page.html")


def test_hostile_text_is_shown_and_never_run(hostile_page) -> None:
    page = Page(hostile_page)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form", "img"} & set(page.tags)
    assert page.tags.count("style") == 1
    assert not [item for item in page.attributes if item[1].startswith("on")]
    assert page.all_text.count("<script>alert(1)</script>") >= 18
    assert "{{ 7*7 }}" in page.all_text
    for form in (".html", ".md"):  # what would turn text around, or be obeyed by a terminal
        assert not re.search("[\x1b\u202e]", hostile_page.with_suffix(form).read_text("utf-8"))


def test_hostile_text_is_text_in_markdown_and_json(hostile_page) -> None:
    shown = hostile_page.with_suffix(".md").read_text("utf-8")
    assert "<" not in re.sub(r"\\<|\]\(<", "", shown)  # escaped, or the beginning of a link of ours
    assert re.findall(r"\]\(<(.*?>)\)", shown) == ["http://127.0.0.1:8765/#find=x%230&in=episodes.jsonl>"]
    assert not [line for line in shown.splitlines() if re.search(r"(?<!\\)[`~]", line)]
    data = json.loads(hostile_page.with_suffix(".json").read_text("utf-8"))
    assert data["title"] == HOSTILE
    assert data["stages"][0]["failures"][0]["examples"][0]["question"].startswith("</div></pre><script>")


def test_the_page_loads_nothing(shown, run_folder) -> None:
    page = shown(run_folder)
    for tag, name, value in page.attributes:
        if tag == "a" and value.startswith("#"):
            assert ("section", "id", value[1:]) in page.attributes
        elif tag == "a" and name == "href":  # followed by a person, to the viewer on the same machine
            assert value.startswith("http://127.0.0.1:8765/#find="), value
        elif name in {"src", "srcset", "href", "action", "data", "ping", "poster", "background"}:
            assert value.startswith("data:image/png;base64,"), (tag, name, value[:60])
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert ("meta", "content", policy) in page.attributes
    assert not re.search(r"url\(|@import", page.source)
    assert "script" not in page.tags


@pytest.fixture
def run_folder(tmp_path, record, write_run):
    """A run folder as a quickstart leaves it, with hand-made episodes."""
    run = tmp_path / "my run"
    text = "<plan>p</plan>\n<think>t</think>\n<answer>\\boxed{1}</answer>"
    before = [record(f"t{i}", float(i < 4), text=text, calls=int(i < 4)) for i in range(10)]
    after = [record(f"t{i}", float(i < 9), text=text, calls=1) for i in range(10)]
    real = [record("aime-1", 0.0, text="no tags at all", source="aime24")]
    for name, rows in (("eval_sft", before), ("eval_rl", after), ("eval_real", real)):
        write_run(run / name, rows)
    for name in ("world", "sft", "rl"):
        (run / name).mkdir()
    losses = '{"current_steps": 1, "loss": 2.0}\n{"current_steps": 2, "loss": 1.0}\n'
    (run / "sft/trainer_log.jsonl").write_text(losses)
    (run / "rl/metrics.jsonl").write_text('{"step": 1, "reward": 0.4}\n{"step": 2, "reward": 0.6}\n')
    attempts = (
        '{"name": "world", "seconds": 0.5, "note": ""}\n{"name": "world", "seconds": 1.0, "note": "x"}\n'
    )
    (run / "stages.jsonl").write_text(attempts + '{"name": "sf')
    return run


def test_commands_outside_the_environment_begin_by_activating_it(shown, run_folder, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    activate = Path(sys.executable).with_name("activate")
    if not activate.is_file():
        pytest.skip(f"{sys.executable} belongs to no virtual environment")
    start = re.search("<pre>(cd .*)</pre>", shown(run_folder).source)
    command = f"{html.unescape(start[1])} && command -v afm"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).samefile(activate.with_name("afm"))


def test_a_training_run_alone_says_what_to_try(shown, run_folder) -> None:
    def commands(run: Path) -> list[str]:
        page = html.unescape(shown(run).source)
        return re.findall(
            "<pre>(afm .*)</pre>", page.partition("What to try next</h2>")[2].partition("</section>")[0]
        )

    rl = run_folder / "rl"
    assert commands(rl) == []
    (rl / "checkpoints/global_step_2").mkdir(parents=True)
    quoted = f"'{rl}'"
    assert commands(rl) == [f"afm export {quoted}"]

    (rl / "model").mkdir()
    (rl / "model/config.json").write_text("{}")
    (rl / "episodes").mkdir()
    (rl / "episodes/step_000001.jsonl").touch()
    (rl / "rl_config.yaml").write_text("tools: /own/tools.yaml\n")
    talk = f"afm ask --model {quoted} --tools /own/tools.yaml"
    seen = f"afm report '{run_folder / 'eval_rl'}'"
    assert commands(rl) == [f"afm view {quoted}", talk, seen]

    shutil.move(run_folder / "eval_rl", run_folder / "eval_sft_2")
    (run_folder / "eval_sft/config.yaml").write_text("name: x\n")
    again = (
        f"afm eval '{run_folder / 'eval_sft/config.yaml'}' 'model={rl}' 'output_dir={run_folder / 'eval_rl'}'"
    )
    assert commands(rl) == [f"afm view {quoted}", talk, again]


def test_a_run_folder_becomes_a_whole_page(shown, run_folder) -> None:
    page = shown(run_folder)
    assert not page.lacks(
        "pass@1 rose from 40.0 % after SFT to 90.0 % after RL.",
        "On the same 10 questions, pass@1 after RL is 50.0 points higher than after SFT",
        # 2 / 2^5 for five of five: the bootstrap is surer of ten questions than the exact test.
        "5 questions went better and 0 worse: p = 0.062 (exact McNemar test).",
        "The exact test is less certain than the interval",
        "Why fine-tuning left room for improvement",
        "after SFT it called a tool in 40.0 % of the episodes",
        "Loss of fine-tuning",
        "rl/metrics.jsonl holds no series 'entropy'.",
        "Solved after RL, with the tool that was not used after SFT",
        "Not passed, real data",
        "2 s in all: world 2 s",
    )
    assert (page.tags.count("article"), page.tags.count("picture")) == (
        4,
        3,
    )  # two of training, cost against score


@pytest.mark.slow
def test_any_part_of_a_run_may_be_missing(shown, run_folder) -> None:
    for name in ("eval_real", "rl", "eval_rl"):
        shutil.rmtree(run_folder / name)
        page = shown(run_folder)
        assert "after SFT" in page.all_text
    assert "pass@1: 40.0 % after SFT." in page.all_text
    shutil.rmtree(run_folder / "eval_sft")
    assert not shown(run_folder).lacks("Nothing has been scored yet.", "Loss of fine-tuning")
    shutil.rmtree(run_folder / "sft")
    with pytest.raises(DataError, match="holds nothing to report; expected"):
        shown(run_folder)


def test_an_unfinished_evaluation_is_shown_as_one(shown, run_folder) -> None:
    (run_folder / "eval_rl/metrics.json").unlink()
    with (run_folder / "eval_rl/episodes.jsonl").open("a") as file:
        file.write('{"schema_version": 1, "id": "t11#0", "agent')
    said = "The evaluation after RL is not finished. Its figures are from the first 10 episodes."
    assert said in shown(run_folder).all_text


@pytest.mark.slow
async def test_a_single_evaluation_has_a_page_with_settings_and_colours_of_roles(
    tmp_path, solver, shown
) -> None:
    await solver.run(tmp_path / "out", 50, 6, rounds=2)
    page = shown(tmp_path / "out")
    settings = "temperature 1, top-p 1, 2 rounds"
    assert not page.lacks(
        "The math agent, run out", "2 rounds: avg@2", "scripted-50", settings, "2 rounds, temperature 1"
    )
    classes = {value for _, name, value in page.attributes if name == "class"}
    assert {"block c0", "block c1", "block c4"} <= classes
    assert "USD" not in page.source, "without prices no money is shown"
    manifest = tmp_path / "out/manifest.json"
    data = json.loads(manifest.read_text())
    data["settings"]["agent"]["spec"] = {"name": "broken"}
    manifest.write_text(json.dumps(data))
    assert "roles are not coloured" in shown(tmp_path / "out").all_text


def test_a_headline_names_three_of_many_runs(record) -> None:
    metrics = summarise([record("a", 1.0)])
    stages = tuple(StageResult(f"rl_{i}", metrics) for i in range(5))
    three = "pass@1: 100.0 % (rl_0), 100.0 % (rl_1), 100.0 % (rl_2)"
    assert headline(ReportInput("t", stages=stages)) == f"{three} and 2 more."
    assert headline(ReportInput("t", stages=stages[:3])) == f"{three}."


def test_a_difference_that_may_be_chance_is_not_called_one(record) -> None:
    before = [record(f"t{i}", float(i < 5)) for i in range(10)]
    after = [record(f"t{i}", float(i > 3)) for i in range(10)]
    result = paired_difference(before, after)
    difference = StageDifference("x", "y", result)
    stages = (StageResult("x", summarise(before)), StageResult("y", summarise(after)))
    run = ReportInput("t", stages=stages, differences=(difference,))
    assert headline(run) == "pass@1 shows no clear difference: 50.0 % (x), 60.0 % (y)."
    assert difference_words(difference).endswith("includes zero, so the difference is not clear.")
    ends_at_zero = result.difference.model_copy(update={"low": -0.5, "high": 0.0})
    touching = StageDifference("x", "y", result.model_copy(update={"difference": ends_at_zero}))
    assert "The interval includes zero" in difference_words(touching)


def test_figures_in_words() -> None:
    assert [percent(0.875), percent(None)] == ["87.5 %", "–"]
    assert [points(-0.031), points(0.5), points(-0.0001)] == ["−3.1", "+50.0", "0.0"]
    assert [number(1234.5), number(12.34), number(0.456), number(None)] == ["1,234", "12.3", "0.46", "–"]
    assert [number(3e-06), number(-0.00012), figure(0.0, False)] == ["0.000003", "−0.00012", "0"]
    assert [number(-5.2e-09), number(3e-12), number(1e-06)] == ["−5.2e-9", "3e-12", "0.000001"]
    assert [figure(1234.0, False), figure(0.5, False), figure(0.5, True)] == ["1,234", "0.50", "50.0 %"]
    amounts = [dollars(12.345), dollars(0.0123456), dollars(0.00001234), dollars(0)]
    assert amounts == ["12.35 USD", "0.0123 USD", "0.0000123 USD", "0.00 USD"]


def test_rounds_show_a_few_values_of_k(record) -> None:
    metrics = summarise(record("a", float(i == 0), number=i) for i in range(6))
    expected = "6 rounds: avg@6 16.7 %, pass@2 33.3 %, pass@4 66.7 %, pass@6 100.0 %, pass^6 0.0 %"
    assert rounds_words(metrics) == expected


def test_a_page_is_replaced_only_when_complete(tmp_path, record, solver) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    broken = ReportInput("t", pairs=(Pair("no episodes", ()),))
    with pytest.raises(IndexError):
        write_report(broken, target)
    assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


@pytest.fixture
def gaia(tmp_path, record, write_run):
    """Makes a finished run of 2 of GAIA's questions in 3 rounds: ``gaia(name, outcomes, **sampling)``."""
    spec = load_agent("web")
    known = {"ground_truth": "1", "data_source": "gaia"}
    tasks = [Task(id=name, question=f"question of {name}", **known) for name in "ab"]
    bounds = {"max_turns": 36, "max_turn_tokens": 4096, "max_response_tokens": 32768}
    limits = spec.limits.model_copy(update=bounds)
    sources = Sources(benchmark="gaia", data=("gaia.jsonl",))

    def make(name, outcomes, **changes):
        sampling = SamplingParams(4096, **({"temperature": 1.0, "top_p": 0.9, "top_k": 20} | changes))
        conditions = Conditions(sampling, limits=limits, rounds=3, sources=sources)
        rows = [
            record(task, score, number=number, source="gaia", agent="web")
            for task, scores in zip("ab", outcomes, strict=True)
            for number, score in enumerate(scores)
        ]
        return write_run(tmp_path / name, rows, make_manifest(tasks, spec, name, conditions))

    return make


def test_published_scores_stand_beside_ours_with_what_differs(gaia, tmp_path, shown) -> None:
    page = shown(gaia("run", [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0)]))
    assert not page.lacks(
        "gaia not comparable", "rounds: 3 here, 5 published", "questions: 2 here, 103 published"
    )
    data = json.loads((tmp_path / "page.json").read_text())["stages"][0]["published"]
    assert data["comparable"] is False
    figures = {row["metric"]: row for row in data["scores"] if not row["own_protocol"]}
    # One of question a's three episodes passes, none of b's: pass@3 is (1 + 0) / 2.
    for metric, published, ours in (("pass@1", 55.3, 1 / 6), ("pass@3", 69.9, 0.5)):
        assert (figures[metric]["percent"], figures[metric]["ours"]["value"]) == (
            published,
            pytest.approx(ours),
        )
    chosen = figures["best-of-3"]
    assert (chosen["percent"], chosen["ours"], chosen["missing"]) == (57.3, None, "no judge has chosen")
    text = (tmp_path / "page.md").read_text()
    assert "| pass@1 | 16.7 % (" in text
    records = {row["model"]: row["percent"] for row in data["scores"] if row["own_protocol"]}
    assert records == {"MiroThinker-1.7-mini": 80.3, "Tongyi-DeepResearch-30B-A3B": 70.9}
    assert "MiroThinker-1.7-mini (own protocol)" in text
    assert page.all_text.count("own protocol") == 2
    assert "Such a score cannot be compared" in page.all_text


def test_a_run_with_published_settings_is_called_so(gaia, shown) -> None:
    folder = gaia("run", [(1.0, 0.0, 0.0), (0.0, 0.0, None)])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sources"]["benchmark"]["departures"] = []
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert not shown(folder).lacks("gaia published settings", "1 of 6 episodes have no score")
    (folder / "metrics.json").unlink()
    assert not shown(folder).lacks("gaia not comparable", "not finished: 6 episodes so far")


def test_exact_match_in_the_place_of_the_judge_is_a_departure(gaia, shown, record) -> None:
    folder = gaia("run", [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
    evidence = "'1' is not a gold answer (no judge is configured: exact match)"
    row = record("a", 0.0, id="a#9", source="gaia", verdict=Verdict(score=0.0, evidence=evidence))
    with RecordWriter(folder / "episodes.jsonl") as writer:
        writer.write(row)
    assert "judge: exact match replaced a model in 1 of 6 episodes" in shown(folder).all_text


@pytest.mark.slow
def test_several_runs_are_compared_with_the_first(gaia, tmp_path) -> None:
    runs = [gaia(name, outcomes) for name, outcomes in (("a", [(0.0,) * 3] * 2), ("b", [(1.0,) * 3] * 2))]
    page = Page(write_comparison(runs, tmp_path / "page.html"))
    risen, gained = (
        "pass@1 rose from 0.0 % (a) to 100.0 % (b).",
        "pass@1 of b is 100.0 points higher than that of a",
    )
    assert not page.lacks(risen, gained, "Same question, side by side")
    assert not page.lacks(f"cd {Path.cwd()}", "afm eval compare ")
    colder = gaia("c", [(0.0,) * 3] * 2, temperature=0.0)
    differs = r"did not measure the same thing: sampling\.temperature: 1\.0 -> 0\.0"
    with pytest.raises(ConfigError, match=differs):
        write_comparison([*runs, colder], tmp_path / "refused.html")
    assert not (tmp_path / "refused.html").exists()
    page = Page(write_comparison([*runs, colder], tmp_path / "page.html", anyway=True))
    note, scores = (
        "Not comparable: sampling.temperature: 1.0 -> 0.0.",
        "pass@1: 0.0 % (a), 100.0 % (b), 0.0 % (c).",
    )
    assert not page.lacks(note, scores)
    data = json.loads((tmp_path / "page.json").read_text())
    changes = [(one["after"], one["difference"]["value"]) for one in data["differences"]]
    assert changes == [("b", 1.0), ("c", 0.0)]


def test_names_of_compared_runs_are_as_short_as_can_be(tmp_path) -> None:
    assert short_names([tmp_path / "x/eval", tmp_path / "y/eval"]) == ["x/eval", "y/eval"]
    assert short_names([tmp_path / "x/eval", tmp_path / "x/eval"]) == ["eval (1)", "eval (2)"]
