"""Which rows become samples, in what numbers, and what the files hold."""

import hashlib
import json
from collections import Counter

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets.negative_samples import AbsentAnswer, DirectAnswer, NegativeKind, SampleMaker
from afm.datasets.negative_set import NegativeSources, write_negative
from afm.errors import ConfigError, DataError
from afm.trajectory.record import Record, TextSegment, Verdict

MATH = load_agent("math")
CALLED = (
    ("<plan>P.</plan><think>Run it.</think><code>\n```py\nprint(2)\n```\n</code>", "agent"),
    ("\n<observation>\n2\n</observation>\n", "environment"),
    ("<reflection>Good.</reflection><think>So.</think><answer>\\boxed{2}</answer>", "agent"),
)
DIRECT = (("<plan>P.</plan><think>One and one.</think><answer>\\boxed{2}</answer>", "agent"),)
SILENT = MATH.model_copy(update={"prompt": "", "question_format": "{question}"})
EACH = dict.fromkeys(NegativeKind, 1.0)


def row(name, segments=CALLED, **fields):
    parts = tuple(TextSegment(author=author, text=text) for text, author in segments)
    record = Record(id=name, agent="math", agent_digest="d", question=f"{name}?", segments=parts, **fields)
    return record.model_dump_json()


@pytest.fixture
def sources(tmp_path):
    """Writes trajectories and general questions, each a list of lines or of objects."""

    def write(records, general=None):
        paths = []
        for name, rows in (("records.jsonl", records), ("chat.jsonl", general)):
            if rows is not None:
                paths.append(tmp_path / name)
                lines = [item if isinstance(item, str) else json.dumps(item) for item in rows]
                paths[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return NegativeSources(*paths)

    return write


def chat(count):
    return [
        {"id": f"g{number}", "question": f"Q{number}?", "answer": f"A{number}"} for number in range(count)
    ]


def rows_of(summary):
    return json.loads(summary.path.read_text(encoding="utf-8"))


def test_the_ratios_count_by_the_trajectories_with_a_call(tmp_path, sources):
    given = sources([*(row(f"c{i}") for i in range(20)), *(row(f"d{i}", DIRECT) for i in range(30))])
    ratios = {
        NegativeKind.ABSENT_NOT_NEEDED: 0.1,
        NegativeKind.ABSENT_NEEDED: 0.5,
        NegativeKind.PRESENT_NOT_NEEDED: 1.25,
        NegativeKind.PRESENT_NEEDED: 0.75,
    }
    summary = write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=ratios)
    found = Counter(item["extra_info"]["kind"] for item in rows_of(summary))
    wanted = {"absent_not_needed": 2, "absent_needed": 10, "present_not_needed": 25, "present_needed": 15}
    assert found == wanted == summary.rows == summary.wanted
    origins = Counter((item["extra_info"]["kind"], item["extra_info"]["id"]) for item in rows_of(summary))
    assert set(origins.values()) == {1}


def test_every_row_says_where_it_comes_from_and_can_be_registered(tmp_path, sources):
    given = sources([row("c0"), row("d0", DIRECT)], chat(1))
    summary = write_negative(given, SampleMaker(MATH, seed=1), tmp_path / "out", name="n", ratios=EACH)
    rows = rows_of(summary)
    assert {tuple(item) for item in rows} == {("instruction", "input", "output", "system", "extra_info")}
    needed = next(item for item in rows if item["extra_info"]["kind"] == "present_needed")
    assert needed["extra_info"] == {
        "kind": "present_needed",
        "answer_from": "trajectory",
        "agent": "math",
        "agent_digest": MATH.digest,
        "file": "records.jsonl",
        "line": "1",
        "id": "c0",
    }
    absent = next(item for item in rows if item["extra_info"]["kind"] == "absent_needed")
    assert absent["extra_info"]["agent_digest"] == without_tools(MATH).digest
    info = json.loads((tmp_path / "out/dataset_info.json").read_text())
    columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    assert info == {"n": {"file_name": "n.json", "columns": columns}}
    manifest = json.loads((tmp_path / "out/n.manifest.json").read_text())
    assert manifest["counts"] == {
        "absent_not_needed": 1,
        "absent_needed": 1,
        "present_not_needed": 1,
        "present_needed": 1,
        "bad_rows": 0,
    }
    assert (manifest["seed"], manifest["agent"]["digest"]) == (1, MATH.digest)
    assert manifest["ratios"] == {str(kind): 1.0 for kind in NegativeKind}
    assert manifest["inputs"] == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in given.files
    }


