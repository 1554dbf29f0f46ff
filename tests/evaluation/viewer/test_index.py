import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from afm.errors import DataError, UsageError
from afm.evaluation.viewer import EpisodeIndex, Filters, Order, facets, listing
from afm.evaluation.viewer.episodes import episode_view, messages_of, read_episode
from afm.trajectory.io import load_records


@pytest.fixture
def index(tmp_path):
    """Makes an index of a folder, brought up to date."""

    def make(folder):
        found = EpisodeIndex(folder, tmp_path / "index.sqlite")
        refresh(found)
        return found

    return make


def refresh(index):
    *_, last = index.refresh()
    return last


def ids(index, **given):
    order = given.pop("order", Order.FILE)
    text, step = given.pop("text", ""), given.pop("step", None)
    with closing(index.connect()) as connection:
        page = listing(connection, Filters(given, step, text), order=order)
    assert page.total == len(page.rows)
    return [row["name"] for row in page.rows]


def test_filters_text_and_order_choose_episodes(tmp_path, index, viewer):
    some = [
        viewer.episode(1),
        viewer.episode(2, passed=False, source="musique"),
        viewer.episode(3, tool="web_search", provenance={"step": 7}),
        viewer.episode(4, verdict=None),
    ]
    viewer.write(tmp_path / "a/episodes.jsonl", some)
    found = index(tmp_path)
    assert ids(found) == ["e1", "e2", "e3", "e4"]
    assert ids(found, verdict="failed") == ["e2"]
    assert ids(found, verdict="unjudged") == ["e4"]
    assert ids(found, source="nq", verdict="passed") == ["e1", "e3"]
    assert ids(found, tool="web_search") == ["e3"]
    assert ids(found, step=7) == ["e3"]
    assert ids(found, source="absent") == []
    assert ids(found, order=Order.SLOWEST) == ["e4", "e3", "e2", "e1"]
    assert ids(found, text="river 2") == ["e2"]
    assert ids(found, text='"the river 3 is"') == ["e3"]
    assert ids(found, text='"river is the"') == []
    assert ids(found, text='NOT river" 4 OR (') == []  # words, no language
    assert ids(found, text="***") == []


def test_words_of_members_and_of_chats_are_found(tmp_path, index, viewer):
    calls = [{"function": {"name": "ask", "arguments": '{"who": "cartographer"}'}}]
    chat = {
        "name": "main",
        "messages": [{"role": "assistant", "content": "A ferryman.", "tool_calls": calls}, 7],
    }
    said = {"messages": [{"member": "planner", "text": "Ask the hydrologist."}, {"member": "writer"}]}
    broken = {"team": {"messages": "none"}, "trajectories": [None, {"messages": {}}]}
    some = [{"team": said}, {"trajectories": [chat]}, broken]
    viewer.write(tmp_path / "a.jsonl", [viewer.episode(n, provenance=one) for n, one in enumerate(some)])
    found = index(tmp_path)
    assert ids(found, text="hydrologist") == ["e0"]
    assert ids(found, text="ferryman cartographer") == ["e1"]
    assert ids(found, text="river") == ["e0", "e1", "e2"]
    assert messages_of(some[0]) == [("planner", "Ask the hydrologist.")]
    assert messages_of(some[1])[0][0] == "main"


