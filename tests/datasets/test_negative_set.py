import hashlib
import json
from collections import Counter

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets.negative_samples import AbsentAnswer, DirectAnswer, NegativeKind, SampleMaker
from afm.datasets.negative_set import NegativeSources, write_negative
from afm.errors import ConfigError, DataError
from afm.trajectory.record import Record, Verdict
from afm.trajectory.tags import Author, Segment

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
    parts = tuple(Segment(Author(author), text) for text, author in segments)
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


@pytest.fixture
def write(tmp_path):
    """Writes the data set ``n`` in ``out``."""

    def run(given, maker=SampleMaker(MATH), ratios=EACH, **options):  # noqa: B008
        return write_negative(given, maker, tmp_path / "out", name="n", ratios=ratios, **options)

    return run


def rows_of(summary):
    return json.loads(summary.path.read_text(encoding="utf-8"))


def test_the_ratios_count_by_the_trajectories_with_a_call(write, sources):
    given = sources([*(row(f"c{i}") for i in range(20)), *(row(f"d{i}", DIRECT) for i in range(30))])
    ratios = dict(zip(NegativeKind, (0.1, 0.5, 1.25, 0.75), strict=True))
    summary = write(given, ratios=ratios)
    origins = Counter((item["extra_info"]["kind"], item["extra_info"]["id"]) for item in rows_of(summary))
    wanted = {"absent_not_needed": 2, "absent_needed": 10, "present_not_needed": 25, "present_needed": 15}
    assert Counter(kind for kind, _ in origins) == wanted == summary.rows == summary.wanted
    assert set(origins.values()) == {1}
    few = write(sources([row(f"c{i}") for i in range(10)], chat(3)))
    kind = NegativeKind.ABSENT_NOT_NEEDED
    assert (few.wanted[kind], few.rows[kind]) == (10, 3)


def test_every_row_says_where_it_comes_from_and_can_be_registered(tmp_path, write, sources):
    given = sources([row("c0"), row("d0", DIRECT)], chat(1))
    rows = rows_of(write(given, SampleMaker(MATH, seed=1)))
    assert {tuple(item) for item in rows} == {("instruction", "input", "output", "system", "extra_info")}
    origin = {item["extra_info"]["kind"]: item["extra_info"] for item in rows}
    assert origin["present_needed"] == {
        "kind": "present_needed",
        "answer_from": "trajectory",
        "agent": "math",
        "agent_digest": MATH.digest,
        "file": "records.jsonl",
        "line": "1",
        "id": "c0",
    }
    assert origin["absent_needed"]["agent_digest"] == without_tools(MATH).digest
    info = json.loads((tmp_path / "out/dataset_info.json").read_text())
    columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    assert info == {"n": {"file_name": "n.json", "columns": columns}}
    manifest = json.loads((tmp_path / "out/n.manifest.json").read_text())
    assert manifest["counts"] == {str(kind): 1 for kind in NegativeKind} | {"bad_rows": 0}
    assert (manifest["seed"], manifest["agent"]["digest"]) == (1, MATH.digest)
    assert manifest["ratios"] == {str(kind): 1.0 for kind in NegativeKind}
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in given.files}
    assert manifest["inputs"] == digests


def test_the_seed_decides_and_nothing_else(write, sources):
    given = sources([row(f"c{i}") for i in range(60)], chat(60))
    ratios = {**EACH, NegativeKind.PRESENT_NEEDED: 0.2, NegativeKind.ABSENT_NOT_NEEDED: 0.2}
    first, again, other = (rows_of(write(given, SampleMaker(MATH, seed), ratios)) for seed in (0, 0, 1))
    assert first == again
    ids = [sorted(item["extra_info"]["id"] for item in rows) for rows in (first, other)]
    assert ids[0] != ids[1]


def test_rows_of_one_line_are_told_apart(tmp_path, write, sources):
    (tmp_path / "chat.json").write_text(json.dumps(chat(40)))
    records = sources([row(f"c{i}") for i in range(4)]).records
    summary = write(NegativeSources(records, tmp_path / "chat.json"))
    assert summary.rows == dict.fromkeys(NegativeKind, 4)


def test_bad_rows_stop_the_work_and_are_all_listed(tmp_path, write, sources):
    other = row("x").replace('"agent":"math"', '"agent":"web"')
    half = row("c1").replace('"id":"c1"', r'"id":"\ud83d"')
    given = sources([row("c0"), "{", other, '{"id": "y"}', half], [*chat(1), {"question": "Q"}])
    out = tmp_path / "out"
    with pytest.raises(DataError) as caught:
        write(given)
    listed = [json.loads(line) for line in (out / "n.bad_rows.jsonl").read_text().splitlines()]
    lines = [f"{item['file'].rpartition('/')[2]}:{item['line']}" for item in listed]
    assert lines == [*(f"records.jsonl:{line}" for line in (2, 3, 4, 5)), "chat.jsonl:2"]
    assert listed[1]["reason"].startswith("record 'x' belongs to ag")
    assert "half a character" in listed[3]["reason"]
    assert f"{given.general}:2: answer: got 'None', expected a text that is not empty" in str(caught.value)
    assert sorted(path.name for path in out.iterdir()) == ["n.bad_rows.jsonl"]
    summary = write(given, drop_bad_rows=True)
    assert (summary.bad_rows, sum(summary.rows.values())) == (5, 4)
    assert not write(sources([row("c0")], chat(1))).report.exists()


