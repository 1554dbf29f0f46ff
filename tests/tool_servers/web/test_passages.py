from __future__ import annotations

from tool_servers.crawl_page.digest import best_chunks, best_passages, passages

PAGE = "\n\n".join(
    ["# Rivers of Arda", *(f"Paragraph {n} tells of hills and clouds, at length." for n in range(40))]
    + ["The Anduin is 1388 miles long."]
    + [f"Paragraph {n} tells of seas and winds, at length." for n in range(40, 80)]
)


def test_short_texts_stay_whole():
    assert best_passages("short text", "goal", 100) == "short text"


def test_the_passage_that_answers_is_found_and_cuts_are_shown():
    found = best_passages(PAGE, "How long is the Anduin in miles?", 400)
    assert found.startswith("# Rivers of Arda")
    assert "The Anduin is 1388 miles long." in found
    assert "\n[...]\n" in found
    assert len(found) <= 400


def test_without_a_goal_the_beginning():
    for goal in ("", "xylophone", "?!"):
        found = best_passages(PAGE, goal, 400)
        assert PAGE.startswith(found.removesuffix("\n[...]").rstrip())
        assert len(found) <= 400


def test_passages_lose_no_word():
    assert " ".join(passages(PAGE, 200)).split() == PAGE.split()
    assert max(map(len, passages("x" * 5000, 200))) == 200


def test_the_chunks_nearest_to_the_goal_in_the_order_of_the_page():
    chunks = best_chunks(PAGE, "Anduin", 200, 3)
    assert len(chunks) == 3
    assert chunks[0].startswith("# Rivers")
    assert any("Anduin" in chunk for chunk in chunks)
    assert [PAGE.index(chunk.split("\n")[0]) for chunk in chunks] == sorted(
        PAGE.index(c.split("\n")[0]) for c in chunks
    )
