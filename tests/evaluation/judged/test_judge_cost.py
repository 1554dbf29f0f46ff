import pytest

from afm.evaluation import Sources
from afm.evaluation.prices import Prices
from afm.rewards.judge_endpoint import judge_meter
from afm.trajectory.io import load_records


@pytest.mark.sandbox
async def test_the_judges_tokens_are_kept_and_priced(tmp_path, solver, judge) -> None:
    rewards = {"by_source": {task.data_source: "judge" for task in solver.tasks(5)}, "judge": {"attempts": 2}}
    judge.faults = ["no reply at all"]  # costs nothing by its usage, and is asked again
    metrics = await solver.run(
        tmp_path, 0, 5, rewards=rewards, sources=Sources(prices=Prices(prompt=0, completion=0, judge=2))
    )
    assert len(judge.requests) == 6
    tokens = [one.verdict.judge_tokens for one in load_records(tmp_path / "episodes.jsonl")]
    assert tokens == [100] * 5  # the server counts 100 a request
    assert metrics.usd.parts["judge"] == pytest.approx(100 * 2 / 1e6)


def test_outside_of_a_meter_nothing_is_counted() -> None:
    from afm.rewards.judge_endpoint import charge

    charge(5)
    with judge_meter() as outer:
        charge(1)
        with judge_meter() as inner:
            charge(2)
        charge(4)
    assert (outer.tokens, inner.tokens) == (5, 2)
