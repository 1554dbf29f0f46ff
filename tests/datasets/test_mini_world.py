from dataclasses import replace

import pytest

from afm.cli.recipes import MATH_FROM_BASE
from afm.datasets import read_tasks
from afm.datasets.mini_world import (
    DEFAULT_SIZES,
    STORIES,
    StoryProblem,
    WorldSplit,
    generate,
    read_problem,
    split_of,
    write_world,
)
from afm.errors import ConfigError


@pytest.mark.parametrize("split", list(WorldSplit))
def test_a_world_has_sizes_and_answers_of_the_recipe_and_is_read_back_by_its_wording(split):
    tasks = list(generate(split, DEFAULT_SIZES[split], seed=5))
    assert len(tasks) == {"train": 6000, "rl": 4096, "heldout": 200}[split]
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    assert sum(task.extra_info["steps"] == 1 for task in tasks) == round(0.52 * len(tasks))
    for task in tasks:
        problem = read_problem(task.question)
        assert problem.expression == task.extra_info["expression"]
        assert int(task.ground_truth) == eval(problem.expression) >= 1
        assert split_of(problem.expression) is split
        assert 12 <= problem.start <= 99
        for sign, operand in problem.changes:
            assert 2 <= operand <= 9 if sign == "*" else 1 <= operand <= 99


def test_every_kind_and_every_operator_occurs_often():
    tasks = list(generate(WorldSplit.TRAIN, 1000, seed=0))
    kinds = [task.extra_info["kind"] for task in tasks]

    assert set(kinds) == {story.kind for story in STORIES} == {"collect", "shop", "travel", "farm", "library"}
    assert all(kinds.count(kind) > 140 for kind in set(kinds))
    for sign in "+-*":
        assert sum(sign in task.extra_info["expression"] for task in tasks) > 300


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others():
    first, again, other = (list(generate(WorldSplit.RL, 50, seed=seed)) for seed in (7, 7, 8))

    assert first == again
    assert not {task.question for task in first} & {task.question for task in other}


def test_training_from_a_base_has_its_own_shares_of_one_step_and_of_parentheses(tmp_path):
    MATH_FROM_BASE.make_world(tmp_path, replace(MATH_FROM_BASE.full, rl_tasks=50), 0)
    worlds = {
        split: [task.extra_info for task in read_tasks(tmp_path / f"{split}.jsonl")] for split in WorldSplit
    }
    assert {split: sum(task["steps"] == 1 for task in tasks) for split, tasks in worlds.items()} == {
        "train": 180,
        "rl": 10,
        "heldout": 104,
    }
    grouped = {split: sum("(" in task["expression"] for task in tasks) for split, tasks in worlds.items()}
    assert grouped == {"train": 288, "rl": 16, "heldout": 21}  # 2 of 9 by chance in heldout
    assert {task["steps"] for task in worlds["rl"]} == {1, 2}


STORY = "Tom has 12 apples. Tom finds 30 more. Then the number of apples grows 4 times. How many apples does Tom have?"


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        (STORY, StoryProblem("collect", 12, (("+", 30), ("*", 4)))),
        *((text, None) for text in ("", "What is 2+2?", "Tom has 12 apples.")),
        ("Tom has 12 apples. How many apples does Tom have?", None),
    ],
)
def test_stories_are_read_and_other_texts_are_not(question, problem):
    assert read_problem(question) == problem


@pytest.mark.parametrize(
    ("changes", "expression", "answer"),
    [
        ((("*", 3), ("*", 4)), "20*3*4", 240),
        ((("-", 5), ("-", 6)), "20-5-6", 9),
        ((("*", 3), ("-", 6)), "20*3-6", 54),
        ((("-", 5), ("*", 4)), "(20-5)*4", 60),
    ],
)
def test_parentheses_stand_only_where_the_order_needs_them(changes, expression, answer):
    problem = StoryProblem("collect", 20, changes)
    assert (problem.expression, problem.answer) == (expression, answer)


@pytest.mark.slow
def test_asking_for_more_problems_than_exist_says_so():
    lonely = replace(STORIES[0], who=("Tom",), what=("coins",))

    with pytest.raises(ConfigError, match="ran out of 1-step problems of split 'heldout'"):
        list(generate(WorldSplit.HELDOUT, 5_000, seed=0, stories=[lonely]))


def test_a_written_world_reads_back_equal(tmp_path):
    paths = write_world(tmp_path, seed=9, sizes={WorldSplit.TRAIN: 20, WorldSplit.HELDOUT: 5})

    assert list(read_tasks(paths[WorldSplit.TRAIN])) == list(generate(WorldSplit.TRAIN, 20, seed=9))
    assert list(read_tasks(paths[WorldSplit.HELDOUT])) == list(generate(WorldSplit.HELDOUT, 5, seed=9))
    assert '"seed": 9' in (tmp_path / "manifest.json").read_text()
