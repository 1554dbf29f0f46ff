import csv
import json
from pathlib import Path

import pytest

from afm.errors import UsageError
from llamafactory_patch import output
from llamafactory_patch.config import resolve
from llamafactory_patch.grid import grid_points, run_grid

pytest.importorskip("llamafactory")

CONFIG = Path(__file__).parents[2] / "configs/tiny/sft/math.yaml"


def test_a_grid_is_every_combination_each_in_a_folder_of_its_own(tmp_path):
    points = grid_points(CONFIG, [f"output_dir={tmp_path}", "seed=7"], ["lr=1e-5,2e-5", "batch=1,2,4"])
    assert len(points) == 6
    assert points[1].values == {"learning_rate": "1e-5", "per_device_train_batch_size": "2"}
    assert points[1].folder == tmp_path / "learning_rate=1e-5,per_device_train_batch_size=2"
    config = resolve(CONFIG, points[1].overrides).config
    assert (config["learning_rate"], config["per_device_train_batch_size"], config["seed"]) == (1e-5, 2, 7)


def test_spellings_of_one_value_are_one_training_and_different_values_never_share_a_folder(tmp_path):
    base = [f"output_dir={tmp_path}"]
    same = grid_points(CONFIG, base, ["lr=1e-5,1.0e-5,0.00001,2e-5"])
    assert [point.values["learning_rate"] for point in same] == ["1e-5", "2e-5"]
    models = grid_points(CONFIG, base, ["model_name_or_path=a/b,a_b,a%2Fb"])
    assert [point.folder.name for point in models] == [
        "model_name_or_path=a%2Fb",
        "model_name_or_path=a_b",
        "model_name_or_path=a%252Fb",
    ]


@pytest.mark.parametrize(
    "axes", [["lr"], ["lr="], ["lr=1e-5", "learning_rate=2e-5"], ["output_dir=a,b"], ["lrr=1,2"], ["lr=[1,2"]]
)
def test_a_wrong_axis_stops_the_grid_before_it_begins(axes, tmp_path):
    with pytest.raises(UsageError):
        run_grid(CONFIG, [f"output_dir={tmp_path / 'out'}"], axes)
    assert not (tmp_path / "out").exists()


def test_finished_points_are_not_repeated_and_failures_do_not_stop_the_rest(tmp_path, tiny, capsys):
    """The first point is finished; the second folder is a file; the third holds another training."""
    overrides = [f"output_dir={tmp_path}", f"model_name_or_path={tiny}", f"dataset_dir={tmp_path}"]
    axes = ["lr=1e-3,3e-3,5e-3"]
    done, blocked, taken = grid_points(CONFIG, overrides, axes)
    (tmp_path / "dataset_info.json").write_text('{"math": {"file_name": "m.json"}}', encoding="utf-8")
    (tmp_path / "m.json").write_text("[]", encoding="utf-8")
    blocked.folder.write_text("in the way", encoding="utf-8")
    for folder in (done.folder, taken.folder):
        folder.mkdir()
        output.finish(resolve(CONFIG, [*done.overrides, f"output_dir={folder}"]), seconds=2.0)
    history = '{"current_steps": 9, "loss": 0.5}\n{"current_s'  # the disk was full
    (done.folder / "trainer_log.jsonl").write_text(history, encoding="utf-8")
    (done.folder / "all_results.json").write_text(json.dumps({"train_loss": 0.75}), encoding="utf-8")

    assert run_grid(CONFIG, overrides, axes, echo=False) == 1
    assert "is finished" in capsys.readouterr().out
    with (tmp_path / "grid.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["learning_rate"] for row in rows] == ["1e-3", "3e-3", "5e-3"]
    assert [row["state"] for row in rows] == ["finished", "failed", "failed"]
    wanted = {"steps": "9", "last_loss": "0.5", "train_loss": "0.75", "seconds": "2.0", "exit_status": "0"}
    assert {key: rows[0][key] for key in wanted} == wanted
    assert "learning_rate: 0.001 -> 0.005" in rows[2]["error"]
