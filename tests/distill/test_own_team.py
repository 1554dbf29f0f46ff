"""A team in Python beside its YAML: what is wrong with it is said before any task begins."""

from pathlib import Path

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
        ("Absent", r"expected a class with async solve\(recorder\)"),
        ("Wanting", "cannot be made: .*missing 1 required positional argument: 'book'"),
    ],
)
def test_what_is_no_team_is_explained(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        team(tmp_path, name)
    assert str(caught.value).startswith(f"{tmp_path / 'team.yaml'}: class_name: ")
