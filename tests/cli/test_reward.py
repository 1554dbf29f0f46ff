import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from afm.cli.reward import reward
from afm.errors import UsageError

APP = typer.Typer()
APP.command()(reward)
ROOT = Path(__file__).parents[2]


def test_the_table_says_what_each_attack_got() -> None:
    done = CliRunner().invoke(APP, ["--attack", "--scorer", "exact_match", "--scorer", "choice"])
    assert done.exit_code == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["scorer", "attack", "deserves", "got", "result"]
    [honest] = [line for line in lines if line.startswith("exact_match  honest answer ")]
    assert honest.split()[-3:] == ["1", "1", "ok"]
    assert lines[-1] == f"{len(lines) - 2} attacks: {len(lines) - 2} ok"


def test_an_attack_that_pays_ends_with_status_1(tmp_path: Path) -> None:
    config = tmp_path / "my reward.yaml"
    config.write_text("text_match: {max_words: 100000}", encoding="utf-8")
    done = CliRunner().invoke(APP, ["--attack", str(config), "--scorer", "substring"])
    assert done.exit_code == 1
    assert " paid: " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 attack: 1 paid"
    rows = CliRunner().invoke(APP, ["--attack", "--rewards", str(config), "--scorer", "substring", "--json"])
    assert (json.loads(rows.stdout)["result"], rows.exit_code) == ("paid", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FILE is missing"),
        (["--attack", "--scorer", "mth"], "did you mean 'math'"),
        (["CONFIG", "--scorer", "math"], "--scorer goes with --attack"),
        (["CONFIG", "--attack", "--rewards", "CONFIG"], "takes one reward YAML"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], message: str) -> None:
    config = str(ROOT / "configs/rewards/math.yaml")
    given = [config if word == "CONFIG" else word for word in arguments]
    done = CliRunner().invoke(APP, given)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_converted_logs_are_scored_and_without_gold_answers_the_next_command_is_named(tmp_path: Path) -> None:
    own = tmp_path / "shop.yaml"
    own.write_text("extends: react\nname: shop\n", encoding="utf-8")
    parts = [("<answer>5</answer>", "5"), ("<answer>7</answer>", "5")]
    rows = [
        {"id": gold, "agent": "shop", "agent_digest": "", "question": "How many?", "ground_truth": gold}
        | {"segments": [{"author": "agent", "text": text}]}
        for text, gold in parts
    ]
    file, form = tmp_path / "my rows.jsonl", tmp_path / "form.yaml"

    def score(source: str, *more: str) -> list[str]:
        file.write_text("".join(json.dumps(row | {"data_source": source}) + "\n" for row in rows))
        return CliRunner().invoke(APP, [str(file), *more]).stdout.splitlines()

    judged = score("nq", "--agent", str(own))
    assert judged[0] == f"{file}:1: correct, score 1: '5' is a gold answer"
    assert judged[-1] == "2 rows: 1 correct, 1 wrong"
    first = score("", "--agent", str(own))[0]
    assert f"afm data filter '{file}' --config " in first
    assert "/filters/logs.yaml --output-dir DIR" in first
    rows = [row | {"ground_truth": None} for row in rows]
    form.write_text("formula: format\nby_source: {'*': exact_match}\n", encoding="utf-8")
    assert score("", "--agent", str(own), "--rewards", str(form))[-1] == "2 rows: 2 unjudged"
    rows = [{"steps": [], "output": "5"}]
    assert f"afm convert '{file}' --to coa --agent NAME" in score("")[0]
