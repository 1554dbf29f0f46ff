from dataclasses import replace
from pathlib import Path

import pytest

from afm.errors import UsageError
from afm.planning import Hardware, model_shape
from afm.planning.speed import Assumptions, compute_s, decode_tokens_per_s, forward_flops
from verl_ext.planning import RECIPES, PageAssumptions, main, planning_page
from verl_ext.step_time import step_time
from verl_ext.workload import Placement, Workload

ROOT = Path(__file__).resolve().parents[2]
SHAPE = model_shape("Qwen/Qwen2.5-7B")
assert SHAPE is not None
GIVEN = Assumptions(length_share=1.0, agent_share=0.5, groups=2.0, tail=3.0)


def test_the_page_in_the_docs_is_the_one_the_configurations_give(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    monkeypatch.chdir(ROOT)
    page = planning_page(ROOT / "configs/rl", PageAssumptions())
    assert (ROOT / "docs/planning.md").read_text("utf-8") == page, (
        "run: python -m verl_ext.planning > docs/planning.md"
    )


def test_every_recipe_is_on_the_page() -> None:
    assert {path.stem for path in (ROOT / "configs/rl").glob("*.yaml")} == set(RECIPES)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("mfu=1", "unknown key"),
        ("train_mfu=2", "less than or equal to 1"),
        ("train_mfu", "expected key=value"),
    ],
)
def test_assumptions_that_make_no_sense_are_refused(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        main([word])


def test_a_step_samples_and_trains_what_its_batch_holds(workload: Workload) -> None:
    time = step_time(workload, SHAPE, GIVEN)
    assert time is not None
    assert time.trained == 16 * 8 * 1000
    assert time.sampled == 16 * 8 * 2 * 900 // 2  # twice as many groups as are kept, half of a response
    assert time.at_once == 64  # 256 episodes on 4 engines
    rate = 4 * decode_tokens_per_s(SHAPE, 2, 64, 100 + 450, GIVEN)
    read = 256 * 100 + 256 * 450
    prefill_s = compute_s(forward_flops(SHAPE, read, 1000), 8, 0.4, GIVEN)
    assert time.rollout_s == pytest.approx((time.sampled / rate + prefill_s) * 3)


def test_a_step_of_ppo_passes_more_often(workload: Workload) -> None:
    once = compute_s(forward_flops(SHAPE, 128_000, 1000), 8, 0.35, GIVEN)
    dapo = step_time(workload, SHAPE, GIVEN)
    assert dapo is not None
    assert dapo.training_s == pytest.approx((1 + 4) * once)
    place = Placement(500, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)
    ppo = step_time(replace(workload, critic=place, reference=place, passes=2), SHAPE, GIVEN)
    assert ppo is not None
    assert ppo.training_s == pytest.approx((3 + 4 * 3) * once)


def test_without_group_filtering_every_group_is_used(workload: Workload) -> None:
    time = step_time(replace(workload, filtered=False), SHAPE, GIVEN)
    assert time is not None
    assert time.sampled == 16 * 8 * 450


def test_engines_without_room_have_no_time(workload: Workload) -> None:
    assert step_time(replace(workload, hardware=Hardware(2, 4, 14.0)), SHAPE, GIVEN) is None


def test_engines_on_gpus_of_their_own_work_while_the_trainer_does(workload: Workload) -> None:
    apart = step_time(replace(workload, engine=replace(workload.engine, own_gpus=8)), SHAPE, GIVEN)
    shared = step_time(workload, SHAPE, GIVEN)
    assert apart is not None
    assert shared is not None
    assert (apart.rollout_s, apart.training_s) == (shared.rollout_s, shared.training_s)
    assert apart.seconds == max(apart.rollout_s, apart.training_s)
    assert shared.seconds == shared.rollout_s + shared.training_s
