from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from afm.errors import DataError
from verl_ext.alarms import AlarmAction, Alarms, Watch, little_signal, read_alarms

Row = dict[str, Any]
SOUND: Row = {
    "reward": 0.5, "format": 0.9, "agent_tokens": 100.0, "entropy": 0.3, "mismatch_kl": 1e-4, "tool_calls": 2.0,
    "tool_failures": 0.1, "groups_generated": 20.0, "groups_alike": 8.0, "episode_seconds": 20.0,
    "slowest_episode_seconds": 90.0,
}  # fmt: skip


def went_off(rows: list[Row], folder: Path, **alarms: Any) -> list[tuple[int, str]]:
    watch = Watch(Alarms(**alarms), [], folder / "alarms.jsonl")
    return [
        (found.step, found.alarm)
        for step, row in enumerate(rows, start=1)
        for found in watch.look(SOUND | row | {"step": step})
    ]


def test_a_sound_run_is_silent(tmp_path: Path) -> None:
    rising = [{"reward": 0.1 + 0.05 * step, "entropy": 0.3 - 0.015 * step} for step in range(16)]
    assert went_off(rising, tmp_path) == []
    assert not (tmp_path / "alarms.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "steps", "bad"),
    [
        ("entropy_collapse", 5, {"entropy": 0.02}),
        ("mismatch", 3, {"mismatch_kl": 0.02}),
        ("failed_tools", 3, {"tool_failures": 0.5}),
        ("no_signal", 5, {"groups_alike": 19.0, "groups_solved": 18.0}),
        ("long_tail", 3, {"slowest_episode_seconds": 300.0}),
    ],
)
def test_each_alarm_goes_off_once_when_its_condition_has_held_long_enough(
    tmp_path: Path, name: str, steps: int, bad: Row
) -> None:
    assert went_off([{}] * 3 + [bad] * (steps - 1) + [{}], tmp_path) == []
    assert went_off([{}] * 3 + [bad] * (steps + 4), tmp_path) == [(3 + steps, name)]
    again = [{}] * 3 + [bad] * (steps + 1) + [{}] + [bad] * steps
    assert went_off(again, tmp_path) == [(3 + steps, name), (5 + 2 * steps, name)]
    assert went_off([{}] * 3 + [bad] * 9, tmp_path, **{name: None}) == []


@pytest.mark.parametrize(
    ("alike", "solved", "text"),
    [
        ((18.0, 15.0), (18.0, 14.0), "in 33 of 40 groups every answer had the same reward, and most of these were solved: "),
        ((18.0, 15.0), (0.0, 14.0), "and most of these were failed: the run could learn little; take easier questions"),
        ((18.0, 14.0), (18.0, 14.0), ""),  # 32 of 40
    ],
)  # fmt: skip
def test_a_run_whose_groups_are_mostly_alike_says_that_it_could_learn_little(
    alike: tuple[float, float], solved: tuple[float, float], text: str
) -> None:
    steps = zip(alike, solved, strict=True)
    rows = [{"groups_generated": 20.0, "groups_alike": a, "groups_solved": s} for a, s in steps]
    assert text in (found := little_signal(rows))
    assert bool(found) is bool(text)
    assert little_signal([{"reward": 1.0}]) == ""


def test_other_probabilities_end_a_run_whose_engine_hides_its_weights() -> None:
    for given, action in [({}, "stop"), ({"above": 0.1}, "stop"), ({"action": "checkpoint"}, "checkpoint")]:
        asked = Alarms.model_validate({"mismatch": given})
        hidden = asked.without_weights()
        assert hidden.mismatch is not None
        assert hidden.mismatch.action == action
        assert hidden.mismatch.above == given.get("above", 0.01)
    assert Alarms.model_validate({"mismatch": None}).without_weights().mismatch is None


@pytest.mark.parametrize("falls", [{"format": 0.8}, {"agent_tokens": 30.0}])
def test_a_reward_that_jumps_while_format_or_length_fall_is_suspicious(tmp_path: Path, falls: Row) -> None:
    found = went_off([{}] * 5 + [{"reward": 0.8} | falls] * 5, tmp_path)
    assert [name for _, name in found] == ["reward_hacking"]
    assert went_off([{}] * 5 + [{"reward": 0.8}] * 5, tmp_path) == []
    assert went_off([{}] * 5 + [falls] * 5, tmp_path) == []


def test_a_format_that_falls_from_its_best_is_reported_once_with_the_steps(tmp_path: Path) -> None:
    falling = [{"format": 0.5}] * 5 + [{"format": 0.9}] * 5 + [{}] + [{"format": 0.6}] * 9
    file = tmp_path / "alarms.jsonl"
    watch = Watch(Alarms(), [], file)
    for step, row in enumerate(falling, start=1):
        watch.look({"step": step} | row)
    # Means of five steps: the best is 0.9 at steps 6 to 10, and (0.9 + 4 * 0.6) / 5 = 0.66 is the first 0.2 below it.
    [alarm] = read_alarms(file)
    assert (alarm.step, alarm.alarm, alarm.action) == (15, "format_collapse", AlarmAction.WARN)
    assert "format fell from 0.90 (steps 6 to 10) to 0.66 (steps 10 to 15)" in alarm.message
    assert went_off([{}] * 5 + [{"format": 0.75}] * 9, tmp_path) == []


def test_metrics_that_are_absent_set_off_nothing(tmp_path: Path) -> None:
    watch = Watch(Alarms(), [], tmp_path / "alarms.jsonl")
    assert [watch.look({"step": step}) for step in range(1, 20)] == [[]] * 19


def test_messages_say_what_was_seen_and_findings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "alarms.jsonl"
    watch = Watch(Alarms(failed_tools={"steps": 1, "action": "stop"}), [], file)
    [found] = watch.look(SOUND | {"step": 7, "tool_failures": 1.0})
    assert "50% of the tool calls fail" in found.message
    assert found.action is AlarmAction.STOP
    assert read_alarms(file) == [found]
    with file.open("a") as half:
        half.write('{"step": 8')
    assert read_alarms(file) == [found]


@pytest.mark.parametrize(
    "line",
    ["junk", "[1]", "{}", '{"step": "3", "alarm": "a", "action": "warn", "message": "m"}',
     '{"step": 3, "alarm": "a", "action": "shout", "message": "m"}'],
)  # fmt: skip
def test_a_foreign_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "alarms.jsonl"
    sound = '{"step": 1, "alarm": "mismatch", "action": "warn", "message": "m"}\n'
    file.write_text(sound + line + "\n")
    with pytest.raises(DataError, match=r"alarms\.jsonl:2: expected an alarm of a step, got "):
        Watch(Alarms(), [], file)
    assert file.read_text() == sound + line + "\n"


def test_a_run_that_goes_on_forgets_what_it_does_again_and_remembers_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "alarms.jsonl"
    alarms = Alarms(failed_tools={"steps": 2})
    bad = [SOUND | {"tool_failures": 1.0, "step": step} for step in range(6)]
    first = Watch(alarms, [], file)
    for row in (bad[1], bad[2], SOUND | {"step": 3}, bad[4], bad[5]):
        first.look(row)
    assert [found.step for found in read_alarms(file)] == [2, 5]
    again = Watch(alarms, bad[1:3], file)
    assert [found.step for found in read_alarms(file)] == [2]
    assert again.look(bad[3]) == []


@pytest.mark.parametrize(
    "settings",
    [{"entropy": {}}, {"mismatch": {"above": float("inf")}}, {"entropy_collapse": {"share_of_start": 1}}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Alarms(**settings)
