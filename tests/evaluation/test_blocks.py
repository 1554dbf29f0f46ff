from afm.evaluation.page import Block, blocks_of, role_colours
from afm.trajectory.tags import Author, Segment

AGENT, ENVIRONMENT = Author.AGENT, Author.ENVIRONMENT


def segments(*parts):
    return tuple(Segment(Author(author), text) for author, text in parts)


def test_colours_follow_the_order_of_the_declaration(solver) -> None:
    assert role_colours(solver.spec()) == {"plan": 0, "think": 1, "code": 2, "reflection": 3, "answer": 4}


def test_a_trajectory_becomes_blocks_by_role_and_author(record, solver) -> None:
    parts = segments(
        (AGENT, "<plan>go</plan>\n<think>x</think>\n<code>\nprint(1)\n</code>"),
        (ENVIRONMENT, "\n<observation>\n1\n</observation>\n"),
        (AGENT, "<answer>1</answer>"),
    )
    assert blocks_of(record("a", 1.0, segments=parts), solver.spec()) == [
        Block("plan", AGENT, "go", 0),
        Block("think", AGENT, "x", 1),
        Block("code", AGENT, "print(1)", 2, code=True),
        Block("observation", ENVIRONMENT, "1", None, code=True),
        Block("answer", AGENT, "1", 4),
    ]


def test_text_outside_of_roles_and_open_roles_are_marked(record, solver) -> None:
    parts = segments((AGENT, "well\n<plan>go</plan> hm <think>and then"))
    blocks = blocks_of(record("a", 0.0, segments=parts), solver.spec())
    assert [(block.role, block.text, block.fault) for block in blocks] == [
        ("", "well", "outside every role"),
        ("plan", "go", ""),
        ("", "hm", "outside every role"),
        ("think", "and then", "never closed"),
    ]


def test_an_observation_the_agent_forged_is_marked_as_its_own(record, solver) -> None:
    parts = segments((AGENT, "<plan>p</plan><observation>42</observation>"))
    forged = blocks_of(record("a", 0.0, segments=parts), solver.spec())[1]
    assert (forged.author, forged.fault) == (AGENT, "written by the agent itself")


def test_without_a_spec_blocks_follow_the_authors(record) -> None:
    parts = segments((AGENT, "<x>1</x>"), (ENVIRONMENT, "\n"), (ENVIRONMENT, "seen"))
    assert blocks_of(record("a", 0.0, segments=parts), None) == [
        Block("", AGENT, "<x>1</x>"),
        Block("", ENVIRONMENT, "seen"),
    ]


def test_very_long_text_loses_its_middle(record, solver) -> None:
    parts = segments((AGENT, f"<plan>{'a' * 30_000}{'b' * 30_000}</plan>"))
    (block,) = blocks_of(record("a", 0.0, segments=parts), solver.spec())
    assert "[... 40,000 characters left out ...]" in block.text
    assert block.text.startswith("aaa")
    assert block.text.endswith("bbb")
    assert len(block.text) < 21_000
