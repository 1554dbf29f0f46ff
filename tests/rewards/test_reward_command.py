"""``afm reward FILE`` on good and bad rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from afm.cli.reward import _as_json, _as_text, reward
from afm.trajectory.record import Verdict

APP = typer.Typer()
APP.command()(reward)
ANSWER = r"<plan>p</plan><think>t</think><answer>\boxed{%s}</answer>"


def row(answer: str, **more: object) -> str:
    fields = {"data_source": "aime24", "question": "q", "response": ANSWER % answer, "ground_truth": "204"}
    return json.dumps(fields | more)


def run(folder: Path, lines: list[str], *options: str) -> Result:
    path = folder / "some rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return CliRunner().invoke(APP, [str(path), *options])


def test_rows_are_judged_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, [row("204"), "", row("7"), row("204.0")], "--json")
    judged = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(item["line"], item["score"], item["verdict"]) for item in judged] == [
        (1, 1.0, "correct"),
        (3, 0.0, "wrong"),
        (4, 1.0, "correct"),
    ]
    assert judged[1]["evidence"] == "'7' is not '204'"
    assert judged[1]["parts"] == {"correct": 0.0, "format": 1.0}
    assert judged[1]["seconds"] >= 0
    assert done.exit_code == 0


def test_a_row_may_name_its_agent(tmp_path: Path) -> None:
    response = "<think>t</think><plan>p</plan><think>t</think><wiki_search>x</wiki_search>"
    response += "\n<observation>\nThe Beatles\n</observation>\n<think>t</think><reflection>r</reflection>"
    response += "<think>t</think><answer>The Beatles</answer>"
    done = run(
        tmp_path, [row("", agent="mhqa", response=response, data_source="nq", ground_truth=["Beatles"])]
    )
    assert done.exit_code == 0
    assert "correct, score 1" in done.stdout
    assert "1 row: 1 correct" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row("204", agent=["math"]), "agent: got ['math'] (list), expected text"),
        ("{", "invalid JSON"),
        ("[1]", "got list, expected an object"),
        (
            '{"data_source": "aime24", "response": "x"}',
            "got an object with data_source, response, expected one with ground_truth too",
        ),
        (row("1", data_source="aime2024"), "did you mean 'aime24'"),
    ],
)
def test_a_bad_row_is_named_and_the_rest_is_judged(line: str, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, [row("204"), line, row("204")])
    assert done.exit_code == 1
    [complaint] = [text for text in done.stdout.splitlines() if "some rows.jsonl:2: " in text]
    assert message in complaint
    assert "3 rows: 1 bad, 2 correct" in done.stdout
    rows = run(tmp_path, [row("204"), line], "--json").stdout.splitlines()
    assert json.loads(rows[1])["error"]


def test_an_abstention_is_no_score_and_no_success(tmp_path: Path) -> None:
    done = run(tmp_path, [row("1", ground_truth="")], "--json")
    judged = json.loads(done.stdout)
    assert (judged["score"], judged["verdict"], done.exit_code) == (None, "abstained", 1)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ud800\nsome rows.jsonl:1: correct, score 1"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nothing_that_a_response_holds_steers_the_terminal(options: list[str], tmp_path: Path) -> None:
    rows = [row("", agent=HOSTILE), row("", data_source=HOSTILE), row("", extra_info={"reward": HOSTILE})]
    done = run(tmp_path, rows, *options)
    assert done.exit_code == 1
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    assert len(done.stdout.splitlines()) == (3 if options else 4)


def test_evidence_is_shown_on_one_harmless_line() -> None:
    verdict = Verdict(score=0.0, evidence=HOSTILE)
    text = _as_text(Path("rows.jsonl"), 1, "wrong", verdict)
    assert text.startswith("rows.jsonl:1: ")
    assert text.endswith("\\u202e\\ud800 some rows.jsonl:1: correct, score 1")
    assert text.isprintable()
    assert json.loads(_as_json(1, verdict))["evidence"] == HOSTILE
    assert _as_json(1, verdict).isascii()


def test_the_formula_comes_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "reward.yaml"
    config.write_text("formula: 0.25 * format", encoding="utf-8")
    assert json.loads(run(tmp_path, [row("7")], "--json", "--rewards", str(config)).stdout)["score"] == 0.25


def test_the_fault_of_a_users_scorer_is_printed_once_for_each_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = "class Broken:\n    async def judge(self, sample):\n        return 1 / 0\n\n    async def close(self):\n        pass\n"
    (tmp_path / "broken_reward.py").write_text(broken, encoding="utf-8")
    config = tmp_path / "own.yaml"
    config.write_text("by_source: {own: broken_reward.Broken}", encoding="utf-8")
    done = run(tmp_path, [row("1", data_source="own")] * 2, "--rewards", str(config))
    assert done.stdout.count("broken_reward.py:3: ZeroDivisionError") == 2
    assert not caplog.messages


def test_attacks_on_a_users_own_scorer_are_made_of_the_users_rows(tmp_path: Path) -> None:
    (tmp_path / "gullible_reward.py").write_text(
        """from afm.rewards.base import Part
from afm.trajectory import answers


class Gullible:
    async def judge(self, sample):
        named = " ".join(answers(sample.segments, sample.spec))
        return Part(float(sample.ground_truth in named), named)

    async def close(self):
        pass
""",
        encoding="utf-8",
    )
    config = tmp_path / "own.yaml"
    config.write_text("by_source: {own: gullible_reward.Gullible}", encoding="utf-8")
    rows = [row("Oslo", data_source="own", ground_truth=city) for city in ("Oslo", "Bern", "Oslo")]
    done = run(tmp_path, rows, "--attack", "--rewards", str(config), "--json")
    tried = [json.loads(line) for line in done.stdout.splitlines()]
    paid = {each["attack"] for each in tried if each["result"] == "paid"}
    assert paid == {f"{name} ({city})" for name in ("denied", "several answers") for city in ("Oslo", "Bern")}
    assert {each["result"] for each in tried if each["attack"].startswith("honest")} == {"ok"}
    assert len(tried) == 22
    assert done.exit_code == 1
    assert "not attacked" not in done.stderr


def test_shipped_attacks_say_which_own_scorer_they_leave_out(tmp_path: Path) -> None:
    config = tmp_path / "near.yaml"
    config.write_text("by_source: {own: afm.rewards.text_match.TokenF1}", encoding="utf-8")
    words = ["--attack", "--rewards", str(config), "--scorer", "choice"]
    done = CliRunner().invoke(APP, words)
    left_out = "not attacked: afm.rewards.text_match.TokenF1 (data_source own), your own; "
    assert done.stderr.startswith(left_out)
    assert f"afm reward --attack ROWS.jsonl --rewards {config}" in done.stderr
    assert done.exit_code == 0
