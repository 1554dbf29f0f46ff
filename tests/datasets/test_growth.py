from collections import Counter

import pytest

from afm.datasets.encyclopaedia import Encyclopaedia
from afm.datasets.encyclopaedia.growth import Growth, expand, least_reads, pages_of, prove
from afm.datasets.encyclopaedia.questions import Hop
from afm.datasets.encyclopaedia.relations import RELATION, EntityKind, find_fact, read_chain
from afm.datasets.mini_world import WorldSplit
from afm.errors import ConfigError

WORLD = Encyclopaedia(2_000, seed=5)
NAME = WORLD.names.name


def test_one_page_that_states_two_facts_is_a_shorter_way():
    """1 states the first fact, 2 both, 3 the second: {2} is enough."""
    assert least_reads([frozenset({1, 2}), frozenset({2, 3})], 1) == [(2,)]
    assert least_reads([frozenset({1}), frozenset({3}), frozenset({3, 4})], 2) == [(1, 3)]
    assert least_reads([frozenset({1}), frozenset({3})], 1) == []


def test_a_list_on_the_next_page_makes_a_claimed_hop_needless():
    person = WORLD.ranges[EntityKind.PERSON][3]
    town = WORLD.object_of(RELATION["birthplace"], person)
    river = WORLD.object_of(RELATION["river"], town)
    path = [Hop(person, "birthplace", NAME(town)), Hop(town, "river", NAME(river))]

    assert f"People born in {NAME(town)} include" in WORLD.page(town).text
    assert pages_of(WORLD, path[0]) == {person, town}
    assert prove(WORLD, path, NAME(river)).reads == 1


def test_a_fact_told_on_one_page_only_needs_that_page():
    person = WORLD.ranges[EntityKind.PERSON][3]
    teacher = WORLD.object_of(RELATION["teacher"], person)
    year = find_fact(WORLD.page(teacher).text, "birth year", NAME(teacher)).gives
    path = [Hop(person, "teacher", NAME(teacher)), Hop(teacher, "birth year", year)]

    proof = prove(WORLD, path, year)
    assert (proof.reads, proof.pages, proof.only) == (2, tuple(sorted((person, teacher))), True)


@pytest.mark.parametrize("depth", [2, 5])
def test_questions_by_depth_are_answered_by_reading_page_after_page(depth):
    for task in expand(WORLD, WorldSplit.TRAIN, 40, seed=0, growth=Growth.DEPTH, depths=[depth]):
        chain = read_chain(task.question)
        name, pages = chain.start, []
        for asks in chain.asks:
            pages.append(str(WORLD.names.number(name)))
            name = find_fact(WORLD.page(int(pages[-1])).text, asks, name).gives
        assert name == task.ground_truth
        assert len(set(pages)) == depth == task.extra_info["hops"]
        assert sorted(pages, key=int) == task.extra_info["proof"]["pages"]


def test_questions_by_width_combine_numbers_of_pages_that_are_all_needed():
    ways = {
        "difference between": lambda numbers: max(numbers) - min(numbers),
        "sum of": sum,
        "largest of": max,
        "smallest of": min,
    }
    seen = Counter()
    for task in expand(
        WORLD, WorldSplit.TRAIN, 60, seed=0, growth=Growth.WIDTH, depths=[1, 2], widths=[2, 3]
    ):
        info = task.extra_info
        ends = [hop for place, hop in enumerate(info["path"], 1) if place % info["depth"] == 0]
        numbers = [
            int(find_fact(WORLD.page(int(hop["passage"])).text, hop["asks"], hop["title"]).gives)
            for hop in ends
        ]
        (words,) = [words for words in ways if words in task.question]
        seen[words] += 1
        assert len(numbers) == info["width"]
        assert str(ways[words](numbers)) == task.ground_truth
        assert info["hops"] == info["width"] * info["depth"]
    assert set(seen) == set(ways)


def test_the_largest_and_the_smallest_stand_anywhere_among_numbers_of_one_kind():
    places, asked = Counter(), Counter()
    for task in expand(WORLD, WorldSplit.TRAIN, 300, seed=0, growth=Growth.WIDTH, depths=[1], widths=[3]):
        ends = task.extra_info["path"]
        if "est of these numbers" in task.question:
            places[[hop["gives"] for hop in ends].index(task.ground_truth)] += 1
            asked[len({hop["asks"] for hop in ends})] += 1
    assert set(asked) == {1}, "a length and a year can be told apart without reading"
    # About 200 of 300, a third of them at each place: 67, with a standard deviation of 7.
    assert sum(places.values()) > 160
    assert [place for place in range(3) if not 0.2 < places[place] / sum(places.values()) < 0.47] == []


def test_by_depth_no_page_but_the_last_states_the_answer():
    world = Encyclopaedia(100, seed=5)
    for task in expand(world, WorldSplit.TRAIN, 40, seed=1, growth=Growth.DEPTH, depths=[4]):
        *before, _ = (int(hop["passage"]) for hop in task.extra_info["path"])
        assert not any(task.ground_truth in world.page(page).contents for page in before)


def test_sets_of_one_seed_share_an_id_only_with_the_question():
    found = {}
    for growth, depths, widths in [
        (Growth.DEPTH, [2], [1]),
        (Growth.DEPTH, [3], [1]),
        (Growth.DEPTH, [2, 3], [1]),
        (Growth.DEPTH, [3, 2], [1]),
        (Growth.WIDTH, [1], [2]),
        (Growth.WIDTH, [1], [3]),
        (Growth.WIDTH, [1], [2, 3]),
    ]:
        for task in expand(WORLD, WorldSplit.TRAIN, 12, seed=0, growth=growth, depths=depths, widths=widths):
            assert found.setdefault(task.id, task.question) == task.question
    assert "-width-1x3-" in task.id


def test_the_same_arguments_give_the_same_questions_and_splits_share_none():
    def questions(split, seed=0):
        found = expand(WORLD, split, 30, seed=seed, growth=Growth.DEPTH, depths=[3])
        return [task.question for task in found]

    assert questions(WorldSplit.TRAIN) == questions(WorldSplit.TRAIN)
    assert questions(WorldSplit.TRAIN) != questions(WorldSplit.TRAIN, seed=1)
    assert not set(questions(WorldSplit.TRAIN)) & set(questions(WorldSplit.HELDOUT))


@pytest.mark.slow
def test_a_world_that_is_too_small_says_so():
    with pytest.raises(ConfigError, match=r"ran out of questions by depth \(depth 9"):
        list(expand(Encyclopaedia(40), WorldSplit.HELDOUT, 50, seed=0, growth=Growth.DEPTH, depths=[9]))
    with pytest.raises(ConfigError, match="widths from 2"):
        list(expand(WORLD, WorldSplit.TRAIN, 1, seed=0, growth=Growth.WIDTH, depths=[1], widths=[1]))
