"""ATIF in all its versions, held against the pydantic models of the package nvidia-nat-atif (those of nvidia-nat-core)."""

import math

import pytest

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.convert import FORMATS, Context
from afm.trajectory.observation import observation_text
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment

nat = pytest.importorskip("nat.atif", reason="needs nvidia-nat-atif")
ATIF = FORMATS["atif"]
SPEC = load_agent("mhqa")
VERSIONS = [f"1.{minor}" for minor in range(8)]


def record(identity="a"):
    return Record(
        id=identity,
        agent="mhqa",
        agent_digest=SPEC.digest,
        question="When?",
        segments=(
            Segment(Author.AGENT, "<think>Look.</think><wiki_search>mill</wiki_search>"),
            Segment(Author.ENVIRONMENT, observation_text("Built in 1702.", SPEC, 8000)),
            Segment(Author.AGENT, "<think>Found.</think><answer>1702</answer>"),
        ),
        model="tiny",
        ground_truth={"target": ["1702"]},
    )


def call(name, **arguments):
    return {"tool_call_id": name, "function_name": "wiki_search", "arguments": arguments}


def trajectory(version="1.7", **changed):
    """As another framework writes it: hidden reasoning, several parameters, tokens of each step."""
    results = [{"source_call_id": "c2", "content": "second"}, {"source_call_id": "c1", "content": "first"}]
    looked_up = {
        "message": "I look it up.",
        "reasoning_content": "The encyclopaedia will know.",
        "tool_calls": [call("c1", query="mill"), call("c2", query="mill", n=2)],
        "observation": {"results": results},
        "metrics": {"prompt_tokens": 30, "completion_tokens": 4},
    }
    answered = {"message": "1702", "metrics": {"prompt_tokens": 50, "completion_tokens": 1}}
    steps = [
        {"step_id": 1, "source": "system", "message": "You are an agent."},
        {"step_id": 2, "source": "user", "message": "When?", "timestamp": "2026-01-02T03:04:05Z"},
        {"step_id": 3, "source": "agent", **looked_up},
        {"step_id": 4, "source": "agent", **answered},
    ]
    agent = {"name": "team", "version": "2", "model_name": "big"}
    row = {"schema_version": f"ATIF-v{version}", "session_id": "s1", "agent": agent, "steps": steps}
    return row | changed


def read(row, **options):
    return ATIF.read(row, Context(agent=SPEC, **options))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_write_is_accepted_by_their_models_and_comes_back(version):
    row = ATIF.write(record(), Context(atif_version=version))
    accepted = nat.Trajectory.model_validate(row)
    assert accepted.schema_version == f"ATIF-v{version}"
    assert [step.source for step in accepted.steps] == ["user", "agent", "agent"]
    assert accepted.steps[1].tool_calls[0].arguments == {"input": "mill"}
    assert accepted.steps[1].observation.results[0].content == "Built in 1702."
    assert ATIF.read(accepted.to_json_dict(), Context()).record == record()


def test_nothing_stands_in_a_version_that_came_later():
    oldest = ATIF.write(record(), Context(atif_version="1.0"))
    newest = ATIF.write(record(), Context())
    assert "extra" not in oldest  # since 1.1
    assert "tool_definitions" not in oldest["agent"]  # since 1.5
    assert "trajectory_id" not in oldest  # since 1.7
    assert newest["agent"]["tool_definitions"][0]["function"]["name"] == "wiki_search"
    assert newest["trajectory_id"] == "a"
    assert ATIF.write(record(""), Context())["session_id"] == "unnamed"


@pytest.mark.parametrize("version", ["1.0", "1.4", "1.7"])
def test_what_others_wrote_becomes_a_trajectory_of_the_agent(version):
    row = trajectory(version)
    nat.Trajectory.model_validate(row)
    found = read(row, missing_thought="On.")
    assert found.record.kept, found.record.reason
    assert found.record.question == "When?"
    assert found.record.text == (
        "<think>The encyclopaedia will know.\n\nI look it up.</think><wiki_search>mill</wiki_search>"
        "\n<observation>\nfirst\n</observation>\n"
        '<think>On.</think><wiki_search>{"query": "mill", "n": 2}</wiki_search>'
        "\n<observation>\nsecond\n</observation>\n"
        "<think>On.</think><answer>1702</answer>"
    )
    assert [call.observation for call in found.record.calls] == ["first", "second"]
    assert (found.record.id, found.record.model) == ("s1", "big")
    assert (found.record.cost.prompt_tokens, found.record.cost.agent_tokens) == (80, 5)
    assert found.lost == ("steps of the system",)
    refused = read(row).record
    assert not refused.kept
    assert refused.reason.startswith("format: <wiki_search> at character ")


