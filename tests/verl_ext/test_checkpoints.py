import itertools
import zipfile
from pathlib import Path

import pytest

from verl_ext.checkpoints import (
    TRACKER_FILE,
    begin_checkpoint,
    exported_step,
    incomplete_after,
    resumable_step,
)


def checkpoint(folder: Path, step: int, *, data: bool = True, shards: bool = True) -> Path:
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    if shards:
        store(actor)
    if data:
        store_data(actor.parent)
    return actor


def store_data(place: Path) -> None:
    with zipfile.ZipFile(place / "data.pt", "w") as archive:  # as torch.save writes it
        archive.writestr("data.pkl", "state")


def store(model: Path, workers: int = 1) -> None:
    model.mkdir(exist_ok=True)
    for rank, kind in itertools.product(range(workers), ("model", "optim", "extra_state")):
        (model / f"{kind}_world_size_{workers}_rank_{rank}.pt").touch()


def test_the_newest_complete_checkpoint_is_resumed(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 10).parent / "data.pt"
    (tmp_path / TRACKER_FILE).write_text("10")
    assert resumable_step(tmp_path) == 10
    newest.write_bytes(newest.read_bytes()[:-10])  # cut off
    assert resumable_step(tmp_path) == 2


@pytest.mark.parametrize("tracker", [None, "", "10", "7"])
def test_a_wrong_tracker_is_repaired(tmp_path: Path, tracker: str | None) -> None:
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 10, data=False)
    checkpoint(tmp_path, 2, shards=False)
    if tracker is not None:
        (tmp_path / TRACKER_FILE).write_text(tracker)
    assert resumable_step(tmp_path) == 4
    assert (tmp_path / TRACKER_FILE).read_text() == "4"


def asynchronous(folder: Path, step: int, *, queue: str) -> Path:
    """Save as verl's asynchronous trainers do: the queue last, renamed from ``queue.tmp`` when it is complete."""
    begin_checkpoint(folder / f"global_step_{step}", {}, asynchronous=True)
    place = checkpoint(folder, step).parent
    (place / queue).mkdir()
    (place / queue / "metadata.json").write_text("{}")
    return place


def test_a_checkpoint_of_an_asynchronous_trainer_is_whole_with_its_queue_only(tmp_path: Path) -> None:
    asynchronous(tmp_path, 4, queue="transfer_queue")
    newest = asynchronous(tmp_path, 6, queue="transfer_queue.tmp")
    (tmp_path / TRACKER_FILE).write_text("6")
    assert resumable_step(tmp_path) == 4
    assert (tmp_path / TRACKER_FILE).read_text() == "4"
    assert incomplete_after(tmp_path, 4) == {6: "transfer_queue/, which an asynchronous trainer writes last"}
    (newest / "transfer_queue.tmp").rename(newest / "transfer_queue")
    assert resumable_step(tmp_path) == 6
    assert incomplete_after(tmp_path, 6) == {}


def test_checkpoints_of_a_synchronous_trainer_have_no_queue_whoever_goes_on_from_them(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path / "global_step_4", {}, asynchronous=False)
    checkpoint(tmp_path, 4)
    asynchronous(tmp_path, 6, queue="transfer_queue.tmp")
    assert resumable_step(tmp_path) == 4


def test_a_save_of_a_step_that_is_done_again_is_not_whole_by_what_the_first_one_left(tmp_path: Path) -> None:
    newest = asynchronous(tmp_path, 6, queue="transfer_queue")
    begin_checkpoint(newest, {}, asynchronous=True)
    assert resumable_step(tmp_path) == 0
    assert not (newest / "transfer_queue").exists()
    begin_checkpoint(newest, {}, asynchronous=False)
    store_data(newest)
    assert resumable_step(tmp_path) == 6


@pytest.mark.parametrize("model", ["actor", "critic"])
@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_checkpoint_without_one_workers_file_is_not_complete(tmp_path: Path, model: str, kind: str) -> None:
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 4, shards=False).parent
    store(newest / "actor", workers=2)
    store(newest / "critic", workers=2)
    assert resumable_step(tmp_path) == 4
    (newest / model / f"{kind}_world_size_2_rank_1.pt").unlink()
    assert resumable_step(tmp_path) == 2


def test_a_save_that_another_number_of_workers_did_not_finish_is_no_part_of_the_later_one(
    tmp_path: Path,
) -> None:
    actor = checkpoint(tmp_path, 8)  # by one worker, over what two had begun
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    for name in ("model_world_size_2_rank_0", "model_world_size_2_rank_1", "optim_world_size_2_rank_0"):
        (actor / f"{name}.pt").touch()
    assert resumable_step(tmp_path) == 8
    (actor / "extra_state_world_size_1_rank_0.pt").unlink()
    assert resumable_step(tmp_path) == 0


def test_without_a_complete_checkpoint_training_starts_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, data=False)
    (tmp_path / TRACKER_FILE).write_text("4")
    assert resumable_step(tmp_path) == 0
    assert not (tmp_path / TRACKER_FILE).exists()
    assert resumable_step(tmp_path / "absent") == 0


def test_a_half_written_export_counts_as_none(tmp_path: Path) -> None:
    for content in ("", "{}", '{"global_step": '):
        (tmp_path / "training.json").write_text(content)
        assert exported_step(tmp_path) is None
