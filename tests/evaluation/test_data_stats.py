import json
from collections import Counter

import pytest

from afm.evaluation.data_stats import DataStats, Histogram, answer_type, binned, named
from afm.trajectory import RecordWriter
from afm.trajectory.record import CallRecord, Cost, Record
from afm.trajectory.tags import Author, Segment

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def call(argument, tool="wiki_search", ok=True):
    return CallRecord(role=tool, tool=tool, argument=argument, observation="p", ok=ok)


def record(number, question="Who?", answer="Paris", hops=2, **fields):
    searched = "<think>t</think><wiki_search>q</wiki_search>"
    parts = (
        ("agent", searched),
        ("environment", "\n<observation>\np\n</observation>\n"),
        ("agent", f"<think>t</think><answer>{answer}</answer>"),
    )
    plain = {
        "id": f"r{number}",
        "agent": "mhqa",
        "agent_digest": "0",
        "segments": tuple(Segment(Author(author), text) for author, text in parts),
        "cost": Cost(tool_calls=1, prompt_tokens=100, agent_tokens=20, tool_seconds=0.5),
        "calls": (call("q", ok=number != 3),),
        "provenance": {"extra_info": {"hops": hops}, "cost_usd": 0.25, "repairs": {"missing thought": 1}},
    }
    return Record(question=question, **plain | fields)


def stats_of(*rows, **options):
    stats = DataStats(**options)
    for row in rows:
        stats.add(row)
    return stats


def test_everything_is_counted_by_hand():
    stats = stats_of(
        record(1, "Where?", answer="Paris"),
        record(2, "where? ", answer="1887", hops=3),
        record(3, "When?", answer="a | b", kept=False, reason="quality: score 0"),
    )
    assert (stats.rows, stats.kept) == (3, 2)
    assert (stats.same_question, stats.same_text) == (1, 0)
    assert stats.roles == {"think": 6, "wiki_search": 3, "observation": 3, "answer": 3}
    assert stats.with_role["think"] == 3
    assert (stats.steps, stats.calls, stats.hops) == ({5: 3}, {1: 3}, {2: 2, 3: 1})
    assert (stats.tools, stats.tool_failures) == ({"wiki_search": 3}, {"wiki_search": 1})
    assert stats.answers == {"name": 1, "year": 1, "several": 1}
    assert (stats.reasons, stats.repairs) == ({"quality": 1}, {"missing thought": 3})
    assert (stats.prompt_tokens, stats.agent_tokens, stats.cost_usd, stats.tool_s) == (300, 60, 0.75, 1.5)


def test_repeated_calls_are_those_that_a_row_made_before():
    asked = (call("The mill"), call("the  MILL "), call("the bridge"), call("the mill"))
    programs = (call(text, "code") for text in ("if x:\n  y()", "if x:\n  Y()", "if x:\n  y() \n"))
    stats = stats_of(record(1, "One?", calls=asked), record(2, "Two?", calls=(call("the mill"), *programs)))
    assert stats.repeated_calls == 3, "two of the mill in the first row, one of the programs in the second"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((), "none"),
        (("a", "b"), "several"),
        (("-3.5",), "number"),
        (("1887",), "year"),
        (("3 March 1887",), "date"),
        (("No",), "yes or no"),
        (("\\frac{1}{2}",), "formula"),
        (("Marie Curie",), "name"),
        (("the river in the north",), "phrase"),
        (("it was one of the largest rivers in the north",), "sentence"),
        (("def f():\n    pass",), "program or text of several lines"),
    ],
)
def test_answers_by_their_form(answer, kind):
    assert answer_type(answer) == kind


def test_quantiles_of_ten_values():
    histogram = Histogram(range(1, 11))

    assert [histogram.quantile(share) for share in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, 10]
    assert histogram.mean == 5.5


def test_bins_are_equally_wide_and_keep_the_empty_ones():
    bars = binned(Histogram({1: 2, 48: 1}))
    some = [(bar.label, bar.count) for bar in (bars[0], bars[1], bars[-1])]
    assert some == [("1 to 2", 2), ("3 to 4", 0), ("47 to 48", 1)]
    assert len(bars) == 24
    hundreds = [bar.label for bar in binned(Histogram({0: 1, 3: 2}), 100)]
    assert hundreds == ["0", "1 to 100", "101 to 200", "201 to 300"]


def test_many_names_end_in_one_bar():
    bars = named(Counter({f"n{number:02d}": 100 - number for number in range(30)}))

    assert len(bars) == 25
    assert (bars[0].label, bars[0].width, bars[-1].label) == ("n00", 1.0, "all others")
    assert bars[-1].count == sum(100 - number for number in range(24, 30))


def test_every_row_can_be_a_sample():
    rows = [record(number) for number in range(4)]
    seen = {stats_of(*rows, samples=1, seed=seed).shown[0].id for seed in range(60)}
    assert seen == {"r0", "r1", "r2", "r3"}


def test_the_command_writes_a_page_in_which_hostile_text_is_text(afm, tmp_path):
    file, page, funnel = (tmp_path / name for name in ("rows.jsonl", "report.html", "funnel.json"))
    with RecordWriter(file) as writer:
        writer.write(record(1, question=f"Who? {HOSTILE}", model=HOSTILE, answer=HOSTILE))
        writer.write(record(2, question="A second one \x1b[31m", kept=False, reason=f"{HOSTILE}: x"))
    stages = [{"name": "complexity", "dropped": 5}, {"name": HOSTILE, "dropped": 3}]
    funnel.write_text(json.dumps({"seen": 10, "kept": 2, "stages": stages}))

    words = ("data", "stats", file, "--out", page)
    assert "2 trajectories, 1 kept" in afm(*words).stdout
    html = page.read_text()
    assert [text for text in ("<script", "<img", "http://", "https://") if text in html] == []
    assert html.count("&lt;script&gt;alert(1)") >= 4
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert "complexity" in html
    assert "0.500 USD" in html
    assert "5 (−5)" in html

    stages = [{"name": "quality", "rows": 12010, "dropped": 8, "left": 12002}]
    funnel.write_text(json.dumps({"seen": 12010, "stages": stages}))
    afm(*words)
    assert "12,002 (−8)" in page.read_text()


def test_a_cost_that_was_not_recorded_is_not_called_zero(afm, tmp_path):
    file, page = tmp_path / "rows.jsonl", tmp_path / "report.html"
    with RecordWriter(file) as writer:
        writer.write(record(1, provenance={}))
    afm("data", "stats", file, "--out", page)
    assert "no price recorded" in page.read_text()
    assert "USD" not in page.read_text()


def test_a_broken_funnel_and_an_empty_file_are_told(afm, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    words = ("data", "stats", file)
    assert "holds no rows: the file is empty" in afm(*words, status=1).stderr

    with RecordWriter(file) as writer:
        writer.write(record(1))
    (tmp_path / "funnel.json").write_text("[]")
    done = afm(*words, "--out", tmp_path / "r.html", status=1)
    assert "funnel.json: holds no funnel" in done.stderr
