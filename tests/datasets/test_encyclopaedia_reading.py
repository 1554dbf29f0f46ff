import pytest

from afm.datasets.encyclopaedia import Encyclopaedia, generate
from afm.datasets.encyclopaedia.relations import Chain, StatedFact, find_fact, read_chain
from afm.datasets.mini_world import WorldSplit


@pytest.mark.parametrize(
    ("question", "chain"),
    [
        ("What is the mayor of Belo Karford?", Chain("Belo Karford", ("mayor",))),
        ("What is the birth year of the author of Belo Karford?", Chain("Belo Karford", ("author", "birth year"))),
        ("What is the guild of the friend of the ruler of Ba Ka?", Chain("Ba Ka", ("ruler", "friend", "guild"))),
        ("What is the colour of Belo Karford?", None),
        ("Which was founded earlier: Belo Karford or Ba Ka?", None),
        ("What is the mayor of Belo Karford? And who is that?", None),
    ],
)  # fmt: skip
def test_a_question_by_depth_is_read_from_its_end(question, chain):
    assert read_chain(question) == chain


@pytest.mark.parametrize("style", [{"wordings": 1}, {"wordings": 2}, {"brief": True}], ids=str)
def test_every_fact_of_a_gold_path_stands_on_its_page(style):
    world = Encyclopaedia(300, seed=1, **style)
    for task in generate(world, WorldSplit.TRAIN, 80, seed=0):
        for hop in task.extra_info["path"]:
            fact = find_fact(world.page(int(hop["passage"])).contents, hop["asks"], hop["title"])
            assert fact is not None
            assert fact.gives == hop["gives"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("The mouth of Ba Ka is in Do Re. So.", StatedFact("The mouth of Ba Ka is in Do Re.", "Do Re")),
        ("Of old Ba Ka ends in Do Re.", StatedFact("Ba Ka ends in Do Re.", "Do Re")),
        ("The mouth of Ba Mi is in Do Re.", None),
        ("", None),
    ],
)
def test_a_fact_is_told_in_one_of_its_wordings_or_not_at_all(text, fact):
    assert find_fact(text, "mouth", "Ba Ka") == fact


def test_a_brief_sentence_counts_on_the_page_of_its_entity_only():
    page = Encyclopaedia(300, seed=1, brief=True).page(40)

    assert find_fact(page.contents, "mayor", page.title) is not None
    assert find_fact(page.contents, "mayor", "Ba Ka") is None


def test_a_number_is_told_without_its_unit():
    assert find_fact("The length of Ba Ka is 321 miles.", "length", "Ba Ka").gives == "321"