def test_an_array_that_breaks_off_is_refused_since_its_rows_cannot_be_counted(write, sources):
    given = sources([row("c0")], chat(2))
    given.general.write_text(json.dumps(chat(2))[:-9])
    with pytest.raises(DataError, match=r"chat.jsonl:1: invalid JSON from here on"):
        write(given, drop_bad_rows=True)


def test_what_a_filter_dropped_or_a_reward_refused_is_counted_and_not_used(write, sources):
    wrong = [row(name, DIRECT, verdict=Verdict(score=0.0)) for name in ("d0", "d1")]
    summary = write(sources([row("c0"), row("c1", kept=False), *wrong], chat(2)))
    assert summary.unused == {"not kept by a filter": 1, "wrong answer without a tool": 2}
    used = {item["extra_info"]["id"] for item in rows_of(summary)}
    assert "c0" in used
    assert not used & {"c1", "d0", "d1"}


def test_a_kind_without_any_source_is_refused_unless_it_is_not_wanted(write, sources):
    given = sources([row("c0")])
    with pytest.raises(
        DataError,
        match=r"nothing to make absent_not_needed from: .*--general FILE; .* --ratio absent_not_needed=0",
    ):
        write(given)
    only = {NegativeKind.PRESENT_NEEDED: 1.0, NegativeKind.ABSENT_NEEDED: 1.0}
    assert sum(write(given, ratios=only).rows.values()) == 2
    with pytest.raises(DataError, match="no row was chosen"):
        write(given, ratios={})
    with pytest.raises(DataError, match="holds no trajectory with a tool call"):
        write(sources([row("d0", DIRECT)]))


def test_where_a_grade_would_be_made_up_the_message_names_the_way_out(write, sources):
    web = load_agent("web")
    segments = (
        ("<think>t</think><web_search>q</web_search>", "agent"),
        ("\n<observation>\nr\n</observation>\n", "environment"),
        ("<think>t</think><suggested_answer>Bonn</suggested_answer><think>t</think>", "agent"),
        ("<double_check>Score: 4</double_check><think>t</think><answer>Bonn</answer>", "agent"),
    )
    given = sources([row("c0", segments).replace('"math"', '"web"')], chat(2))
    with pytest.raises(DataError, match="without a call or an invented grade; --direct plain"):
        write(given, SampleMaker(web))
    summary = write(given, SampleMaker(web, direct_answer=DirectAnswer.PLAIN))
    assert summary.rows == dict.fromkeys(NegativeKind, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ratios": {NegativeKind.ABSENT_NEEDED: -1}}, "ratio of absent_needed: got -1"),
        ({"ratios": {NegativeKind.ABSENT_NEEDED: float("nan")}}, "ratio of absent_needed: got nan"),
        ({"maker": SampleMaker(without_tools(MATH))}, "agent 'math_without_tools' has no tools"),
        ({"maker": SampleMaker(SILENT, absent_answer=AbsentAnswer.EXPLAIN)}, "is only the question"),
    ],
)
def test_settings_that_mean_nothing_are_refused(write, sources, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        write(sources([row("c0")]), **options)


def test_a_data_set_neither_leaves_its_folder_nor_replaces_its_source(tmp_path, sources):
    given = sources([row("c0")])
    with pytest.raises(DataError, match="without a folder"):
        write_negative(given, SampleMaker(MATH), tmp_path / "out", name="../n")
    source = given.records.rename(tmp_path / "n.json")
    with pytest.raises(ConfigError, match="input and output are the same file"):
        write_negative(NegativeSources(source), SampleMaker(MATH), tmp_path, name="n")


def test_a_failure_leaves_the_old_data_set(tmp_path, write, sources):
    given, reads = sources([row("c0")], chat(1)), []
    before = write(given).path.read_bytes()

    def changes(rows):
        reads.append(rows)
        if rows == 2:  # the last row of the first reading
            (tmp_path / "chat.jsonl").write_text('{"question": "Q?", "answer": ""}\n')

    with pytest.raises(DataError, match=r"chat\.jsonl:1: changed while it was read"):
        write(given, on_row=changes)
    assert reads[-1] == 4
    assert (tmp_path / "out/n.json").read_bytes() == before
    assert not list((tmp_path / "out").glob("*.tmp"))
