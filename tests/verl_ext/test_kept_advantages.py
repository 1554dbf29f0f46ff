from __future__ import annotations

import json

import pytest

from afm.errors import DataError
from afm.trajectory.io import advantages_file, load_advantages
from verl_ext.kept_advantages import kept_episodes, told, write_advantages
from verl_ext.kept_episodes import episodes_file, forget_after


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        file = episodes_file(tmp_path, step)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"id": f"{step}/u_{step}/{sample}"}) + "\n" for sample in (0, 7)))
    return tmp_path


def test_a_batch_finds_the_kept_episodes_of_its_step_and_of_those_before(run) -> None:
    found = kept_episodes(run, 2)
    assert found == {
        f"u_{step}/{sample}": (step, f"{step}/u_{step}/{sample}") for step in (1, 2) for sample in (0, 7)
    }
    assert kept_episodes(run, 20) == {}


def test_a_group_has_one_number_and_a_critic_one_for_each_token() -> None:
    assert told([0.5, 0.0, 0.5], [1, 0, 1]) == 0.5
    assert told([0.5, 0.0, -0.25], [1, 0, 1]) == [0.5, 0.0, -0.25]
    assert told([0.0, 0.0], [0, 0]) == [0.0, 0.0]


def test_what_is_known_stays_and_steps_done_again_are_forgotten(run) -> None:
    write_advantages(run, [(2, "2/u_2/0", 0.5), (3, "3/u_3/7", [1.0, -1.0])])
    write_advantages(run, [(2, "2/u_2/7", -0.5)])
    assert load_advantages(episodes_file(run, 2)) == {"2/u_2/0": 0.5, "2/u_2/7": -0.5}
    forget_after(run, 2)
    assert sorted(file.name for file in (run / "episodes").iterdir()) == [
        "step_000001.jsonl",
        "step_000002.advantages.json",
        "step_000002.jsonl",
    ]


@pytest.mark.parametrize("text", ["[1]", "{", "\udcff"])
def test_a_broken_file_is_told(run, text) -> None:
    file = advantages_file(episodes_file(run, 1))
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"cannot be read|expected an object"):
        load_advantages(episodes_file(run, 1))