def test_the_seed_decides_and_nothing_else(tmp_path, sources):
    given = sources([row(f"c{i}") for i in range(60)], chat(60))
    ratios = {**EACH, NegativeKind.PRESENT_NEEDED: 0.2, NegativeKind.ABSENT_NOT_NEEDED: 0.2}
    texts = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        summary = write_negative(given, SampleMaker(MATH, seed), tmp_path / name, name="n", ratios=ratios)
        texts[name] = summary.path.read_bytes()
    assert texts["a"] == texts["b"] != texts["c"]
    ids = [[item["extra_info"]["id"] for item in json.loads(texts[name])] for name in "ac"]
    assert sorted(ids[0]) != sorted(ids[1])


def test_rows_of_one_line_are_told_apart(tmp_path, sources):
    given = sources([row(f"c{i}") for i in range(4)])
    array = tmp_path / "chat.json"
    array.write_text(json.dumps(chat(40)))
    given = NegativeSources(given.records, array)
    summary = write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=EACH)
    assert summary.rows[NegativeKind.ABSENT_NOT_NEEDED] == 4
    assert summary.rows[NegativeKind.PRESENT_NOT_NEEDED] == 4


def test_bad_rows_stop_the_work_and_are_all_listed(tmp_path, sources):
    other = row("x").replace('"agent":"math"', '"agent":"web"')
    given = sources([row("c0"), "{", other, '{"id": "y"}'], [*chat(1), {"question": "Q"}])
    out = tmp_path / "out"
    with pytest.raises(DataError) as caught:
        write_negative(given, SampleMaker(MATH), out, name="n")
    listed = [json.loads(line) for line in (out / "n.bad_rows.jsonl").read_text().splitlines()]
    assert [(item["file"].rpartition("/")[2], item["line"]) for item in listed] == [
        ("records.jsonl", 2),
        ("records.jsonl", 3),
        ("records.jsonl", 4),
        ("chat.jsonl", 2),
    ]
    assert [item["reason"][:24] for item in listed][1] == "record 'x' belongs to ag"
    assert (
        str(caught.value).splitlines()[3]
        == f"{given.general}:2: answer: got 'None', expected a text that is not empty"
    )
    assert sorted(path.name for path in out.iterdir()) == ["n.bad_rows.jsonl"]
    summary = write_negative(given, SampleMaker(MATH), out, name="n", ratios=EACH, drop_bad_rows=True)
    assert (summary.bad_rows, sum(summary.rows.values())) == (4, 4)
    (tmp_path / "records.jsonl").write_text(row("c0") + "\n")
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat(1)[0]) + "\n")
    write_negative(given, SampleMaker(MATH), out, name="n", ratios=EACH)
    assert not summary.report.exists()


def test_a_row_that_is_no_text_is_a_bad_row(tmp_path, sources):
    broken = row("c1").replace('"id":"c1"', r'"id":"\ud83d"')
    given = sources([row("c0"), broken], chat(1))
    summary = write_negative(
        given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=EACH, drop_bad_rows=True
    )
    assert summary.bad_rows == 1
    assert "half a character" in json.loads(summary.report.read_text())["reason"]


def test_an_array_that_breaks_off_is_refused_since_its_rows_cannot_be_counted(tmp_path, sources):
    given = sources([row("c0")], chat(2))
    given.general.write_text(json.dumps(chat(2))[:-9])
    with pytest.raises(DataError, match=r"chat.jsonl:1: no JSON from here on"):
        write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", drop_bad_rows=True)


def test_what_a_filter_dropped_or_a_reward_refused_is_counted_and_not_used(tmp_path, sources):
    wrong = Verdict(score=0.0)
    given = sources(
        [
            row("c0"),
            row("c1", kept=False),
            row("d0", DIRECT, verdict=wrong),
            row("d1", DIRECT, verdict=wrong),
        ],
        chat(2),
    )
    summary = write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=EACH)
    assert summary.unused == {"not kept by a filter": 1, "wrong answer without a tool": 2}
    used = {item["extra_info"]["id"] for item in rows_of(summary)}
    assert "c0" in used
    assert not used & {"c1", "d0", "d1"}


