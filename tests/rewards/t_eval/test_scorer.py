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


KEYS = {"thought": "goal", "action": "name", "args": "args"}
JSON_CALL = '{"goal": "g", "name": "Home.search", "args": {"place": "Berlin", "beds": 2}}'
TEXT_CALL = "name: Home.search\n\nargs: {'place': 'Berlin', 'beds': 2}\n"
KINDS = {
    ("instruct", "json"): [
        (JSON_CALL, 1, 1),
        (f"```json\n{JSON_CALL.replace(chr(34), chr(39))}\n```", 1, 1),
        (JSON_CALL.replace("2}", '"2"}'), (1 + 2 / 3) / 2, 1),  # two of three parts: "2" is not 2
        ('{"goal": "g", "name": "Home.find", "args": "place"}', 0.5, 1),
        (JSON_CALL.replace('"goal": "g", ', ""), 0, 0),
        ("[" * 90_000, 0, 0),
    ],
    ("instruct", "str"): [
        (f"goal: g\n\n{TEXT_CALL}.", 1, 1),
        # The published program strips a reply before it looks for the mark at its end.
        (f"goal: g\n\n{TEXT_CALL}", 0, 0),
        ("Sure!\ngoal: g\n\nname: Home.search\n\nargs: place=Berlin\n.", (1 + 1 / 3) / 2, 1),
        (TEXT_CALL, 0, 0),
    ],
    ("retrieve", "json"): [
        ('{"thought": "t", "name": "Home.search", "args": {}}', 1, 1),
        ('The call: {"name": "Home.find"} as asked', 0, 1),
        ("Home.search", 0, 0),
    ],
    ("retrieve", "str"): [
        ("Home.search", 1, 1),
        ("I use Home.search, then Home.price.", 0, 1),
        ("Home.search or FinishAction", 0, 1),
    ],
    ("understand", "json"): [
        ('{"name": "x", "args": {"place": "Berlin"}}', 1, 1),
        ('{"name": "x", "args": {"place": "Rome"}}', 0, 1),
        ('{"name": "x", "args": "place Berlin"}', 0, 1),
        ("nothing", 0, 0),
    ],
    ("understand", "str"): [("{'place': 'Berlin'}", 1, 1)],
    ("plan", "json"): [
        ("""[{"id": 0, "name": "Home.search", "args": "{'place': 'Berlin'}"}]""", 1, 1),
        ("""[{"id": 0, "name": "Home.search"}]""", 0, 0),
    ],
    ("plan", "str"): [
        # "Use Home.search to find a place in Berlin" against "{'place': 'Berlin'}": 2 of sqrt(9) * sqrt(2) words alike.
        ("Use Home.search to find a place in Berlin", 1, 1),
        ("I do not know.", 0, 0),
    ],
}


@pytest.mark.parametrize(("kind", "form"), KINDS)
async def test_replies_score_by_what_is_right_and_can_be_read(kind, form) -> None:
    gold = {"instruct": CALL, "plan": PLAN}.get(kind, GOLD)
    template = {"json": KEYS, "str": MARKS}[form] if kind == "instruct" else {}
    for reply, score, readable in KINDS[kind, form]:
        judgement = await judged(reply, kind, form, gold, template=template, tools=["Home.search"])
        assert judgement == pytest.approx((score, readable)), reply


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
