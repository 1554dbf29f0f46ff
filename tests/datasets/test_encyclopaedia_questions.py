import re
from collections import Counter
from itertools import combinations

import pytest

from afm.datasets.encyclopaedia import Encyclopaedia, Shape, generate
from afm.datasets.mini_world import WorldSplit
from afm.errors import ConfigError

WORLD = Encyclopaedia(2_000, seed=5)


def tasks(split=WorldSplit.TRAIN, count=400, seed=0, **options):
    return list(generate(WORLD, split, count, seed=seed, **options))


def fact_of(page: str, asks: str) -> str:
    """Return the facts of a page, read only from its text."""
    text = WORLD.page(WORLD.names.number(page)).text
    name, number = r"([A-Z][a-z]+ [A-Z][a-z]+)", r"(\d+)"
    match = re.search(rf"The {asks} of {page} is (?:in )?(?:{name}|{number})", text)
    assert match, f"{page} does not tell its {asks}: {text}"
    return match[1] or match[2]


LISTS = {
    "birthplace of whom": "People born in {} include ",
    "guild of whom": "Members of {} include ",
    "realm of whom": "Towns of {} include ",
    "river of whom": "Towns on {} include ",
}


def listed(page: str, asks: str) -> set[str]:
    text = WORLD.page(WORLD.names.number(page)).text
    names = text.split(LISTS[asks].format(page))[1].split(".")[0]
    return set(re.split(", | and ", names))


def test_chains_lead_from_the_named_entity_to_the_answer_by_what_the_pages_say():
    for task in tasks(shapes=[Shape.CHAIN]):
        path = task.extra_info["path"]
        relations, start = re.fullmatch(r"What is the (.*) of (\w+ \w+)\?", task.question).groups()
        assert [hop["asks"] for hop in path] == relations.split(" of the ")[::-1]
        here = start
        for hop in path:
            assert hop["title"] == here
            assert hop["passage"] == str(WORLD.names.number(here))
            here = fact_of(here, hop["asks"])
            assert hop["gives"] == here
        assert task.ground_truth == here
        assert len(path) == task.extra_info["hops"]


def test_comparisons_name_the_extreme_one():
    for task in tasks(shapes=[Shape.COMPARISON], hops=[2, 3, 4]):
        least = re.search(r"earlier|shorter|smaller", task.question)
        asked = task.question.partition(": ")[2].rstrip("?")
        found = {}
        for branch in re.split(", | or ", asked):
            relation = re.fullmatch(r"the (\w+) of (\w+ \w+)", branch)
            page = fact_of(relation[2], relation[1]) if relation else branch
            [attribute] = [
                hop["asks"]
                for hop in task.extra_info["path"]
                if hop["title"] == page and hop["gives"].isdecimal()
            ]
            found[page] = int(fact_of(page, attribute))
        pick = min if least else max
        assert task.ground_truth == pick(found, key=found.get)
        assert len(set(found.values())) == len(found)


def test_intersections_have_exactly_one_solution_on_their_two_pages():
    for task in tasks(shapes=[Shape.INTERSECTION], hops=[2, 3, 4]):
        one, two, *more = task.extra_info["path"]
        common = listed(one["title"], one["asks"]) & listed(two["title"], two["asks"])
        assert common == {one["gives"]} == {two["gives"]}
        here = one["gives"]
        for hop in more:
            assert hop["title"] == here
            here = fact_of(here, hop["asks"])
        assert task.ground_truth == here


def test_hops_are_dealt_evenly_and_every_shape_asked_for_occurs():
    made = tasks(shapes=list(Shape))
    counts = Counter(task.extra_info["hops"] for task in made)
    assert counts == {1: 100, 2: 100, 3: 100, 4: 100}
    shapes = Counter((task.extra_info["shape"], task.extra_info["hops"]) for task in made)
    assert len(shapes) == 1 + 3 * 3


def test_no_page_of_a_gold_path_is_read_twice():
    for task in tasks(shapes=list(Shape)):
        titles = [hop["title"] for hop in task.extra_info["path"]]
        assert len(set(titles)) == len(titles)
        assert task.extra_info["shape"] == "comparison" or task.ground_truth not in titles


def test_splits_never_name_the_same_entities_whatever_the_seeds():
    asked = {
        split: {
            frozenset(re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", task.question[5:]))
            for seed in (0, 1)
            for task in tasks(split, 300, seed=seed)
        }
        for split in WorldSplit
    }
    assert not any(one & other for one, other in combinations(asked.values(), 2))


def test_questions_and_ids_are_distinct_and_repeatable():
    first = tasks()
    assert len({task.question for task in first}) == len({task.id for task in first}) == 400
    assert first == tasks()
    assert first != tasks(seed=1)


def test_a_world_that_is_too_small_says_so():
    with pytest.raises(ConfigError, match="a world of 40 pages ran out of 1-hop questions"):
        list(generate(Encyclopaedia(40), WorldSplit.HELDOUT, 500, seed=0, hops=[1]))


@pytest.mark.parametrize(
    ("hops", "shapes"), [([5], list(Shape)), ([1], [Shape.COMPARISON]), ([], list(Shape))]
)
def test_impossible_wishes_are_refused(hops, shapes):
    with pytest.raises(ConfigError, match="expected hops from 1 to 4"):
        tasks(hops=hops, shapes=shapes)