def test_steps_of_an_earlier_trajectory_are_left_out_and_pictures_and_subagents_are_told():
    row = trajectory()
    row["steps"][3]["message"] = [
        {"type": "text", "text": "17"},
        {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}},
        {"type": "text", "text": "02"},
    ]
    copied = {"step_id": 5, "source": "agent", "message": "old", "is_copied_context": True}
    sub = trajectory(trajectory_id="t2")
    row = row | {"steps": [*row["steps"], copied], "subagent_trajectories": [sub]}
    nat.Trajectory.model_validate(row)
    found = read(row)
    assert found.record.text.endswith("<answer>1702</answer>")
    assert set(found.lost) == {
        "steps of the system",
        "steps copied from an earlier trajectory",
        "pictures",
        "1 embedded trajectories of subagents",
    }


def test_results_of_one_call_are_one_observation_in_their_order():
    row = trajectory()
    row["steps"][2]["observation"]["results"].append({"source_call_id": "c1", "content": "more"})
    assert [call.observation for call in read(row).record.calls] == ["first\nmore", "second"]


def test_money_and_time_are_carried_over_and_what_has_no_place_is_told():
    row = trajectory(notes="careful", extra={"foo": 1})
    row["agent"] = {"name": "team", "version": "2", "extra": {"temperature": 1}}
    first, last = row["steps"][2:]
    first |= {"timestamp": "2026-01-02T03:04:15+00:00", "model_name": "big", "reasoning_effort": "high"}
    first["metrics"] |= {"cost_usd": 0.5, "cached_tokens": 3, "logprobs": [-0.1], "extra": {"k": 1}}
    first["tool_calls"][0] |= {"extra": {"k": 1}}
    last |= {"extra": {"k": 1}, "model_name": "small"}
    last["metrics"] |= {"cost_usd": 0.25, "cached_tokens": 0}
    row["final_metrics"] = {"total_cached_tokens": 3, "total_steps": 4}
    nat.Trajectory.model_validate(row)

    found = read(row)

    assert found.record.provenance == {"cost_usd": 0.75}
    cost = found.record.cost
    assert (cost.wall_seconds, cost.tool_calls, found.record.model) == (10, 2, "big")
    assert set(found.lost) == {
        "steps of the system",
        *("models of single steps", "'notes' of the trajectory", "'extra' of the trajectory"),
        *("'extra' of the agent", "'extra' of steps", "'extra' of tool calls"),
        *("'reasoning_effort' of steps", "'cached_tokens' of steps' metrics"),
        *("'logprobs' of steps' metrics", "'extra' of steps' metrics"),
        "'total_cached_tokens' of the final metrics",
    }
    row["final_metrics"] = {"total_cost_usd": 0.8}
    assert read(row).record.provenance == {"cost_usd": 0.8}


def test_odd_values_where_nothing_depends_on_them_refuse_no_row():
    row = trajectory(extra=5)
    row["agent"] = {"name": "team", "version": "2", "extra": ["a"]}
    row["final_metrics"] = {"total_completion_tokens": -3, "total_cost_usd": math.inf}
    row["final_metrics"]["total_prompt_tokens"] = math.nan
    found = read(row)
    assert found.record.cost.agent_tokens >= 0
    assert "cost_usd" not in found.record.provenance
    assert {"'extra' of the trajectory", "'extra' of the agent"} <= set(found.lost)


def test_money_stands_in_the_final_metrics_and_comes_back():
    paid = record().model_copy(update={"provenance": {"cost_usd": 0.5}})
    row = ATIF.write(paid, Context())
    assert nat.Trajectory.model_validate(row).final_metrics.total_cost_usd == 0.5
    assert ATIF.read(row, Context()).record == paid
    bare = ATIF.write(paid, Context(bare=True))
    assert read(bare).record.provenance == {"cost_usd": 0.5}
    assert read(bare).lost == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 2}, r"steps\[0\]: step_id: got 2, expected 1"),
        ({"source": "tool"}, r"steps\[0\]: source: got 'tool'"),
        ({"timestamp": "noon"}, r"steps\[0\]: timestamp: got 'noon', expected ISO 8601"),
        ({"source": "agent"}, "expected a step of the user"),
    ],
)
def test_a_row_that_their_models_refuse_or_that_is_no_conversation_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        read(trajectory(steps=[{"step_id": 1, "source": "user", "message": "x"} | change]))


