from afm.evaluation.compare import pick_episodes, pick_pairs


def rows(record, **scores):
    return [record(task, score) for task, score in scores.items()]


def test_one_pair_of_every_kind_the_first_in_the_order_of_ids(record) -> None:
    before = rows(record, a=0.0, b=1.0, c=0.0, d=1.0, e=0.0)
    after = [*rows(record, a=1.0, b=1.0, d=0.0, e=0.0), record("c", 1.0, calls=1)]
    pairs = pick_pairs(("before", lambda: before), ("after", lambda: reversed(after)))
    assert [(pair.title, pair.episodes[0][1].id) for pair in pairs] == [
        ("Solved by after, with the tool that was not used by before", "c#0"),
        ("Solved by before and by after", "b#0"),
        ("Solved by before, not by after", "d#0"),
    ]
    assert [name for name, _ in pairs[0].episodes] == ["before", "after"]
    assert pairs[0].episodes[1][1].cost.tool_calls == 1


def test_few_kinds_give_several_of_one(record) -> None:
    failed = [record(f"t{i}", 0.0) for i in range(5)]
    pairs = pick_pairs(("before", lambda: failed), ("after", lambda: failed))
    assert [pair.episodes[1][1].id for pair in pairs] == ["t0#0", "t1#0", "t2#0"]


def test_other_questions_and_rows_without_a_score_are_no_pairs(record) -> None:
    before = [record("a", 0.0), record("b", None), record("c", 1.0, question="another")]
    after = [record("a", 0.0), record("b", 1.0), record("c", 1.0)]
    pairs = pick_pairs(("before", lambda: before), ("after", lambda: after))
    assert [pair.episodes[0][1].id for pair in pairs] == ["a#0"]


def test_single_episodes_show_every_outcome(record) -> None:
    picked = pick_episodes("run", lambda: rows(record, a=1.0, b=1.0, c=0.0, d=None))
    assert [(pair.title, pair.episodes[0][1].id) for pair in picked] == [
        ("Passed, run", "a#0"),
        ("Not passed, run", "c#0"),
        ("Without a score, run", "d#0"),
    ]
