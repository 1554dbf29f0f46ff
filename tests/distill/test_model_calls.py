import json
import tracemalloc
from pathlib import Path

import pytest

from afm.distill.conversation import TeamConversation
from afm.distill.event_log import Event, EventKind
from afm.distill.model_calls import BadLines, CallLog, Label, ModelCall, Usage, read_calls
from afm.errors import DataError


def nested(depth):
    return json.loads('{"a":' * depth + "1" + "}" * depth)


@pytest.mark.parametrize("depth", [250, 900])
def test_what_is_nested_deeper_than_the_log_can_be_read_is_replaced(tmp_path, depth):
    log = tmp_path / "events.jsonl"
    asked = ({"role": "user", "content": [{"type": "text", "text": "hi"}, nested(depth)]},)
    with CallLog(log) as writer:
        request = {"format": nested(depth), "n": 1, "deep": nested(90)}
        call = ModelCall(path="chat/completions", request=request, messages=asked)
        writer.record(Label(task="t"), call, Usage())

    with CallLog(log) as writer:  # a gateway that starts again reads its log
        writer.record(Label(task="u"), ModelCall(path="chat/completions"), Usage())
    ((first,), _) = read_calls(log)

    assert first.call.request["n"] == 1
    assert first.call.request["deep"] == nested(90)
    assert '"(nested too deeply)"' in json.dumps(first.call.request["format"])
    assert first.call.messages[0]["content"][0] == {"type": "text", "text": "hi"}


def test_arguments_that_open_brackets_for_ever_are_no_json(tmp_path):
    function = {"name": "search", "arguments": "[" * 100_000}
    answer = ({"message": {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}},)
    with CallLog(tmp_path / "events.jsonl") as writer:
        writer.record(Label(task="t"), ModelCall(path="chat/completions", choices=answer), Usage())
    (calls,) = read_calls(tmp_path / "events.jsonl")

    with pytest.raises(DataError, match="arguments of search are not JSON"):
        TeamConversation(calls, "Observation: (.*)").uses(0)


def test_an_attempt_before_one_that_is_lost_is_not_taken_for_the_last():
    bad = BadLines(Path("log"))
    bad.add(7, b'{"id": "q#2.1", "task_id": "q"\n', "torn")
    bad.add(8, b'{"id": "q#' + b"9" * 5000 + b'.1"\n', "torn")
    assert [bad.spoil(("q", number)) for number in (1, 2, 3)] == [True, True, False]
    assert not bad.spoil(("other", 1))


def test_a_bad_call_late_in_a_long_log_is_found_without_the_log_in_memory(tmp_path):
    log = tmp_path / "events.jsonl"
    with CallLog(log) as writer:
        for number in range(20):
            said = ({"role": "user", "content": "x" * 500_000},)
            writer.record(
                Label(task=f"t{number}"), ModelCall(path="chat/completions", messages=said), Usage()
            )
        lost = Event(id="q#1.0", task_id="q", attempt=1, kind=EventKind.CALL, time=0, meta={"path": 1})
        writer.write(lost)

    bad = BadLines(log)
    tracemalloc.start()
    attempts = sum(1 for _ in read_calls(log, bad=bad))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (attempts, [row["line"] for row in bad.lines]) == (21, [41])
    assert peak < log.stat().st_size / 2
