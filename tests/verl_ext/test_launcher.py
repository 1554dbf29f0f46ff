"""Messages about a run that ended early."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from verl_ext.alarms import ALARMS_FILE, Alarms, Watch
from verl_ext.checkpoints import CHECKPOINT_REQUEST
from verl_ext.failures import write_loss
from verl_ext.launcher import LOG_FILE, Run
from verl_ext.settings import RlSettings

DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: TaskRunnerV1\n\tactor_id: 0a\n\tpid: 12\n\tip: 10.0.0.1\n"
    "The actor is dead because its worker process has died.\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = RlSettings(agent="math", model="m", output_dir=tmp_path, train_files=("rows.parquet",))
    (tmp_path / LOG_FILE).write_text("an early line\n")
    return Run(settings)


def checkpoint(folder: Path, step: int) -> None:
    actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "extra_state_world_size_1_rank_0.pt").touch()
    with zipfile.ZipFile(actor.parent / "data.pt", "w") as archive:
        archive.writestr("data.pkl", "state")


def metrics(folder: Path, *steps: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


@pytest.fixture
def explained(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the message about the end of the trainer."""

    def explain(status: int = 1, log_begins: int = 0) -> str:
        run._explain(status, log_begins)
        return capsys.readouterr().err

    return explain


def test_a_loss_is_one_sentence_with_the_last_checkpoint_and_what_is_done_again(
    explained: Callable[..., str], tmp_path: Path
) -> None:
    checkpoint(tmp_path, 4)
    metrics(tmp_path, 1, 2, 3, 4, 5, 6)
    write_loss(tmp_path, "lost the rollout engine (process 7 on 10.0.0.1): it was killed or crashed")
    assert explained() == (
        "lost the rollout engine (process 7 on 10.0.0.1): it was killed or crashed; the last checkpoint is of step 4: "
        "the same command continues with step 5 and repeats 2 of the finished steps\n"
    )


def test_a_lost_node_has_to_be_replaced_first(explained: Callable[..., str], tmp_path: Path) -> None:
    write_loss(tmp_path, "lost the node 10.0.0.2 (1 x training worker)")
    assert explained() == (
        "lost the node 10.0.0.2 (1 x training worker); no checkpoint was saved yet: once the node is replaced, the same "
        "command starts from the beginning\n"
    )


def test_a_run_stopped_before_its_first_checkpoint_is_not_said_to_continue(run: Run, tmp_path: Path) -> None:
    assert run._goes_on() == "no checkpoint was saved yet: the same command starts from the beginning"
    checkpoint(tmp_path, 4)
    assert run._goes_on() == "the last checkpoint is of step 4: the same command continues with step 5"


def test_the_log_tells_of_a_trainer_that_died_or_was_killed_in_this_start(
    explained: Callable[..., str], tmp_path: Path
) -> None:
    log = tmp_path / LOG_FILE
    assert explained(137).startswith("the trainer's first process was killed (signal 9)")
    log.write_text(DIED)
    assert explained().startswith("lost the trainer (process 12 on 10.0.0.1): it was killed")
    log.write_text(f"{DIED}ValueError: of this start\n")
    assert explained(1, len(DIED)) == (
        f"the trainer ended with status 1\nlast lines of {log}:\nValueError: of this start\n\n"
    )


def test_a_token_that_the_cluster_rejects_is_one_line_with_the_next_step(
    explained: Callable[..., str], tmp_path: Path
) -> None:
    refusal = (
        "ray.exceptions.AuthenticationError: InvalidAuthToken: the token is wrong. Ensure that the token ..."
    )
    (tmp_path / LOG_FILE).write_text(f"Traceback (most recent call last):\n  File ...\n{refusal}\n")
    message = explained()
    assert message.startswith(
        "error: the Ray cluster None rejected the token; expected the token that its head"
    )
    assert "RAY_AUTH_TOKEN_PATH" in message
    assert message.count("\n") == 1


def test_a_machine_too_busy_for_ray_is_one_line_with_the_next_step(
    explained: Callable[..., str], tmp_path: Path
) -> None:
    fault = (
        "Exception: The current node timed out during startup. This could happen because some of the raylet"
    )
    (tmp_path / LOG_FILE).write_text(f"Traceback (most recent call last):\n  File ...\n{fault}\n")
    message = explained()
    assert message.startswith("error: Ray did not start on this machine within the 30 s")
    assert message.endswith(f"run the same command again when it is idle (log: {tmp_path / LOG_FILE})\n")


def test_a_run_with_fewer_steps_than_asked_for_says_so_in_one_line(run: Run, tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    metrics(tmp_path, 1, 2, 3, 4, 5)
    message = run._ended_early(run._reached(), 8)
    assert message.startswith("warning: the run ended after step 5 of 8: verl dropped rows")
    assert message.endswith("; the last checkpoint is of step 4 (trainer.save_freq)")
    assert "checkpoint" not in run._ended_early(4, 8)
    assert "\n" not in message


def test_an_alarm_ends_the_run_once_the_checkpoint_it_asks_for_is_saved(run: Run, tmp_path: Path) -> None:
    tail = {"above": 2.0, "seconds": 1.0, "steps": 1, "action": "stop"}
    watch = Watch(Alarms.model_validate({"long_tail": tail}), [], tmp_path / ALARMS_FILE)
    row = {"reward": 0.5, "episode_seconds": 20.0, "slowest_episode_seconds": 90.0}
    request = tmp_path / CHECKPOINT_REQUEST
    assert not run._report(watch, row | {"step": 1}, 30)
    assert request.exists()
    assert not run._report(watch, row | {"step": 2}, 30)
    checkpoint(tmp_path, 2)
    assert run._report(watch, row | {"step": 3}, 30)
    assert not run._report(watch, row | {"step": 30}, 30)  # nothing is left to stop


def test_the_saved_settings_name_the_harness_by_paths_that_hold_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"agent": "math", "model": "m", "output_dir": "out", "train_files": ("rows.parquet",)}
    settings = RlSettings.model_validate(words | {"harness": {"team": "team.yaml"}})
    Path("out").mkdir()
    Run(settings)._write_settings({"": "own"})
    saved = yaml.safe_load(Path("out/rl_config.yaml").read_text("utf-8"))
    assert saved["harness"]["team"] == str(tmp_path / "team.yaml")
