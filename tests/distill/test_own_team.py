"""A team in Python beside its YAML: what is wrong with it is said before any task begins."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afm.distill.team_player import OwnTeam, open_team
from afm.errors import ConfigError

FILE = "class_name: {}\nagent: math\ntools: tools.yaml\nroles: {{messages: {{solver: think}}}}\n"
SOURCE = """
class Team:
    def __init__(self, seed): self.seed = seed
    async def solve(self, recorder): ...
class Lacking:
    def __init__(self, seed): ...
class Wanting(Team):
    def __init__(self, seed, book): ...
"""


def team(folder: Path, name: str) -> OwnTeam:
    module = f"own_team_of_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(SOURCE, encoding="utf-8")
    (folder / "team.yaml").write_text(FILE.format(f"{module}.{name}"), encoding="utf-8")
    opened = open_team(folder / "team.yaml", seed=3)
    assert isinstance(opened, OwnTeam)
    return opened


def test_the_name_of_a_team_changes_with_its_source(tmp_path: Path) -> None:
    first = team(tmp_path, "Team")
    assert first.spec.name == "math"
    assert first.settings.tools == tmp_path / "tools.yaml"
    source = next(tmp_path.glob("own_team_of_*.py"))
    source.write_text(f"{SOURCE}# changed\n", encoding="utf-8")
    assert open_team(tmp_path / "team.yaml").name != first.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lacking", r"expected a class with async solve\(recorder\)"),
        ("Absent", r"own_team_of_\w+ has no class 'Absent'; expected one of: "),
        ("Wanting", "cannot be made: .*missing 1 required positional argument: 'book'"),
    ],
)
def test_what_is_no_team_is_explained(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        team(tmp_path, name)
    assert str(caught.value).startswith(f"{tmp_path / 'team.yaml'}: class_name: ")


@pytest.mark.parametrize(
    ("body", "call"),
    [
        (
            "result = recorder.use('clerk', 'weekday', '2024-02-29'); recorder.finish('clerk', result.text)",
            "Recorder.use",
        ),
        (
            "result = recorder.use('clerk', 'weekday', '2024-02-29'); recorder.finish('clerk', 'Monday')",
            "Recorder.use",
        ),
        ("recorder.finish('clerk', recorder.use('clerk', 'weekday', 'x').text)", "Recorder.use"),
        ("self.help(); recorder.finish('clerk', 'Monday')", "WeekdayTeam.help"),
    ],
)
def test_a_call_without_await_is_one_error_with_its_line(
    tmp_path: Path, afm: Callable[..., Any], body: str, call: str
) -> None:
    own = tmp_path / "own"
    afm("init", own)
    source = (
        "class WeekdayTeam:\n    def __init__(self, seed): ...\n    async def help(self): ...\n"
        f"    async def solve(self, recorder):\n        {body}\n"
    )
    (own / "team.py").write_text(source, encoding="utf-8")
    (own / "tasks.csv").write_text(
        "question,answer,data_source\nWhich weekday was 2024-02-29?,Thursday,weekdays\n"
    )
    words = (
        "data",
        "distill",
        own / "tasks.csv",
        "--team",
        own / "team.yaml",
        "--output-dir",
        tmp_path / "out",
    )
    try:
        done = afm(*words, "--rewards", own / "rewards.yaml", status=1)
    finally:
        for name in ("team", "weekday_tool", "weekday_reward"):  # another test has files of these names
            sys.modules.pop(name, None)
    assert (
        f"team.py:5: the call of {call} lacks `await`; write it before the call and start again"
        in done.stderr
    )
    assert "RuntimeWarning" not in done.stderr
    assert done.stderr.count("error: ") == 1
