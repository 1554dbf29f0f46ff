import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.convert import FORMATS, Context
from afm.trajectory.convert.base import KEY
from afm.trajectory.observation import observation_text
from afm.trajectory.record import CallRecord, Cost, Record, Verdict
from afm.trajectory.tags import Author, Segment

SPEC = load_agent("mhqa")
KEEPING = [name for name, entry in FORMATS.items() if entry.writable and entry.kept]
PAGE = "Doc 1: the mill\n\n  was built in <1702>."
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FORMS = [
    "Action: x",
    "Observation: y\nFinal Answer: z",
    "<think>",
    "</answer>",
    '{"a": 1}',
    "Thought:",
    "\x00",
    " \n",
]
WORDS = st.one_of(TEXTS, st.sampled_from(FORMS))
NUMBERS = st.integers(0, 10**6)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=4
)


@st.composite
def segments(draw):
    """Mostly trajectories of the agent, sometimes anything."""
    if draw(st.integers(0, 3)) == 0:
        kinds = st.sampled_from(list(Author))
        return tuple(draw(st.lists(st.builds(Segment, author=kinds, text=WORDS), max_size=5)))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        said = "".join(
            f"<{role}>{draw(WORDS)}</{role}>"
            for role in draw(st.lists(st.sampled_from(["think", "plan", "reflection"])))
        )
        gap = draw(st.sampled_from(["", "\n"]))
        found.append(Segment(Author.AGENT, f"{said}{gap}<wiki_search>{draw(WORDS)}</wiki_search>"))
        result = observation_text(draw(WORDS), SPEC, 200)
        found.append(Segment(Author.ENVIRONMENT, draw(st.sampled_from(["", " "])) + result))
    found.append(Segment(Author.AGENT, f"<think>{draw(WORDS)}</think><answer>{draw(WORDS)}</answer>"))
    return tuple(found)


CALLS = st.builds(
    CallRecord,
    role=TEXTS,
    tool=TEXTS,
    argument=TEXTS,
    observation=TEXTS,
    ok=st.booleans(),
    seconds=st.floats(0, 9),
)
RECORDS = st.builds(
    Record,
    id=TEXTS,
    agent=st.just("mhqa"),
    agent_digest=st.sampled_from([SPEC.digest, "", "older"]),
    question=WORDS,
    segments=segments(),
    ground_truth=JSON,
    data_source=TEXTS,
    model=TEXTS,
    seed=st.none() | NUMBERS,
    verdict=st.none() | st.builds(Verdict, score=st.none() | st.floats(0, 1), evidence=TEXTS),
    cost=st.builds(Cost, prompt_tokens=NUMBERS, agent_tokens=NUMBERS, tool_calls=NUMBERS),
    calls=st.lists(CALLS, max_size=2).map(tuple),
    response_ids=st.none() | st.lists(NUMBERS, max_size=3).map(tuple),
    provenance=st.dictionaries(TEXTS, JSON, max_size=2),
    kept=st.booleans(),
    reason=TEXTS,
)


def there_and_back(name, record, **options):
    context = Context(**options)
    row = json.loads(json.dumps(FORMATS[name].write(record, context), ensure_ascii=False))
    return row, FORMATS[name].read(row, Context()).record


@pytest.mark.parametrize("name", KEEPING)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=RECORDS)
def test_every_record_comes_back_as_it_was(name, record):
    row, back = there_and_back(name, record)
    assert back == record
    assert FORMATS[name].known(row)


def proper():
    said = (
        "<think>Begin.</think><plan>1. Look.</plan><think>Look.</think><wiki_search>mill</wiki_search>",
        observation_text(PAGE, SPEC, 8000),
        "<think>Found.</think><answer>1702</answer>",
    )
    authors = (Author.AGENT, Author.ENVIRONMENT, Author.AGENT)
    call = CallRecord(role="wiki_search", tool="wiki_search", argument="mill", observation=PAGE, ok=True)
    return Record(
        id="a",
        agent="mhqa",
        agent_digest=SPEC.digest,
        question="When?",
        segments=tuple(Segment(author, text) for author, text in zip(authors, said, strict=True)),
        ground_truth="1702",
        calls=(call,),
    )


@pytest.mark.parametrize("name", ["atif", "agent_flan", "openai", "sharegpt", "smolagents"])
def test_a_proper_trajectory_stands_in_what_the_format_shows_and_not_beside_it(name):
    row, back = there_and_back(name, proper())
    kept = FORMATS[name].kept(row)
    assert back == proper()
    assert set(kept) == {"id", "agent", "agent_digest", "ground_truth"}
    assert PAGE.splitlines()[0] in json.dumps(row)


@pytest.mark.parametrize("name", [*KEEPING, "messages"])
def test_bare_rows_hold_only_what_the_format_knows_and_are_still_trajectories(name):
    if name == "coa":
        return
    row = FORMATS[name].write(proper(), Context(bare=True))
    back = FORMATS[name].read(row, Context(agent=SPEC)).record
    assert KEY not in json.dumps(row)
    assert back.question == "When?"
    assert back.text.endswith("<answer>1702</answer>")
    assert back.kept, back.reason
    if name != "react":
        assert back.segments == proper().segments
        assert back.id in ("", "a", "unnamed")


def test_what_somebody_changed_in_a_row_counts():
    record = proper().model_copy(update={"segments": (Segment(Author.AGENT, "odd"),)})
    row, back = there_and_back("openai", record)
    assert back == record
    assert row[KEY]["segments"] == [{"author": "agent", "text": "odd"}]
    row["messages"][-1]["content"] = "<think>New.</think><answer>1703</answer>"
    changed = FORMATS["openai"].read(row, Context()).record
    assert changed.text == "<think>New.</think><answer>1703</answer>"
    assert (changed.id, changed.ground_truth) == ("a", "1702")


def test_a_key_that_holds_something_else_is_refused():
    row = FORMATS["alpaca"].write(proper(), Context())
    with pytest.raises(DataError, match="afm: got text, expected an object"):
        FORMATS["alpaca"].read({**row, KEY: "x"}, Context())
    with pytest.raises(DataError, match="afm: seed: got 'x'"):
        FORMATS["alpaca"].read({**row, KEY: {**row[KEY], "seed": "x"}}, Context())
