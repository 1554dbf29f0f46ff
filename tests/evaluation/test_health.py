import json

import pytest

from afm.evaluation.health import ALARMS_FILE, read_health
from afm.evaluation.report import write_run_report


@pytest.fixture
def rl_run(tmp_path):
    """The output folder of `afm rl` with two steps and alarms, hostile text among them."""
    keys = ("step", "reward", "tool_calls", "tool_failures", "token_drift", "seconds")
    steps = ((1, 0.2, 2.0, 0.5, 0, 10.0), (2, 0.6, 1.0, 0.0, 0, 8.0))
    rows = [dict(zip(keys, step, strict=True)) for step in steps]
    rows[1] |= {"rollout_seconds": 2.0, "episode_seconds": 0.0, "slowest_episode_seconds": 3.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    alarms = [{"step": 1, "alarm": "failed_tools", "action": "warn", "message": "<b>25%</b> fail"}] * 4
    lines = [*map(json.dumps, alarms), '{"step": 2', "[]"]
    (tmp_path / ALARMS_FILE).write_text("\n".join(lines), "utf-8")
    return tmp_path


def test_each_aspect_has_its_course_and_its_alarms(rl_run):
    found = {aspect.name: aspect for aspect in read_health(rl_run)}
    assert list(found) == ["Reward", "Token drift", "Failed tool calls", "Time per step", "Rollout time"]
    failed = found["Failed tool calls"]
    assert (failed.first, failed.last, failed.low, failed.high) == (0.25, 0.0, 0.0, 0.25)
    assert failed.alarms == ("step 1: <b>25%</b> fail",) * 4
    assert found["Rollout time"].last == 0.25
    assert found["Reward"].alarms == ()


def test_the_format_has_the_alarms_on_its_fall_and_on_a_reward_that_jumps_meanwhile(tmp_path):
    rows = [json.dumps({"step": step, "format": 0.9 - 0.1 * step}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    names = ("format_collapse", "reward_hacking", "no_signal")
    alarms = [json.dumps({"step": 2, "alarm": name, "action": "warn", "message": name}) for name in names]
    (tmp_path / ALARMS_FILE).write_text("\n".join(alarms) + "\n", "utf-8")
    [form] = read_health(tmp_path)
    assert (form.name, form.alarms) == ("Valid format", ("step 2: format_collapse", "step 2: reward_hacking"))


def test_the_output_folder_of_a_run_alone_has_a_page(rl_run):
    page = write_run_report(rl_run, rl_run / "report.html").read_text("utf-8")
    assert "Reward: 0.20 at the first step, 0.60 at the last." in page
    assert "Health of reinforcement learning" in page
    assert "&lt;b&gt;25%&lt;/b&gt; fail" in page
    assert "1 more in alarms.jsonl" in page
    assert page.count("<figure>") == 2  # reward, seconds


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ((0.5, 0.6, 0.4, 0.46), "flat"),
        ((0.5, 0.6, 0.4, 0.44), "fell"),
        ((0.5, 0.6, 0.4, 0.54), "flat"),
        ((0.5, 0.6, 0.4, 0.56), "ok"),
        ((0.96, 0.97, 0.9, 0.96), "ok"),  # nothing left to gain
        ((0.2, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.4), "ok"),  # quarters: .5 and .65
    ],
)
def test_a_reward_that_fell_or_stayed_flat_is_not_called_ok(tmp_path, rewards, verdict):
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (reward,) = read_health(tmp_path)
    assert reward.verdict == verdict


def test_a_format_that_stays_is_ok(tmp_path):
    rows = [{"step": step, "format": 0.9} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (aspect,) = read_health(tmp_path)
    assert aspect.verdict == "ok"


def test_groups_that_are_mostly_alike_are_not_called_ok(tmp_path):
    def verdict(*alike):
        rows = [{"step": n, "groups_generated": 10, "groups_alike": a} for n, a in enumerate(alike, start=1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        (aspect,) = read_health(tmp_path)
        return aspect.verdict

    assert [verdict(9, 8), verdict(9, 7)] == ["high", "ok"]
