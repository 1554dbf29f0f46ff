import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.data import app
from afm.errors import DataError, UsageError
from afm.trajectory import author_segments, load_records
from afm.trajectory.record import Record, Verdict

ROOT = Path(__file__).parents[2]


def record(name, searches=5, question="Where does the river end?"):
    spec = load_agent("mhqa")
    text = "".join(
        f"<think>Next.</think><wiki_search>fact number {at}</wiki_search>\n<observation>Found {at}.</observation>\n"
        for at in range(searches)
    )
    text += f"<think>Hm.</think><reflection>All of {name} agree.</reflection><think>So.</think><answer>sea</answer>"
    parts = author_segments(text, spec)
    fields = {"agent": "mhqa", "agent_digest": spec.digest, "ground_truth": "sea", "data_source": "hotpotqa"}
    return Record(id=name, question=question, segments=parts, verdict=Verdict(score=1.0), **fields)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "some rows.jsonl"
    made = [record("a"), record("b", searches=2), record("c", question="What is in the test set?")]
    path.write_text("".join(one.model_dump_json() + "\n" for one in made))
    return path


OF_QA = ("--rewards", ROOT / "configs/rewards/qa.yaml")
PRESET = ("--config", ROOT / "configs/filters/mhqa.yaml")


def run(*arguments):
    return CliRunner().invoke(app, ["filter", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.slow
def test_a_preset_filters_and_shows_the_funnel(rows, tmp_path):
    pytest.importorskip("numpy")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": "what is in the TEST SET", "answer": "this"}) + "\n")

    done = run(rows, *PRESET, "--against", tasks, "--output-dir", tmp_path / "out")

    assert done.exit_code == 0
    assert f"{tmp_path}/out: 1 of 3 kept" in done.stdout
    funnel = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines()) if words}
    assert funnel["complexity"] == ["3", "1", "2", "66.7%"]
    assert funnel["contamination"] == ["2", "1", "1", "33.3%"]
    assert [one.id for one in load_records(tmp_path / "out/kept.jsonl")] == ["a"]
    reasons = [one.reason.partition(":")[0] for one in load_records(tmp_path / "out/dropped.jsonl")]
    assert reasons == ["complexity", "contamination"]


def test_without_evaluation_sets_it_says_that_nothing_was_compared(rows, tmp_path):
    pytest.importorskip("numpy")
    done = run(rows, *PRESET, "--output-dir", tmp_path / "out", "--no-picture")
    assert (
        "note: contamination had nothing to compare with; name evaluation sets with --against" in done.stdout
    )
    assert not (tmp_path / "out/funnel.png").exists()


def test_an_output_file_and_settings_in_two_places_are_refused(rows, tmp_path):
    with pytest.raises(UsageError, match="expected a folder"):
        run(rows, "--output-dir", rows)
    with pytest.raises(UsageError, match="settings of `quality`"):
        run(rows, *PRESET, "--min-score", 0.5, "--output-dir", tmp_path / "out")


def test_the_wrong_agent_keeps_nothing(rows, tmp_path):
    with pytest.raises(
        DataError, match=r"no trajectory was kept; dropped.jsonl .* The first one: a: format: <wiki"
    ):
        run(rows, "--agent", "math", "--output-dir", tmp_path / "out")


def test_rows_of_another_agent_are_counted_in_one_warning_now_and_when_the_finished_run_is_read_again(
    rows, tmp_path
):
    first, second, third = rows.read_text().splitlines(keepends=True)
    rows.write_text(first.replace('"agent":"mhqa"', '"agent":"math"') + second + third)
    for _ in range(2):
        done = run(rows, *OF_QA, "--agent", "mhqa", "--output-dir", tmp_path / "out", "--no-picture")
        assert done.stderr.startswith("warning: 1 row of 'math': another agent than 'mhqa', ")
        assert done.stderr.count("\n") == 1
        assert "3 of 3 kept" in done.stdout


def test_without_an_agent_the_rows_name_theirs(rows, tmp_path):
    done = run(rows, *OF_QA, "--output-dir", tmp_path / "out")
    assert done.stderr == ""
    assert "3 of 3 kept" in done.stdout
    out = ["--output-dir", str(tmp_path / "sft")]
    text = rows.read_text()
    rows.write_text(text + record("d").model_copy(update={"kept": False}).model_dump_json() + "\n")
    done = CliRunner().invoke(app, ["prepare", "sft", str(rows), *out], catch_exceptions=False)
    assert "mhqa_sft.json: 3 rows, 1 with kept: false left out (no reason is recorded)" in done.stdout
    rows.write_text(text.replace('"mhqa"', '"my_agent"'))
    for words in (["filter", str(rows)], ["prepare", "sft", str(rows)]):
        with pytest.raises(UsageError, match=r"rows.jsonl: agent 'my_agent' is not shipped.*--agent FILE"):
            CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path / "other")], catch_exceptions=False)


def test_each_stage_that_drops_rows_is_named_with_its_first_example(rows, tmp_path):
    pytest.importorskip("numpy")
    text = rows.read_text().replace("What is in the test set?", "Is jane.doe@shop-mail.org hers?")
    first, _, third = text.splitlines()
    more = [third.replace('"c"', '"d"'), first.replace('"a"', '"e"'), "no record"]
    rows.write_text(text + "".join(f"{line}\n" for line in more))
    logs = ROOT / "configs/filters/logs.yaml"
    done = run(rows, "--config", logs, "--agent", "mhqa", "--output-dir", tmp_path / "out")

    file = tmp_path / "out/dropped.jsonl"
    assert done.stdout.count("dropped: ") == 2
    assert (
        f"  dropped: 2 personal (reasons: {file})\n    the first: c: personal: e-mail in the question\n"
        in done.stdout
    )
    out = ["--output-dir", str(tmp_path / "sft")]
    rows.write_text((tmp_path / "out/kept.jsonl").read_text() + file.read_text())
    again = run(rows, "--config", logs, "--agent", "mhqa", "--output-dir", tmp_path / "again")
    assert f"  dropped: 2 earlier run: personal (reasons: {tmp_path}/again/dropped.jsonl)\n" in again.stdout
    done = CliRunner().invoke(app, ["prepare", "sft", str(rows), *out], catch_exceptions=False)
    assert "left out (2: personal: e-mail in the question; 1: " in done.stdout


def test_a_funnel_is_printed_without_a_page(afm, tmp_path, rows):
    funnel = tmp_path / "funnel.json"
    funnel.write_text('{"seen": 1500, "stages": [{"name": "format", "dropped": 300}]}')
    said = afm("data", "stats", rows, "--funnel", funnel).stdout
    assert f"  rows left in {tmp_path.name}/funnel.json: seen 1,500, format 1,200\n" in said
