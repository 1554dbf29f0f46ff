import gzip
import json
import tracemalloc
from itertools import combinations, islice

import pytest

from afm.datasets.encyclopaedia import Encyclopaedia, corpus_lines, write_corpus, write_encyclopaedia
from afm.datasets.encyclopaedia.relations import (
    ATTRIBUTE_OF,
    LISTED_ON,
    OF_KIND,
    RELATION,
    RELATIONS,
    EntityKind,
    find_fact,
)
from afm.datasets.encyclopaedia.world import Names, Permutation
from afm.datasets.mini_world import WorldSplit
from afm.datasets.schema import read_tasks
from afm.errors import ConfigError

WORLD = Encyclopaedia(400, seed=3)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 1237])
def test_a_permutation_reaches_every_number_once_and_runs_backwards(size):
    order = Permutation(size, "key")
    there = [order(number) for number in range(size)]
    assert sorted(there) == list(range(size))
    assert [order.inverse(number) for number in there] == list(range(size))


@pytest.mark.parametrize("count", [40, 400, 16_000_000])
def test_names_are_two_words_of_disjoint_closed_lists_and_lead_back_to_their_entity(count):
    names = Names(count, "key")
    words = [*names.firsts, *names.seconds]
    assert len(set(words)) == len(words)
    for number in {0, 1, count // 2, count - 1}:
        first, second = names.name(number).split()
        assert first in names.firsts
        assert second in names.seconds
        assert names.number(f"{first} {second}") == number


def test_names_of_a_whole_world_are_unique_and_strangers_have_none():
    names = Names(5000, "key")
    assert len({names.name(number) for number in range(5000)}) == 5000
    assert names.number("Nobody Here") is None
    free = [f"{a} {b}" for a in names.firsts for b in names.seconds if names.number(f"{a} {b}") is None]
    assert len(free) == len(names.firsts) * len(names.seconds) - 5000


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_every_relation_gives_one_object_and_can_be_read_backwards(relation):
    subjects = WORLD.ranges[relation.subject]
    for subject in subjects:
        target = WORLD.object_of(relation, subject)
        assert target in WORLD.ranges[relation.object]
        assert target != subject
        if relation.name != "capital":
            assert subject in WORLD.subjects_of(relation, target)
    if relation.name != "capital":
        listed = [s for o in WORLD.ranges[relation.object] for s in WORLD.subjects_of(relation, o)]
        assert sorted(listed) == list(subjects)


def test_a_capital_lies_in_its_realm():
    for realm in WORLD.ranges[EntityKind.REALM]:
        capital = WORLD.object_of(RELATION["capital"], realm)
        assert WORLD.object_of(RELATION["realm"], capital) == realm


def test_a_page_tells_every_fact_of_its_entity_and_links_every_name():
    for number in range(0, 400, 7):
        page, kind = WORLD.page(number), WORLD.kind(number)
        others = {WORLD.object_of(relation, number) for relation in OF_KIND[kind]}
        others |= {s for relation in LISTED_ON[kind] for s in WORLD.subjects_of(relation, number)}
        assert {link.target for link in page.links} == others
        for link in page.links:
            assert page.text[link.start : link.end] == WORLD.names.name(link.target)
        attribute = ATTRIBUTE_OF[kind]
        assert f"The {attribute.name} of {page.title} is {WORLD.value(attribute, number)}" in page.text
        assert "{" not in page.contents


def test_two_wordings_vary_and_tell_the_same_facts():
    plain, varied = Encyclopaedia(400, wordings=1), Encyclopaedia(400, wordings=2)
    different = 0
    for number in range(400):
        one, two = plain.page(number), varied.page(number)
        assert [link.target for link in one.links] == [link.target for link in two.links]
        different += one.text != two.text
    assert different > 300


def test_worlds_are_fixed_by_their_arguments():
    again, other = Encyclopaedia(400, seed=3), Encyclopaedia(400, seed=4)
    assert [again.page(n) for n in range(50)] == [WORLD.page(n) for n in range(50)]
    assert again.page(9) != other.page(9)


def test_the_last_page_of_ten_million_needs_no_other():
    world = Encyclopaedia(10_000_000)
    page = world.page(9_999_999)
    assert world.names.number(page.title) == 9_999_999
    with pytest.raises(IndexError, match="0 to 9999999"):
        world.page(10_000_000)
    for size in (39, 16_000_001):
        with pytest.raises(ConfigError, match="expected 40 to 16,000,000"):
            Encyclopaedia(size)


def test_a_corpus_has_a_line_a_page_also_compressed(tmp_path):
    write_corpus(WORLD, tmp_path / "corpus.jsonl")
    write_corpus(WORLD, tmp_path / "corpus.jsonl.gz")
    text = (tmp_path / "corpus.jsonl").read_text(encoding="utf-8")
    assert gzip.decompress((tmp_path / "corpus.jsonl.gz").read_bytes()).decode() == text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(400)]
    title, _, body = rows[7]["contents"].partition("\n")
    assert title == f'"{WORLD.page(7).title}"'
    assert body == WORLD.page(7).text


def test_write_makes_corpus_disjoint_questions_and_manifest(tmp_path):
    sizes = {WorldSplit.TRAIN: 200, WorldSplit.RL: 100, WorldSplit.HELDOUT: 40}
    paths = write_encyclopaedia(tmp_path, WORLD, sizes=sizes, seed=1)
    questions = {split: {task.question for task in read_tasks(path)} for split, path in paths.items()}
    assert {split: len(asked) for split, asked in questions.items()} == sizes
    assert not any(a & b for a, b in combinations(questions.values(), 2))
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"] == {"pages": 400, "train": 200, "rl": 100, "heldout": 40}
    assert len((tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()) == 400


def test_a_brief_page_is_a_table_of_the_same_facts_and_names_its_entity_at_the_top_only():
    brief = Encyclopaedia(400, seed=3, brief=True)
    for number in range(0, 400, 7):
        page = brief.page(number)
        title, kind = page.title, brief.kind(number)
        lines = page.text.split("\n")
        assert lines[:2] == [f"{title} is a {kind.value}.", f"Facts about {title}:"]
        facts = [relation.name for relation in OF_KIND[kind]] + [ATTRIBUTE_OF[kind].name]
        for name, line in zip(facts, lines[2:], strict=True):
            fact = find_fact(WORLD.page(number).text, name, title)
            assert line.startswith(f"{name.capitalize()} {fact.gives}")
            assert title not in line
        for link in page.links:
            assert page.text[link.start : link.end] == brief.names.name(link.target)


def test_streaming_a_large_world_keeps_memory_flat():
    lines = corpus_lines(Encyclopaedia(10_000_000))
    tracemalloc.start()
    try:
        written = sum(len(line) for line in islice(lines, 600))
        assert tracemalloc.get_traced_memory()[1] < written / 4
    finally:
        tracemalloc.stop()


def test_a_brief_page_looks_like_this():
    page = Encyclopaedia(2_000, brief=True).page(3)

    assert page.contents == (
        '"Dipo Muvwick"\nDipo Muvwick is a realm.\nFacts about Dipo Muvwick:\n'
        "Capital Dufu Zazmoor.\nRuler Nesa Zivmere.\nArea 7297 square miles."
    )