def test_a_version_without_steps_or_a_result_of_no_call_is_refused():
    with pytest.raises(DataError, match=r"schema_version: got 'ATIF-v2.0', expected ATIF-v1.0 to ATIF-v1.8"):
        read(trajectory("2.0"))
    with pytest.raises(DataError, match="steps: expected a list of steps"):
        read(trajectory(steps=[]))
    row = trajectory()
    row["steps"][2]["observation"]["results"][0]["source_call_id"] = "c9"
    with pytest.raises(ValueError, match="c9"):
        nat.Trajectory.model_validate(row)
    with pytest.raises(DataError, match=r"steps\[2\]: observation: the step has no tool call 'c9'"):
        read(row)


def terminal(calls, results):
    """A run of a terminal agent with one step between the question and the answer; results are (call, text)."""
    row = trajectory()
    row["steps"][2] = {
        "step_id": 3,
        "source": "agent",
        "message": "I type.",
        "tool_calls": [call(name, query=name) for name in calls],
        "observation": {"results": [{"source_call_id": name, "content": text} for name, text in results]},
    }
    return row


BOTH = "<wiki_search>a</wiki_search><wiki_search>b</wiki_search>"


@pytest.mark.parametrize(
    ("calls", "results", "shown", "reason"),
    [
        ("a", [(None, "x")], "<wiki_search>a</wiki_search>|x|", ""),
        ("a", [("a", "x"), (None, "y")], "<wiki_search>a</wiki_search>|x\ny|", ""),
        ("", [(None, "$ ls"), (None, "a.txt")], "|$ ls\na.txt|", "<observation> at character 23 "),
        ("ab", [(None, "x")], f"{BOTH}|x|", "<wiki_search> at character "),
        ("ab", [(None, "x"), (None, "y")], f"{BOTH}|x\ny|", "<wiki_search> at character "),
        ("ab", [(None, "")], f"{BOTH}||", "<wiki_search> at character "),
    ],
)
def test_a_result_that_names_no_call_belongs_to_the_only_call_of_its_step(calls, results, shown, reason):
    row = terminal(calls, results)
    nat.Trajectory.model_validate(row)
    found = read(row, missing_thought="" if len(calls) == 2 else "On.").record
    before, text, after = shown.split("|")
    assert found.text.startswith(
        f"<think>I type.</think>{before}\n<observation>\n{text}\n</observation>\n{after}"
    )
    assert found.kept is not bool(reason)
    assert found.reason.startswith(f"format: {reason}" if reason else "")
    assert [call.observation for call in found.calls] == ([text] if len(calls) == 1 else [""] * len(calls))


def test_a_call_without_a_result_does_not_get_that_of_the_step():
    found = read(terminal("ab", [("a", "x"), (None, "y")]), missing_thought="On.").record
    assert found.reason == "atif: a result names no call of its step, and several could be meant"
    assert not found.kept
    with pytest.raises(DataError, match="the call of 'wiki_search' has no result"):
        read(terminal("ab", [("a", "x")]), missing_thought="On.")


def test_version_8_has_recordings():
    row = trajectory("1.8")
    source = {"media_type": "audio/wav", "path": "a.wav"}
    row["steps"][1]["message"] = [{"type": "text", "text": "When?"}, {"type": "audio", "source": source}]
    found = read(row, missing_thought="On.")
    assert "recordings" in found.lost
    written = ATIF.write(found.record, Context(agent=SPEC, atif_version="1.8"))
    assert written["schema_version"] == "ATIF-v1.8"
    assert ATIF.read(written, Context(agent=SPEC)).record == found.record
    nat.Trajectory.model_validate(written | {"schema_version": "ATIF-v1.7"})  # nothing else is new
    assert ATIF.write(found.record, Context(agent=SPEC))["schema_version"] == "ATIF-v1.7"
