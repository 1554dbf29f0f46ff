import json

import pytest
from typer.testing import CliRunner

from afm.cli.commands import app
from afm.errors import ConfigError, DataError, EngineError
from afm.evaluation.judging import AgreementSettings, agree

CELLS = {"right yes": 20, "right no": 5, "wrong yes": 10, "wrong no": 15}
ANSWERS = {f"{said} {i}": [said] for said, count in CELLS.items() for i in range(count)}


def settings(*judges, **changes):
    made = [{"attempts": 1, **judge} for judge in judges or ({},)]
    return AgreementSettings.model_validate({"judges": made, **changes})


async def test_a_second_judge_is_compared_with_the_recorded_verdicts(finished, judge) -> None:
    (found,) = (await agree(finished(ANSWERS), settings())).agreement
    assert (found.first, found.second) == ("recorded", "test-judge")
    assert (found.both, found.only_first, found.only_second, found.neither) == (20, 5, 10, 15)
    assert (found.agreed.value, found.kappa) == (pytest.approx(0.7), pytest.approx(0.4))
    assert found.kappa_interval.low < 0.4 < found.kappa_interval.high


async def test_two_judges_are_compared_with_each_other_too(finished, judge) -> None:
    answers = {"a": ["right yes", "wrong maybe"], "b": ["wrong no", "right maybe"], "c": ["wrong yes"]}
    found = (await agree(finished(answers), settings({}, {"model": "other"}))).agreement
    by_name = {(one.first, one.second): one for one in found}
    assert list(by_name) == [("recorded", "test-judge"), ("recorded", "other"), ("test-judge", "other")]
    pair = by_name["test-judge", "other"]
    assert (pair.both, pair.only_first, pair.only_second, pair.neither) == (2, 0, 2, 1)
    assert (pair.episodes, pair.questions) == (5, 3)


async def test_a_judge_may_repeat_itself_and_is_really_asked_each_time(finished, judge, tmp_path) -> None:
    answers = {"a": ["wrong yes"], "b": ["wrong no"]}
    wanted = settings({"control": False, "cache": str(tmp_path / "verdicts.sqlite")}, repeats=2)
    found = (await agree(finished(answers), wanted)).agreement
    first, second = "test-judge #1", "test-judge #2"
    names = [(one.first, one.second) for one in found]
    assert names == [("recorded", first), ("recorded", second), (first, second)]
    assert len(judge.requests) == 4
    assert found[-1].kappa == 1.0


async def test_what_needs_no_judge_does_not_count_as_agreement(finished, judge) -> None:
    # "1" is the gold answer word for word, None is no answer.
    folder = finished({"a": ["1", None, "wrong no"], "b": ["right yes", "x" * 2000, "1"]})
    (found,) = (await agree(folder, settings({"control": False}))).agreement
    assert (found.episodes, found.settled, len(judge.requests)) == (2, 4, 2)
    with pytest.raises(
        DataError, match=r"no episode needs a judge \(2 have no answer or exactly a gold answer"
    ):
        await agree(finished({"a": ["1", None]}, "settled"), settings())


async def test_nothing_is_asked_twice_and_a_sample_is_the_same_each_time(finished, judge) -> None:
    folder = finished(ANSWERS)
    first = (await agree(folder, settings({"control": False}, episodes=8))).agreement
    assert (first[0].episodes, len(judge.requests)) == (8, 8)
    assert (await agree(folder, settings({"control": False}, episodes=8))).agreement == first
    assert len(judge.requests) == 8
    (whole,) = (await agree(folder, settings({"control": False}))).agreement
    assert (whole.episodes, len(judge.requests)) == (50, 50)
    rows = [json.loads(line) for line in (folder / "opinions.jsonl").read_text().splitlines()]
    assert {row["judge"] for row in rows} == {"test-judge"}
    assert len({row["episode"] for row in rows}) == 50


async def test_a_judge_that_fails_abstains_and_too_much_of_it_is_an_error(finished, judge) -> None:
    folder = finished({"a": ["wrong no"], "b": ["right yes"]})
    judge.character = "mute"
    with pytest.raises(EngineError, match="1 of 2 requests to the judge have no verdict; at most 10% may"):
        await agree(folder, settings())
    with pytest.raises(EngineError, match="2 of 2 requests to the judge have no verdict; at most 50% may"):
        await agree(folder, settings(max_failed_share=0.5))
    (found,) = (await agree(folder, settings(max_failed_share=1.0))).agreement
    assert (found.episodes, found.abstained, found.agreed, found.kappa) == (0, 2, None, None)


async def test_without_a_judge_nothing_begins(finished, monkeypatch) -> None:
    monkeypatch.delenv("GRM_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="agreement needs a judge: set GRM_BASE_URL"):
        await agree(finished({"a": ["wrong no"]}), settings())


def test_the_command_and_the_report_say_it(finished, judge) -> None:
    folder = finished(ANSWERS)
    done = CliRunner().invoke(app, ["eval", "agree", str(folder), "judges=[{attempts: 1}]"])
    assert done.exit_code == 0, done.output
    said = "recorded and test-judge agree on 70.0 %"
    assert said in done.output
    assert "Cohen's kappa 0.40 (" in " ".join(done.output.split())
    assert max(map(len, done.output.split("\nverdicts:")[0].splitlines())) <= 100
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert said in (folder / "report.html").read_text()
    metrics = json.loads((folder / "report.json").read_text())["stages"][0]["metrics"]
    assert metrics["agreement"][0]["kappa"] == pytest.approx(0.4)
