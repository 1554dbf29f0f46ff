"""Draws of questions: by how often they are solved, and the same after a restart."""

from collections import Counter
from itertools import islice
from types import ModuleType, SimpleNamespace

import pytest

from afm.errors import ConfigError
from verl_ext.compose import overrides_of
from verl_ext.curriculum import Curriculum, Difficulty, running
from verl_ext.patches import draw_by_difficulty
from verl_ext.settings import RlSettings


def difficulty(questions=10, **rules):
    return Difficulty([f"q{number}" for number in range(questions)], Curriculum(**rules), seed=0)


def drawn(sampler, count):
    return list(islice(iter(sampler), count))


def test_a_question_rests_until_half_of_the_others_were_asked():
    order = drawn(difficulty(), 200)
    assert all(len(set(order[at : at + 5])) == 5 for at in range(196))
    assert set(order) == set(range(10))


def test_what_is_sometimes_solved_is_asked_more_often_than_what_never_or_always_is():
    sampler = difficulty(100, retire_after=0)
    rates = {0: 0.0, 1: 0.5, 2: 1.0}
    for number in range(100):
        for _ in range(8):
            sampler.record(f"q{number}", rates[number % 3])
    counts = Counter(position % 3 for position in drawn(sampler, 3000))
    assert counts[1] > 1.4 * counts[0]
    assert counts[1] > 1.4 * counts[2]
    assert min(counts.values()) > 200  # the floor: nothing is given up


def test_questions_that_every_sample_solves_twice_in_a_row_are_asked_no_more():
    sampler = difficulty(4)
    for name, solved in (("q0", 1.0), ("q0", 0.5), ("q0", 1.0), ("q0", 1.0), ("q1", 1.0)):
        sampler.record(name, solved)
    assert set(drawn(sampler, 50)) == {1, 2, 3}
    assert sampler.metrics()["curriculum/retired"] == 1
    for name in ("q1", "q2", "q3") * 2:
        sampler.record(name, 1.0)
    assert set(drawn(sampler, 50)) == {0, 1, 2, 3}  # all are retired, so all come back


def test_metrics_count_questions_asked_and_average_their_solve_rates():
    sampler = difficulty()
    assert set(sampler.metrics().values()) == {0.0}
    for name, solved in (("q1", 0.0), ("q2", 1.0), ("q2", 0.5), ("of another data set", 1.0)):
        sampler.record(name, solved)
    assert sampler.metrics() == {  # (0 + (1 + 0.5) / 2) / 2
        "curriculum/asked": 2, "curriculum/retired": 0, "curriculum/solve_rate": 0.375
    }  # fmt: skip


def test_a_checkpoint_brings_back_what_would_have_been_drawn():
    first = difficulty(50)
    drawn(first, 20)
    for number in range(20):
        first.record(f"q{number}", number % 3 / 2)
    state = first.state_dict()
    second = difficulty(50)
    second.load_state_dict(state)
    assert drawn(second, 100) == drawn(first, 100)
    with pytest.raises(ConfigError, match="has 50 questions, but the data has 49"):
        difficulty(49).load_state_dict(state)
    with pytest.raises(ConfigError, match="differ from the data"):
        Difficulty([f"other{number}" for number in range(50)], Curriculum(), 0).load_state_dict(state)


def test_torchdatas_loader_keeps_the_state():
    loader_of = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader(sampler):
        return loader_of(list(range(50)), batch_size=4, sampler=sampler, num_workers=0)

    sampler = difficulty(50)
    before = loader(sampler)
    batches = iter(before)
    for _ in range(3):
        for position in next(batches).tolist():
            sampler.record(f"q{position}", 1.0)
    state = before.state_dict()
    rest = [next(batches).tolist() for _ in range(5)]
    again = difficulty(50)
    after = loader(again)
    after.load_state_dict(state)
    batches = iter(after)
    assert [next(batches).tolist() for _ in range(5)] == rest
    assert again.metrics()["curriculum/asked"] == 12


def rows(*infos):
    return SimpleNamespace(dataframe={"extra_info": list(infos)})


def test_verls_sampler_is_replaced_only_when_asked(monkeypatch):
    monkeypatch.setattr("verl_ext.curriculum._running", [])
    module = ModuleType("trainer_base")
    module.create_rl_sampler = lambda config, dataset: "verl's own"
    draw_by_difficulty.apply(module)
    draw_by_difficulty.apply(module)
    assert module.create_rl_sampler({}, rows()) == "verl's own"
    config = {"curriculum": {"floor": 0.1}, "seed": 3}
    made = module.create_rl_sampler(config, rows({"index": 0}, {"index": "b"}))
    assert running() is made
    assert len(made) == 2
    for second, message in (
        ({"index": 1}, "1 of 2 questions share"),
        ({}, "row 1 .* has no extra_info.index"),
    ):
        with pytest.raises(ConfigError, match=message):
            module.create_rl_sampler({"curriculum": {}}, rows({"index": 1}, second))


def test_the_settings_reach_verl():
    given = {"agent": "math", "model": "m", "output_dir": "o", "train_files": "a.parquet"}
    assert not any("curriculum" in key for key in overrides_of(RlSettings.model_validate(given)))
    found = overrides_of(RlSettings.model_validate(given | {"curriculum": {"retire_after": 3}}))
    assert (found["+data.curriculum.retire_after"], found["+data.curriculum.floor"]) == (3, 0.05)
    assert found["data.dataloader_num_workers"] == 0


def test_what_is_known_of_a_question_holds_for_its_agent_alone():
    def sampler(*agents, **state):
        made = Difficulty(["a", "b"], Curriculum(), 0, agents)
        if state:
            made.load_state_dict(state)
        return made

    before = sampler("math", "code")
    for name in ("a", "b"):
        before.record(name, 1.0)
    after = sampler("math", "math", **before.state_dict())
    assert after.metrics() == {"curriculum/asked": 1, "curriculum/retired": 0, "curriculum/solve_rate": 1}
    assert sampler("math", "code", **before.state_dict()).metrics()["curriculum/asked"] == 2
    single = sampler()
    single.record("a", 0.5)
    assert "agents" not in single.state_dict()
    after.load_state_dict(single.state_dict())
    assert after.metrics()["curriculum/asked"] == 1  # of a run before there were several
