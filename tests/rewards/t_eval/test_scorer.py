"""Each kind of item, right, partly right and wrong; replies as models write them."""

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.rewards import Sample, load_reward
from afm.rewards.t_eval_plans import literal, names_alone, plan_of_text
from afm.trajectory.types import Author, Segment

SPEC = load_agent("configs/eval/agents/chat.yaml")
MARKS = {
    "thought_start": "goal: ",
    "thought_end": "\n\n",
    "action_start": "name: ",
    "action_end": "\n\n",
    "args_start": "args: ",
    "args_end": "\n",
}
CALL = {"action": "Home.search", "args": {"place": "Berlin", "beds": 2}}
GOLD = {"thought": "Search.", "name": "Home.search", "args": {"place": "Berlin"}}
PLAN = [
    {"id": 0, "prev": [], "name": "Home.search", "args": {"place": "Berlin"}},
    {"id": 1, "prev": [0], "name": "FinishAction", "args": {}},
]


async def judged(reply, kind, form, gold, *, embeddings="words", **item):
    """Score and whether the reply can be read."""
    told = {"kind": kind, "form": form, "template": {}, "tools": [], **item}
    segments = (Segment(Author.AGENT, reply), Segment(Author.ENVIRONMENT, "Home.search"))
    sample = Sample(SPEC, f"t_eval_{kind}_{form}", "q", segments, gold, extra_info={"t_eval": told})
    reward = load_reward({"formula": "correct", "t_eval": {"embeddings": embeddings}})
    try:
        verdict = await reward.score(sample)
    finally:
        await reward.close()
    return verdict.score, verdict.parts["format"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"goal": "g", "name": "Home.search", "args": {"place": "Berlin", "beds": 2}}', (1.0, 1.0)),
        (
            "```json\n{'goal': 'g', 'name': 'Home.search', 'args': {'place': 'Berlin', 'beds': 2}}\n```",
            (1.0, 1.0),
        ),
        # Two of three parts: (1 + 2/3) / 2. "2" is not 2.
        (
            '{"goal": "g", "name": "Home.search", "args": {"place": "Berlin", "beds": "2"}}',
            ((1 + 2 / 3) / 2, 1.0),
        ),
        ('{"goal": "g", "name": "Home.find", "args": "place"}', (0.5, 1.0)),
        ('{"name": "Home.search", "args": {"place": "Berlin", "beds": 2}}', (0.0, 0.0)),
        ("[" * 90_000, (0.0, 0.0)),
    ],
)
async def test_instructions_in_json(reply, expected) -> None:
    template = {"thought": "goal", "action": "name", "args": "args"}
    assert await judged(reply, "instruct", "json", CALL, template=template) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("goal: g\n\nname: Home.search\n\nargs: {'place': 'Berlin', 'beds': 2}\n.", (1.0, 1.0)),
        # The published program strips a reply before it looks for the mark at its end.
        ("goal: g\n\nname: Home.search\n\nargs: {'place': 'Berlin', 'beds': 2}\n", (0.0, 0.0)),
        ("Sure!\ngoal: g\n\nname: Home.search\n\nargs: place=Berlin\n.", ((1 + 1 / 3) / 2, 1.0)),
        ("name: Home.search\n\nargs: {'place': 'Berlin', 'beds': 2}\n", (0.0, 0.0)),
    ],
)
async def test_instructions_in_marked_text(reply, expected) -> None:
    assert await judged(reply, "instruct", "str", CALL, template=MARKS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reply", "form", "expected"),
    [
        ('{"thought": "t", "name": "Home.search", "args": {}}', "json", (1.0, 1.0)),
        ('The call: {"name": "Home.find"} as asked', "json", (0.0, 1.0)),
        ("Home.search", "json", (0.0, 0.0)),
        ("Home.search", "str", (1.0, 1.0)),
        ("I use Home.search, then Home.price.", "str", (0.0, 1.0)),
        ("Home.search or FinishAction", "str", (0.0, 1.0)),
    ],
)
async def test_retrieval(reply, form, expected) -> None:
    assert await judged(reply, "retrieve", form, GOLD) == expected


@pytest.mark.parametrize(
    ("reply", "form", "expected"),
    [
        ('{"name": "x", "args": {"place": "Berlin"}}', "json", (1.0, 1.0)),
        ('{"name": "x", "args": {"place": "Rome"}}', "json", (0.0, 1.0)),
        ('{"name": "x", "args": "place Berlin"}', "json", (0.0, 1.0)),
        ("nothing", "json", (0.0, 0.0)),
        ("{'place': 'Berlin'}", "str", (1.0, 1.0)),
    ],
)
async def test_understanding(reply, form, expected) -> None:
    assert await judged(reply, "understand", form, GOLD) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reply", "form", "expected"),
    [
        ("""[{"id": 0, "name": "Home.search", "args": "{'place': 'Berlin'}"}]""", "json", (1.0, 1.0)),
        ("""[{"id": 0, "name": "Home.search"}]""", "json", (0.0, 0.0)),
        # "Use Home.search to find a place in Berlin" against "{'place': 'Berlin'}": 2 of sqrt(9) * sqrt(2) words alike.
        ("Use Home.search to find a place in Berlin", "str", (1.0, 1.0)),
        ("I do not know.", "str", (0.0, 0.0)),
    ],
)
async def test_plans(reply, form, expected) -> None:
    assert await judged(reply, "plan", form, PLAN, tools=["Home.search"]) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["plan", "reason"])
async def test_without_a_sentence_model_plans_and_reasons_are_refused(kind, tmp_path) -> None:
    gold = PLAN if kind == "plan" else GOLD
    with pytest.raises(ConfigError, match=r"rewards\.t_eval\.embeddings=DIR"):
        await judged("Home.search", kind, "str", gold, embeddings=None, tools=["Home.search"])
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ConfigError, match="holds no sentence-transformers model"):
        await judged("Home.search", kind, "str", gold, embeddings=str(tmp_path), tools=["Home.search"])


async def test_the_other_abilities_need_no_sentence_model() -> None:
    assert await judged("Home.search", "retrieve", "str", GOLD, embeddings=None) == (1.0, 1.0)
    assert await judged("So: C, it failed", "review", "str", {"answer": "C"}, embeddings=None) == (1.0, 1.0)


async def test_a_row_that_is_no_item_has_no_score() -> None:
    reward = load_reward({"formula": "correct"})
    sample = Sample(SPEC, "t_eval_plan_json", "q", (Segment(Author.AGENT, "x"),), "gold")
    verdict = await reward.score(sample)
    assert verdict.abstained
    assert "reader: t_eval" in verdict.evidence


def test_steps_of_a_text_are_the_first_tools_of_its_sentences() -> None:
    steps = plan_of_text("First B.two, not A.one. Then A.one\nDone", ["A.one", "B.two"])
    assert [name for name, _ in steps] == ["B.two", "A.one"]
    assert names_alone("A.one", "A.one")


@pytest.mark.parametrize("text", ["", "{", "__import__('os')", "(" * 5000, "x" * 200_000, "{1: {[]: 2}}"])
def test_what_is_no_value_is_refused_and_never_run(text) -> None:
    with pytest.raises(ValueError, match=r"neither JSON|longer than"):
        literal(text)
