"""The starter: written into an empty folder, and its commands up to the training files run as its README has them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afm.cli.commands import command
from afm.cli.quickstart import init
from afm.cli.train import print_next
from afm.errors import AfmError
from afm.terminal import afm_command
from verl_ext.doctor import start_findings
from verl_ext.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forgotten_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the starter's modules, which the next test imports from another folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for module in ("team", "weekday_tool", "weekday_reward"):
        sys.modules.pop(module, None)


def afm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "afm.cli.main", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def commands() -> list[list[str]]:
    """The ``afm`` commands of the README, in order."""
    text = (ROOT / "afm/starter/README.md").read_text("utf-8")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return [
        shlex.split(line)[1:] for line in lines.replace("\\\n", "").splitlines() if line.startswith("afm ")
    ]


@pytest.mark.parametrize(
    ("file", "seen", "fault"),
    [
        ("tools", "weekday", "weekday_tool.NoTool"),
        ("agent", "weekday_agent", ""),
        ("rewards", "weekdays: weekday_reward.SameDay", "weekday_reward.NoDay"),
        ("team", "for agent weekday_agent", "team.NoTeam"),
        ("filters", "format, quality, length, built for agent.yaml", "hop: 2"),
    ],
)
def test_doctor_loads_each_file_and_names_the_next_command_of_the_readme(
    tmp_path: Path, file: str, seen: str, fault: str
) -> None:
    afm(tmp_path, "init", "task")
    trajectories = tmp_path / "task/runs/team/trajectories.jsonl"
    trajectories.parent.mkdir(parents=True)
    trajectories.touch()
    done = afm(tmp_path / "task", "doctor", f"{file}.yaml")
    following = done.stdout.splitlines()[-1].partition("; next: ")[2]
    assert shlex.split(following.removeprefix(afm_command())) in commands()
    assert seen in done.stdout
    assert f"next: cd task && {following}" in afm(tmp_path, "doctor", f"task/{file}.yaml").stdout
    yaml = tmp_path / f"task/{file}.yaml"
    right = {
        "filters": "max_hops: 2",
        "tools": "weekday_tool.WeekdayTool",
        "rewards": "weekday_reward.SameDay",
    }
    yaml.write_text(yaml.read_text().replace(right.get(file, "team.WeekdayTeam"), fault))
    assert afm(tmp_path / "task", "doctor", yaml.name).returncode == (1 if fault else 0)


def test_a_folder_with_files_is_refused_and_a_free_name_is_offered(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/mine.txt").write_text("mine")
    done = afm(tmp_path, "init", "task")
    assert done.returncode == 2
    assert "task is a folder with files in it" in done.stderr
    assert "for example task_2" in done.stderr
    assert [file.name for file in (tmp_path / "task").iterdir()] == ["mine.txt"]
    assert "next: cd 'a b' && " in afm(tmp_path, "init", "a b").stdout


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "task").mkdir()
    words = f"ulimit -f 20; {shlex.quote(sys.executable)} -m afm.cli.main init task"  # train.csv is larger
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", words], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert [*tmp_path.rglob("*")] == [tmp_path / "task"] * exists
    assert afm(tmp_path, "init", "task").returncode == 0


def test_the_folder_that_one_is_in_is_refused_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = afm(tmp_path, "init", ".")
    assert done.returncode == 2
    assert "for example my_task" in done.stderr


def test_the_readme_calls_the_tool_and_scores_a_right_and_a_wrong_response(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    text = (tmp_path / "task/README.md").read_text("utf-8")
    lines = text.replace("\\\n", "").splitlines()
    [line] = [line for line in lines if line.startswith("python -c ")]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(
        words, cwd=tmp_path / "task", env=variables, capture_output=True, text=True, check=False
    )
    assert "'Thursday'" in done.stdout, done.stderr
    [words] = [words for words in commands() if words[0] == "reward"]
    scored = afm(tmp_path / "task", *words)
    assert scored.returncode == 0, scored.stderr
    assert scored.stdout.splitlines() == [
        "responses.jsonl:1: correct, score 1: expected Thursday, got Thu",
        "responses.jsonl:2: wrong, score 0: expected Thursday, got Friday",
        "2 rows: 1 correct, 1 wrong",
    ]


def test_the_first_reason_of_a_team_that_fails_is_shown(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    task = tmp_path / "task"
    table, team = (task / "questions/train.csv").read_text().splitlines(), (task / "team.py").read_text()
    (task / "questions/train.csv").write_text("\n".join(table[:21]) + "\n")
    begin = 'recorder.finish("clerk", "Sunday")'
    assert begin in team
    (task / "team.py").write_text(
        team.replace(begin, 'recorder.fail("no idea")').replace("GUESSED_SHARE = 0.88", "GUESSED_SHARE = 0.5")
    )
    done = afm(task, *next(words for words in commands() if words[:2] == ["data", "distill"]))
    assert done.returncode == 0, done.stderr
    assert (
        "team failed (reasons: runs/team/dropped.jsonl)\n    the first: team failed: no idea\n" in done.stdout
    )


def test_a_folder_of_an_earlier_run_is_refused_with_the_files_that_changed_and_what_can_be_typed(
    tmp_path: Path,
) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    task = tmp_path / "task"
    table = (task / "questions/train.csv").read_text().splitlines()
    (task / "questions/train.csv").write_text("\n".join(table[:9]) + "\n")
    words = next(words for words in commands() if words[:2] == ["data", "distill"])
    first, second = afm(task, *words), afm(task, *words)
    assert (first.returncode, second.returncode) == (0, 0)
    kept = first.stdout.partition("runs/team/trajectories.jsonl: ")[2].partition(", ")[0]
    assert f"runs/team/trajectories.jsonl: nothing left to do, in total {kept}, " in second.stdout
    assert "team: 8 of 8" in first.stdout
    assert "team: " not in second.stdout
    with (task / "team.py").open("a") as team:
        team.write("# edited\n")
    again = afm(task, *words)
    assert again.returncode == 1
    expected = (
        f"({task / 'team.py'} changed); choose another --output-dir, or delete the folder to start over"
    )
    assert expected in again.stderr
    (task / "questions/train.csv").write_text("\n".join(table[:8]) + "\n")
    assert "(the tasks of questions/train.csv changed, " in afm(task, *words).stderr
    keyed = afm(task, "eval", "eval.yaml", "team=team.yaml", "limit=1", "output_dir=README.md")
    assert "README.md: is a file; expected a folder, choose another output_dir\n" in keyed.stderr


def test_a_reward_yaml_that_was_not_given_is_named_with_the_command(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    words = [
        "data",
        "distill",
        "task/questions/train.csv",
        "--team",
        "task/team.yaml",
        "--output-dir",
        "runs",
    ]
    done = afm(tmp_path, *words)
    assert done.returncode == 2
    fault = (
        "task 'train-2': no built-in reward for data_source 'weekdays', but task/rewards.yaml has one; run: "
    )
    command_line = f"afm {shlex.join(words)} --rewards task/rewards.yaml"
    assert done.stderr == f"error: afm data distill: {fault}{command_line}\n"
    scored = afm(tmp_path, "reward", "task/responses.jsonl", "--agent", "task/agent.yaml")
    assert "but task/rewards.yaml has one; run: afm reward task/responses.jsonl " in scored.stdout


def test_a_data_set_of_another_name_is_named_where_the_tiny_model_is_made(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    (tmp_path / "task/runs/data").mkdir(parents=True)
    for there, advice in (("", "; run"), ("days", "; write `dataset: days` into sft.yaml, or run")):
        if there:  # the files that `afm data prepare sft` and `rl` write
            for name in ("days.json", "days.manifest.json", "rl.parquet.manifest.json"):
                (tmp_path / "task/runs/data" / name).write_text("[]")
            (tmp_path / "task/runs/data/dataset_info.json").write_text('{"days": {}}')
        done = subprocess.run(
            [sys.executable, "start_model.py"],
            cwd=tmp_path / "task",
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        named = (
            f"weekdays.json is missing{advice} `afm data prepare sft runs/kept/kept.jsonl --agent agent.yaml "
        )
        assert named in done.stderr


def test_a_training_ends_with_the_command_that_evaluates_it_with_the_recipe_beside_its_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    init(tmp_path / "task")
    monkeypatch.chdir(tmp_path / "task")
    print_next(Path("runs/sft"), Path("sft.yaml"))
    print_next(Path("runs/sft"), Path("elsewhere/sft.yaml"))
    beside, alone = capsys.readouterr().out.splitlines()[-2:]
    assert shlex.split(beside)[1:] in [[afm_command(), *words] for words in commands()]
    assert alone == f"next: {afm_command()} ask --model runs/sft"


def test_a_training_of_a_shipped_recipe_ends_with_the_evaluation_of_its_task_once_the_data_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = ROOT / "configs/tiny"
    print_next(Path("runs/sft"), recipes / "sft/math.yaml")
    data = tmp_path / "runs/quickstart/world/heldout.jsonl"
    data.parent.mkdir(parents=True)
    data.touch()
    print_next(Path("runs/sft"), recipes / "sft/math.yaml")
    without, ready = capsys.readouterr().out.splitlines()
    assert without == f"next: {afm_command()} ask --model runs/sft"
    evaluation = recipes / "eval/math_world.yaml"
    assert ready == f"next: {afm_command()} eval {evaluation} model=runs/sft output_dir=runs/eval_sft"


@pytest.mark.slow
def test_the_starter_goes_from_questions_to_training_files(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    task = tmp_path / "task"
    table = (task / "questions/train.csv").read_text().splitlines()
    (task / "questions/train.csv").write_text("\n".join(table[:201]) + "\n")
    quick = [words for words in commands() if words[0] == "data" or words == ["doctor", "tools.yaml"]]
    assert len(quick) == 5
    for words in quick:
        done = afm(task, *words)
        assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    records = [json.loads(line) for line in (task / "runs/kept/kept.jsonl").read_text().splitlines()]
    assert len(json.loads((task / "runs/data/weekdays.json").read_text())) == len(records) < 100
    called = [record["calls"] for record in records if record["calls"]]
    assert 5 < len(called) < len(records) - 5, "both look-ups and lucky guesses are kept"
    assert all(call["observation"].endswith("day") for calls in called for call in calls)


@pytest.mark.slow
def test_a_starter_that_was_downloaded_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    (tmp_path / "task/download.manifest.json").write_text("{}")
    refused = afm(tmp_path / "task", "doctor", "tools.yaml")
    assert refused.returncode == 1
    assert "--trust" in refused.stdout + refused.stderr
    trusted = afm(tmp_path / "task", "doctor", "tools.yaml", "--trust")
    assert trusted.returncode == 0, trusted.stdout + trusted.stderr
    assert f"running your code: {tmp_path / 'task/weekday_tool.py'}" in trusted.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("weekday_tool.py", "{date.from", "{dat.from", r"the tool 'weekday', called with '\d.*weekday_tool.py:\d+: NameError"),
        ("weekday_tool.py", "return ToolResult(", "return str(", r"weekday_tool.py:\d+: WeekdayTool.call of the tool 'weekday' returned str; expected ToolResult.*. Correct the file"),
        ("weekday_tool.py", "async def call", "def call", r"tools\[0\].class_name: .* `async def call`"),
        ("weekday_tool.py", "context.schema", "config['x']", r"from_config failed: weekday_tool.py:\d+: KeyError"),
        ("team.py", '"clerk", "weekday", day', '"clerk", "wekday", day', r"failed: team.py:\d+: ConfigError: the team has no tool 'wekday'; did you mean 'weekday'"),
        ("team.yaml", "team.WeekdayTeam", "WeekdayTeam", "class_name: got 'WeekdayTeam', expected MODULE.CLASS, did you mean team.WeekdayTeam?"),
        ("team.py", 'say("clerk"', 'sya("clerk"', r"the team 'team.WeekdayTeam', at task 'train-\d+', failed: team.py:\d+: Attr.*; correct the file, delete the --output-dir or choose another, and run the command again"),
        ("team.py", '"Sunday"', "5", r"failed: team.py:\d+: TypeError: final event: expected a text, got int 5; correct"),
        ("tools.yaml", "        name: weekday", "        name: days", "calls weekday, but `tools` has days; correct `tool` under the agent's `roles`, or name"),
        ("weekday_reward.py", "short = named", "long = named", r"no trajectory was kept.*weekday_reward.py:\d+: NameError"),
        ("weekday_reward.py", "return Part(float(same),", "return float(same)  #", r"\(float\), expected Part"),
        ("weekday_reward.py", "Part(float(same)", "Part(7 + float(same)", r"weekday_reward.py:\d+: .* the score 7.0 \(float\), expected a number from 0 to 1"),
        ("agent.yaml", "tool: weekday,", "tool: weekdy,", "agent 'weekday_agent' calls weekdy, but `tools` has weekday; did you mean 'weekday'"),
        ("rewards.yaml", "SameDay", "SameDy", "by_source.weekdays: weekday_reward has no class 'SameDy'; did you mean 'SameDay'"),
        ("questions/train.csv", ",weekdays", ",sundays", "task 'train-2': no reward for data_source 'sundays'"),
        ("questions/train.csv", ",weekdays", ",weekday", r"'weekday': did you mean 'weekdays'\? `by_source` has weekdays; `afm list rewards` prints"),
        ("questions/train.csv", ",weekdays", ",", "the row has no data_source, .* add a column"),
    ],
)  # fmt: skip
def test_a_fault_in_a_file_of_the_starter_is_one_line_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, message: str
) -> None:
    init(tmp_path / "task")
    monkeypatch.chdir(tmp_path / "task")
    table = Path("questions/train.csv").read_text().splitlines()
    Path("questions/train.csv").write_text("\n".join(table[:41]) + "\n")
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))
    words = next(words for words in commands() if words[:2] == ["data", "distill"])
    with pytest.raises(AfmError, match=message):
        command()(words, standalone_mode=False)
    worked = any(
        word in message
        for word in (
            "no trajectory",
            "has no tool",
            "Part",
            "the score",
            "failed: team",
            "NameError",
            "returned str",
        )
    )
    assert Path("runs/team/events.jsonl").exists() == worked, "found only after the team had begun to work"


def test_a_command_typed_outside_the_starter_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "task")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        AfmError, match=r"task/questions/heldout.csv exists: cd task and run the command there"
    ):
        command()(["eval", "task/eval.yaml", "model=runs/sft"], standalone_mode=False)
    (tmp_path / "task/runs/sft").mkdir(parents=True)
    found = [finding.text for finding in start_findings(load_settings("task/rl.yaml"), here=False)]
    assert any("task/runs/sft exists: cd task and run the command there" in text for text in found), found
