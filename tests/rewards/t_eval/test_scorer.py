"""What an item needs before it is scored, and what a reply is read as."""

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.rewards import Sample, load_reward
from afm.rewards.t_eval_plans import instructed, literal, names_alone, plan_of_text
from afm.trajectory.tags import Author, Segment

MARKS = {"thought_start": "T:", "action_start": "A:", "args_start": "P:"}
SPEC = load_agent("configs/eval/agents/chat.yaml")
GOLD = {"thought": "Search.", "name": "Home.search", "args": {"place": "Berlin"}}
PLAN = [
    {"id": 0, "prev": [], "name": "Home.search", "args": {"place": "Berlin"}},
    {"id": 1, "prev": [0], "name": "FinishAction", "args": {}},
]


async def judged(reply, kind, form, gold, *, embeddings="words", **item):
    """Score and whether the reply can be read."""
    facts = {"kind": kind, "form": form, "template": {}, "tools": [], **item}
    segments = (Segment(Author.AGENT, reply), Segment(Author.ENVIRONMENT, "Home.search"))
    sample = Sample(SPEC, f"t_eval_{kind}_{form}", "q", segments, gold, extra_info={"t_eval": facts})
    reward = load_reward({"formula": "correct", "t_eval": {"embeddings": embeddings}})
    try:
        verdict = await reward.score(sample)
    finally:
        await reward.close()
    return verdict.score, verdict.parts["format"]


async def test_endless_brackets_and_what_the_environment_wrote_are_no_call() -> None:
    """What replies of every kind score is compared with the published programs: see test_published_figures.py."""
    assert await judged("[" * 90_000, "understand", "json", GOLD) == (0, 0)
    assert await judged("I do not know.", "retrieve", "str", GOLD) == (0, 1)


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


def test_what_is_behind_a_hundred_thousand_characters_does_not_count() -> None:
    blank = " " * 100_000
    with pytest.raises(ValueError, match="longer than"):
        literal(f"[1{blank}]")
    assert plan_of_text(f"{blank}A.one", ["A.one"]) == []
    assert instructed(f"T:{blank}A:run P:{{}}", "str", MARKS) is None


def test_arguments_that_are_nested_too_deeply_are_none() -> None:
    assert instructed(f"T:now A:run P:{'1+' * 5000}1", "str", MARKS) == ("run", {})