def test_what_a_fork_repeats_is_shown_once_and_said(tmp_path, index, viewer):
    """Two chats of a program that begin alike, a third of a member, and a completion."""
    ask, reply = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "At the mill."}
    again = [ask, reply, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    chats = [
        {"name": "0", "reason": "first", "messages": [ask, reply, *again[:1]]},
        {"name": "1", "reason": "fork", "parent": "0", "messages": again},
        {"name": "2", "reason": "new", "member": "writer", "messages": [ask]},
        {"name": "3", "messages": [{"prompt": "Once", "completion": " upon"}]},
    ]
    assert messages_of({"trajectories": chats}) == [
        ("", "Conversation 0 (first)."),
        ("user to 0", "Where?"),
        ("0", "At the mill."),
        ("user to 0", "Where?"),
        ("", "Conversation 1 (fork). Its first 2 messages are those of conversation 0, shown above."),
        ("user to 1", "Sure?"),
        ("1", "Yes."),
        ("", "Conversation 2 of writer (new). Its first message is that of conversation 0, shown above."),
        ("", "Conversation 3."),
        ("prompt to 3", "Once"),
        ("3", " upon"),
    ]
    viewer.write(tmp_path / "a.jsonl", [viewer.episode(1, provenance={"trajectories": chats, "step": 4})])
    found = index(tmp_path)
    assert [ids(found, text=word) for word in ("mill", "upon", "conversation")] == [["e1"], ["e1"], []]
    provenance = json.loads(episode_view(load_records(tmp_path / "a.jsonl")[0], "a.jsonl")["provenance"])
    assert [chat["messages"] for chat in provenance["trajectories"]] == [3, 4, 1, 1]
    assert (provenance["step"], provenance["trajectories"][1]["parent"]) == (4, "0")
    many = {"team": {"messages": [{"member": "writer", "text": str(n)} for n in range(503)]}}
    shown = episode_view(viewer.episode(2, provenance=many), "a.jsonl")["messages"]
    assert len(shown) == 501
    assert shown[-1]["text"] == "3 more messages left out. The file of the episode has all of them."


@pytest.mark.parametrize(
    ("ground_truth", "expected", "shown"),
    [
        ({"target": ["Tuesday", "Tue"], "question": "Which day?"}, "Tuesday; Tue", "Tuesday; Tue"),
        ('{"target": ["Tuesday"]}', "Tuesday", "Tuesday"),
        ([3, 4.5], "3; 4.5", "3; 4.5"),
        (None, "", ""),
        ("[1, 2]", "[1, 2]", "[1, 2]"),
        ({"inputs": ["1"]}, "", ""),
        ({"target": ["x" * 200]}, "x" * 119 + "…", "x" * 200),
    ],
)
def test_the_gold_answers_of_a_ground_truth_are_shown(tmp_path, index, viewer, ground_truth, expected, shown):
    viewer.write(tmp_path / "a.jsonl", [viewer.episode(1, ground_truth=ground_truth)])
    with closing(index(tmp_path).connect()) as connection:
        assert [row["expected"] for row in listing(connection, Filters({}, None, "")).rows] == [expected]
    record = load_records(tmp_path / "a.jsonl")[0]
    assert episode_view(record, "a.jsonl")["expected"] == shown
    assert (episode_view(record, "a.jsonl")["ground_truth"] == "") == (ground_truth is None)


def test_an_agent_is_found_next_to_its_rows_and_an_unknown_one_has_its_answer(tmp_path, index, viewer):
    viewer.write(tmp_path / "kept/a.jsonl", [viewer.episode(7, agent="shop")])
    with closing(index(tmp_path).connect()) as connection:
        assert [row["answer"] for row in listing(connection, Filters({}, None, "")).rows] == ["7"]
    file = tmp_path / "kept/a.jsonl"
    assert not episode_view(load_records(file)[0], str(file))["spec_found"]

    (tmp_path / "shop.yaml").write_text("extends: mhqa\nname: shop\n")
    copy = file.with_name("b.jsonl")
    shutil.copy(file, copy)
    blocks = episode_view(load_records(copy)[0], str(copy))["blocks"]
    assert [block["role"] for block in blocks][-2:] == ["think", "answer"]


def test_files_that_are_gone_are_forgotten_and_a_copied_index_has_only_its_own(tmp_path, viewer):
    viewer.write(tmp_path / "run/a.jsonl", [viewer.episode(1)])
    viewer.write(tmp_path / "run/b.jsonl", [viewer.episode(2)])
    first = EpisodeIndex(tmp_path / "run", tmp_path / "run/.afm_view.sqlite")
    refresh(first)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copied = EpisodeIndex(tmp_path / "copy", tmp_path / "copy/.afm_view.sqlite")
    assert (refresh(copied).episodes, refresh(copied).files) == (2, 2)
    (tmp_path / "run/a.jsonl").unlink()
    assert refresh(first).episodes == 1
    assert ids(first) == ["e2"]


def test_an_index_grows_with_its_files_and_waits_for_whole_lines(tmp_path, index, viewer):
    file = tmp_path / "run/episodes.jsonl"
    viewer.write(file, [viewer.episode(1)])
    found = index(tmp_path / "run")
    line = viewer.episode(2).model_dump_json().encode() + b"\n"
    with file.open("ab") as growing:
        growing.write(line[:40])
        growing.flush()
        refresh(found)
        assert ids(found) == ["e1"]
        growing.write(line[40:])
    viewer.write(tmp_path / "run/more.jsonl", [viewer.episode(3)])
    refresh(found)
    assert ids(found) == ["e1", "e2", "e3"]
    with closing(found.connect()) as connection:
        assert facets(connection)["source"] == [{"name": "nq", "episodes": 3}]


def test_a_file_that_was_replaced_is_read_again(tmp_path, index, viewer):
    file = tmp_path / "run/episodes.jsonl"
    viewer.write(file, [viewer.episode(1), viewer.episode(2), viewer.episode(3, source="musique")])
    found = index(tmp_path / "run")
    file.unlink()
    viewer.write(file, [viewer.episode(9)])
    refresh(found)
    assert ids(found) == ["e9"]
    assert ids(found, text="river 2") == []
    with closing(found.connect()) as connection:
        assert facets(connection)["source"] == [{"name": "nq", "episodes": 1}]


def test_only_an_empty_file_or_an_older_index_is_replaced(tmp_path, index, viewer):
    viewer.write(tmp_path / "run/episodes.jsonl", [viewer.episode(1)])
    place = tmp_path / "index.sqlite"
    place.touch()
    assert ids(index(tmp_path / "run")) == ["e1"]
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute("UPDATE about SET version = 1")
        connection.execute("DELETE FROM episodes")
    assert ids(index(tmp_path / "run")) == ["e1"]

    place.unlink()
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute("CREATE TABLE thesis (words TEXT)")
    kept = place.read_bytes()
    with pytest.raises(UsageError, match="is not an index of episodes, and was not changed"):
        index(tmp_path / "run")
    assert place.read_bytes() == kept


def test_bad_lines_are_counted_and_other_files_left_alone(tmp_path, index, viewer):
    viewer.write(tmp_path / "run/episodes.jsonl", [viewer.episode(1)])
    with (tmp_path / "run/episodes.jsonl").open("ab") as file:
        file.write(b"{no json\n\n[1]\n" + viewer.episode(2).model_dump_json().encode() + b"\n")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    found = EpisodeIndex(tmp_path / "run", tmp_path / "index.sqlite")
    assert refresh(found).bad_lines == 2
    assert ids(found) == ["e1", "e2"]


def test_a_mark_of_utf_8_before_the_first_episode_hides_nothing(tmp_path, index, viewer):
    viewer.write(tmp_path / "a/episodes.jsonl", [viewer.episode(1), viewer.episode(2)])
    plain = (tmp_path / "a/episodes.jsonl").read_bytes()
    (tmp_path / "a/episodes.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
    assert ids(index(tmp_path)) == ["e1", "e2"]
    [first, _] = plain.splitlines(keepends=True)
    read = read_episode(str(tmp_path / "a/episodes.jsonl"), 0, 3 + len(first))
    assert read.id == "e1"


def test_an_index_of_nothing_says_what_it_wants(tmp_path, viewer):
    with pytest.raises(DataError, match="no such file or folder; expected episodes"):
        EpisodeIndex(tmp_path / "absent", tmp_path / "index.sqlite")
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the first line is not an episode"):
        EpisodeIndex(tmp_path / "rows.jsonl", tmp_path / "index.sqlite")


def test_a_damaged_index_is_made_again_where_only_an_index_can_be(tmp_path, viewer):
    viewer.write(tmp_path / "run/episodes.jsonl", [viewer.episode(1)])
    place = tmp_path / "run/.afm_view.sqlite"
    place.write_bytes(b"not a database at all, but long enough to be one" * 100)
    found = EpisodeIndex(tmp_path / "run", place)
    refresh(found)
    assert ids(found) == ["e1"]


def test_lines_of_wrong_types_hold_nothing_up(tmp_path, index, viewer):
    sound = json.loads(viewer.episode(1).model_dump_json())
    huge = 10**30  # more than SQLite's integers hold
    wrong = (
        *({"verdict": "good"}, {"verdict": {"score": "1"}}, {"cost": [1]}, {"calls": 7}, {"segments": "a"}),
        *({"cost": {"agent_tokens": huge}}, {"verdict": {"score": -huge}}),
    )
    odd = {
        "question": "half \ud800 a pair",
        "id": "odd",
        "calls": [3],
        "provenance": {"step": huge},
        "segments": [None, {"text": "\udfff"}],
    }
    rows = [*({**sound, **change} for change in wrong), {**sound, **odd}, {**sound, "id": "last"}]
    (tmp_path / "run").mkdir()
    text = json.dumps(sound) + "\n" + "".join(json.dumps(row) + "\n" for row in rows) + "[" * 100_000 + "\n"
    (tmp_path / "run/episodes.jsonl").write_text(text, encoding="utf-8")
    found = EpisodeIndex(tmp_path / "run", tmp_path / "index.sqlite")
    assert refresh(found).bad_lines == 8
    assert ids(found) == ["e1", "odd", "last"]
