import json
import math

import pytest

from afm.evaluation.curves import read_curves, score_curves
from afm.evaluation.failures import Scan
from afm.evaluation.metrics import summarise
from afm.evaluation.page import Curve, Series, draw
from afm.evaluation.report_input import StageResult


def curves_of(folder, name, *rows, tail=""):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return read_curves(folder)


def test_the_loss_comes_from_the_trainers_log(tmp_path) -> None:
    rows = [{"current_steps": 10 * i, "loss": 3.0 / i, "lr": 1e-3} for i in range(1, 4)]
    rows.insert(2, {"current_steps": 30, "loss": 9.0})  # a resumed training logs its steps again
    end = {
        "current_steps": 30,
        "total_steps": 30,
    }  # the trainer's last row repeats the last step, without its loss
    (curve,), notes = curves_of(tmp_path, "sft/trainer_log.jsonl", *rows, end, tail='{"curr')
    assert curve.title == "Loss of fine-tuning"
    assert curve.series == (Series("loss", (10.0, 20.0, 30.0), (3.0, 1.5, 1.0)),)
    assert curve.y_log
    assert curve.y_label == "nats per token, log scale"
    assert notes == []


@pytest.mark.parametrize(
    ("last", "finished", "shown"),
    [(40, None, ""), (30, "2026-01-01", ""), (30, None, "It stopped at step 30 of 40, or is still running.")],
)
def test_an_interrupted_fine_tuning_says_where_it_stopped(last, finished, shown, tmp_path) -> None:
    (tmp_path / "sft_manifest.json").write_text(json.dumps({"finished": finished}, indent=2))
    rows = [{"current_steps": step, "total_steps": 40, "loss": 1.0} for step in (10, last)]
    (curve,), notes = curves_of(tmp_path, "trainer_log.jsonl", *rows)
    assert curve.caption.endswith(f"masked. {shown}".rstrip())
    sentence = f"trainer_log.jsonl: {shown} Run the same `afm sft` again to resume."
    assert notes == [sentence] * bool(shown)


def test_our_rl_metrics_give_every_curve(tmp_path) -> None:
    names = ("reward", "correct", "tool_share", "entropy", "response_tokens", "agent_tokens")
    names += ("groups_generated", "groups_kept", "clip_fraction")
    rows = ({"step": i} | dict.fromkeys(names, 0.5) for i in (1, 2))
    curves, notes = curves_of(tmp_path, "rl/metrics.jsonl", *rows)
    assert notes == []
    assert sorted(line.label for curve in curves for line in curve.series) == sorted(
        ["reward", "answer right", "share", "share", "entropy", "response", "agent", "generated", "kept"]
    )
    reward = next(curve for curve in curves if curve.title == "Reward")
    assert not reward.y_share
    right = next(curve for curve in curves if curve.title == "Right answers")
    assert right.y_share
    assert all(curve.y_label for curve in curves)


def test_validations_have_a_curve_with_a_point_for_each(tmp_path) -> None:
    validated = {"validation_solved": 0.25, "validation_reward": -0.5}
    rows = [{"step": step} | (validated if step % 2 == 0 else {}) for step in (1, 2, 3, 4)]
    (reward, solved), _ = curves_of(tmp_path, "rl/metrics.jsonl", *rows)
    assert reward.series == (Series("reward", (2.0, 4.0), (-0.5, -0.5)),)
    assert solved.series == (Series("solved", (2.0, 4.0), (0.25, 0.25)),)
    assert (reward.y_share, solved.y_share) == (False, True)


def test_missing_series_are_noted_and_the_engines_own_names_help_out(tmp_path) -> None:
    data = {"critic/score/mean": 0.5, "actor/entropy": math.nan, "response_length/mean": 90}
    rows = {"step": 1, "data": data}, {"step": 2, "engine": {"critic/score/mean": 0.75}}
    curves, notes = curves_of(tmp_path, "rl/metrics.jsonl", *rows)
    assert [curve.title for curve in curves] == ["Reward", "Response length"]
    assert curves[0].series == (Series("reward", (1.0, 2.0), (0.5, 0.75)),)
    assert "rl/metrics.jsonl holds no series 'entropy'." in notes
    assert "rl/metrics.jsonl holds no series 'groups_generated'." in notes


def test_a_picture_is_a_png_for_each_theme_and_says_what_it_shows() -> None:
    xs = tuple(float(x) for x in range(100))
    curve = Curve("Loss", "step", (Series("loss", xs, tuple(2.0 - x / 100 for x in xs)),))
    picture = draw(curve)
    assert all(one.startswith("data:image/png;base64,iVBORw0KGgo") for one in (picture.light, picture.dark))
    assert picture.light != picture.dark
    assert picture.alt == "Loss: loss from 2 at 0 to 1.01 at 99"
    assert draw(curve) == picture
    # 100 points: two on either side and the point itself.
    assert picture.caption == " Faint: the logged values. Strong: their mean over 5 neighbouring points."


def test_a_training_of_several_agents_has_a_curve_for_each(tmp_path) -> None:
    def row(step, math_rate, code_rate):
        engine = {"agent/math/acc": math_rate, "agent/code/acc": code_rate}
        return {"step": step, "by_agent": {"math": {}, "code": {}}, "engine": engine}

    (curve,), _ = curves_of(tmp_path, "metrics.jsonl", row(1, 0.5, 0.0), row(2, 0.75, 0.25))
    assert curve.title == "Solved by agent"
    assert curve.series == (
        Series("code", (1.0, 2.0), (0.0, 0.25)),
        Series("math", (1.0, 2.0), (0.5, 0.75)),
    )


def test_stages_are_compared_over_the_same_budgets(record) -> None:
    metrics = summarise([record("a", 1.0)])
    scans = Scan((), (40.0, 60.0), (0.1, 0.5)), Scan((), (80.0,), (0.75,))
    stages = [StageResult(name, metrics, scan=scan) for name, scan in zip("ab", scans, strict=True)]
    curve = next(curve for curve in score_curves(stages) if curve.title == "Solved within a budget")
    assert curve.stepped
    assert curve.series == (
        Series("a", (38.0, 40.0, 60.0, 82.0), (0.0, 0.1, 0.5, 0.5)),
        Series("b", (38.0, 80.0, 82.0), (0.0, 0.75, 0.75)),
    )


def test_a_picture_of_some_runs_says_how_many_it_leaves_out(record) -> None:
    metrics = summarise([record("a", 1.0)])
    scan = Scan((), (40.0, 60.0), (0.1, 0.5))
    for runs, end in ((4, "that passed at all."), (13, "Only the first 4 of 13 runs are drawn.")):
        stages = [StageResult(f"run_{i}", metrics, scan=scan) for i in range(runs)]
        curves = list(score_curves(stages))
        assert [line.label for line in curves[0].series] == ["run_0", "run_1", "run_2", "run_3"]
        assert curves[0].caption.endswith(end)