def test_too_few_sources_give_what_there_is(tmp_path, sources):
    given = sources([row(f"c{i}") for i in range(10)], chat(3))
    summary = write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=EACH)
    assert summary.wanted[NegativeKind.ABSENT_NOT_NEEDED] == 10
    assert summary.rows[NegativeKind.ABSENT_NOT_NEEDED] == 3


def test_a_kind_without_any_source_is_refused_unless_it_is_not_wanted(tmp_path, sources):
    given = sources([row("c0")])
    with pytest.raises(
        DataError, match=r"nothing to make absent_not_needed from: .*--general FILE; or set its ratio"
    ):
        write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n")
    only = {NegativeKind.PRESENT_NEEDED: 1.0, NegativeKind.ABSENT_NEEDED: 1.0}
    assert (
        sum(write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios=only).rows.values())
        == 2
    )
    with pytest.raises(DataError, match="no row was chosen"):
        write_negative(given, SampleMaker(MATH), tmp_path / "out", name="n", ratios={})
    with pytest.raises(DataError, match="holds no trajectory with a tool call"):
        write_negative(sources([row("d0", DIRECT)]), SampleMaker(MATH), tmp_path / "out", name="n")


def test_where_a_grade_would_be_made_up_the_message_names_the_way_out(tmp_path, sources):
    web = load_agent("web")
    text = (
        "<think>t</think><web_search>q</web_search>",
        "\n<observation>\nr\n</observation>\n",
        "<think>t</think><suggested_answer>Bonn</suggested_answer><think>t</think><double_check>Score: 4</double_check>"
        "<think>t</think><answer>Bonn</answer>",
    )
    line = row("c0", zip(text, ("agent", "environment", "agent"), strict=True)).replace('"math"', '"web"')
    given = sources([line], chat(2))
    with pytest.raises(DataError, match="without a call or a grade that nobody gave; --direct plain"):
        write_negative(given, SampleMaker(web), tmp_path / "out", name="n", ratios=EACH)
    maker = SampleMaker(web, direct_answer=DirectAnswer.PLAIN)
    summary = write_negative(given, maker, tmp_path / "out", name="n", ratios=EACH)
    assert summary.rows == dict.fromkeys(NegativeKind, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ratios": {NegativeKind.ABSENT_NEEDED: -1}}, "ratio of absent_needed: got -1"),
        ({"ratios": {NegativeKind.ABSENT_NEEDED: float("nan")}}, "ratio of absent_needed: got nan"),
        ({"maker": SampleMaker(without_tools(MATH))}, "agent 'math_without_tools' has no tools"),
        (
            {"maker": SampleMaker(SILENT, absent_answer=AbsentAnswer.EXPLAIN)},
            "agent 'math' is asked with the question alone",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, sources, options, complaint):
    given = {"maker": SampleMaker(MATH), **options}
    with pytest.raises(ConfigError, match=complaint):
        write_negative(sources([row("c0")]), out_dir=tmp_path / "out", name="n", **given)


def test_a_data_set_neither_leaves_its_folder_nor_replaces_its_source(tmp_path, sources):
    given = sources([row("c0")])
    with pytest.raises(DataError, match="without a folder"):
        write_negative(given, SampleMaker(MATH), tmp_path / "out", name="../n")
    source = given.records.rename(tmp_path / "n.json")
    with pytest.raises(ConfigError, match="input and output are the same file"):
        write_negative(NegativeSources(source), SampleMaker(MATH), tmp_path, name="n")


def test_a_failure_leaves_the_old_data_set(tmp_path, sources):
    out = tmp_path / "out"
    given = sources([row("c0")], chat(1))
    before = write_negative(given, SampleMaker(MATH), out, name="n", ratios=EACH).path.read_bytes()
    reads = 0

    def changes(rows):
        nonlocal reads
        reads = rows
        if rows == 2:  # the last row of the first reading
            (tmp_path / "chat.jsonl").write_text('{"question": "Q?", "answer": ""}\n')

    with pytest.raises(DataError, match=r"chat\.jsonl:1: changed while it was read"):
        write_negative(given, SampleMaker(MATH), out, name="n", ratios=EACH, on_row=changes)
    assert reads == 4
    assert (out / "n.json").read_bytes() == before
    assert not list(out.glob("*.tmp"))
