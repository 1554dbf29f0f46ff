import pytest

from afm.agents import AgentSpec, load_agent
from afm.agents.load import without_tools
from afm.datasets.negative_samples import (
    AbsentAnswer,
    DirectAnswer,
    GeneralQuestion,
    NegativeKind,
    SampleMaker,
    general_question,
)
from afm.errors import DataError
from afm.trajectory import Author, Segment, validate
from afm.trajectory.call_forms import written_calls
from afm.trajectory.record import Record, Verdict

MATH = load_agent("math")
CALLED = (
    ("<plan>P.</plan><think>Run it.</think><code>\n```py\nprint(57*38)\n```\n</code>", "agent"),
    ("\n<observation>\n2166\n</observation>\n", "environment"),
    ("<reflection>Good.</reflection><think>So.</think><answer>\\boxed{2166}</answer>", "agent"),
)
DIRECT = (("<plan>P.</plan><think>One and one.</think><answer>\\boxed{2}</answer>", "agent"),)


def record(segments, name="a", agent="math", **fields):
    parts = tuple(Segment(Author(author), text) for text, author in segments)
    return Record(id=name, agent=agent, agent_digest="d", question=f"{name}?", segments=parts, **fields)


def by_kind(samples):
    assert len({sample.kind for sample in samples}) == len(samples)
    return {sample.kind: sample for sample in samples}


def test_a_trajectory_with_a_call_stays_as_it_is_and_is_asked_again_without_tools():
    made = by_kind(SampleMaker(MATH).of_record(record(CALLED)))
    assert set(made) == {NegativeKind.PRESENT_NEEDED, NegativeKind.ABSENT_NEEDED}
    needed = made[NegativeKind.PRESENT_NEEDED]
    assert needed.instruction == MATH.user_message("a?")
    assert needed.output == "".join(text for text, _ in CALLED)
    absent = made[NegativeKind.ABSENT_NEEDED]
    bare = without_tools(MATH)
    assert absent.instruction.startswith(bare.user_message("a?") + "\n\n")
    assert "code" in absent.instruction.removeprefix(bare.user_message("a?"))
    assert absent.output.startswith("<think>")
    assert absent.output.endswith(" from what I know.</think>\n<answer>\\boxed{2166}</answer>")
    assert (absent.agent, absent.answer_from) == (bare, "trajectory")


def test_requests_and_refusals_vary_and_none_of_them_calls_anything():
    bare = without_tools(MATH)
    maker = SampleMaker(MATH, seed=3)
    asked, said = set(), set()
    for number in range(60):
        sample = by_kind(maker.of_record(record(CALLED, f"q{number}")))[NegativeKind.ABSENT_NEEDED]
        asked.add(sample.instruction.rpartition("?\n\n")[2])
        said.add(sample.output)
        segments = [Segment(Author.AGENT, sample.output)]
        assert validate(segments, bare) == ()
        assert written_calls(segments, bare, original=MATH) == ()
    assert len(asked) == len(said) == 4
    assert any("<code>...</code>" in text for text in asked)
    assert any("Action: code\nAction Input:" in text for text in asked)
    assert any('{"name": "code", "arguments": {...}}' in text for text in asked)


EXPLAINS = SampleMaker(MATH, absent_answer=AbsentAnswer.EXPLAIN)


@pytest.mark.parametrize(("maker", "verdict"), [(EXPLAINS, None), (SampleMaker(MATH), Verdict(score=0.0))])
def test_where_no_answer_may_be_given_the_sample_only_explains(maker, verdict):
    sample = by_kind(maker.of_record(record(CALLED, verdict=verdict)))[NegativeKind.ABSENT_NEEDED]
    assert sample.instruction.startswith("a?\n\n")
    assert sample.output.endswith("I will not make up a result.")
    assert "2166" not in sample.output
    assert "<" not in sample.output
    assert (sample.agent, sample.answer_from) == (None, "rule")


def test_a_trajectory_without_a_call_shows_that_none_was_needed():
    made = by_kind(SampleMaker(MATH).of_record(record(DIRECT)))
    assert set(made) == {NegativeKind.PRESENT_NOT_NEEDED, NegativeKind.ABSENT_NOT_NEEDED}
    assert made[NegativeKind.PRESENT_NOT_NEEDED].output == DIRECT[0][0]
    assert made[NegativeKind.PRESENT_NOT_NEEDED].instruction == MATH.user_message("a?")
    absent = made[NegativeKind.ABSENT_NOT_NEEDED]
    assert absent.output == "<think>One and one.</think>\n<answer>\\boxed{2}</answer>"
    assert absent.instruction == without_tools(MATH).user_message("a?")


def test_a_wrong_answer_without_a_call_shows_nothing():
    assert SampleMaker(MATH).of_record(record(DIRECT, verdict=Verdict(score=0.0))) == []
    assert len(SampleMaker(MATH).of_record(record(DIRECT, verdict=Verdict(score=1.0)))) == 2
    assert len(SampleMaker(MATH).of_record(record(DIRECT, verdict=Verdict(score=None)))) == 2


def test_trajectories_against_the_rules_and_of_other_agents_are_refused():
    with pytest.raises(DataError, match="record 'a' breaks the rules of agent 'math'"):
        SampleMaker(MATH).of_record(record(((DIRECT[0][0].replace("plan", "reflection"), "agent"),)))
    with pytest.raises(DataError, match="belongs to agent 'web', expected 'math'"):
        SampleMaker(MATH).of_record(record(DIRECT, agent="web"))


PARIS = GeneralQuestion("g", "Capital of France?", "Paris", "Be brief.")


def test_a_general_question_is_answered_plainly_and_by_the_agent_without_its_tools():
    made = by_kind(SampleMaker(MATH).of_question(PARIS))
    plain = made[NegativeKind.ABSENT_NOT_NEEDED]
    assert (plain.instruction, plain.output, plain.agent) == ("Capital of France?", "Paris", None)
    present = made[NegativeKind.PRESENT_NOT_NEEDED]
    assert present.instruction == MATH.user_message("Capital of France?")
    assert (plain.system, present.system) == ("Be brief.", "Be brief.")
    said = present.output.partition("<plan>")[2].partition("</plan>")[0]
    assert "tool" in said or "looked up" in said
    assert present.output == f"<plan>{said}</plan>\n<think>{said}</think>\n<answer>\\boxed{{Paris}}</answer>"


@pytest.mark.parametrize(
    ("name", "way"),
    [("math", ("plan", "answer")), ("code", ("plan", "answer")), ("mhqa", ("plan", "answer")), ("web", ())],
)
def test_the_shortest_way_calls_nothing_and_makes_up_no_grade(name, way):
    spec = load_agent(name)
    assert SampleMaker(spec).direct_way == way
    made = by_kind(SampleMaker(spec).of_question(PARIS))
    assert (NegativeKind.PRESENT_NOT_NEEDED in made) is bool(way)
    for sample in made.values():
        if sample.agent:
            assert validate([Segment(Author.AGENT, sample.output)], spec) == ()
    free = by_kind(SampleMaker(spec, direct_answer=DirectAnswer.PLAIN).of_question(PARIS))
    assert free[NegativeKind.PRESENT_NOT_NEEDED].output == "Paris"
    assert free[NegativeKind.PRESENT_NOT_NEEDED].instruction == spec.user_message("Capital of France?")


def test_an_agent_without_a_prompt_is_never_shown_its_own_prompt_as_one_without_tools():
    silent = MATH.model_copy(update={"prompt": "", "question_format": "{question}"})
    bare = without_tools(silent)
    made = by_kind(SampleMaker(silent).of_question(PARIS))
    absent = made[NegativeKind.ABSENT_NOT_NEEDED]
    assert absent.instruction == bare.user_message("Capital of France?") != "Capital of France?"
    assert absent.output.endswith("</think>\n<answer>\\boxed{Paris}</answer>")
    assert made[NegativeKind.PRESENT_NOT_NEEDED].instruction == "Capital of France?"
    wrong = record(CALLED, verdict=Verdict(score=0.0))
    assert set(by_kind(SampleMaker(silent).of_record(wrong))) == {NegativeKind.PRESENT_NEEDED}
    asked = by_kind(SampleMaker(silent).of_record(record(CALLED)))[NegativeKind.ABSENT_NEEDED]
    assert asked.instruction.startswith(bare.user_message("a?"))


@pytest.mark.parametrize("answer", ["x", "two\nlines", "```py\nprint(1)\n```", "`````"])
def test_a_fence_holds_any_answer(answer):
    spec = load_agent("code")
    made = by_kind(SampleMaker(spec).of_question(GeneralQuestion("g", "Q?", answer)))
    sample = made[NegativeKind.PRESENT_NOT_NEEDED]
    assert validate([Segment(Author.AGENT, sample.output)], spec) == ()
    assert f"text\n{answer}\n```" in sample.output


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("Write <code>x</code>.", "holds <code>, a tag of agent 'math'"),
        ("I use <web_search>Paris</web_search>.", r"the form of a tool call \(web_search\)"),
        ("Action: look up\nAction Input: Paris", r"the form of a tool call \(look up\)"),
        ("a } b {", r"cannot be written in the format 'boxed' of agent 'math': it would read \('a',\)"),
    ],
)
def test_an_answer_that_calls_something_or_breaks_the_format_is_refused(answer, complaint):
    with pytest.raises(DataError, match=complaint):
        SampleMaker(MATH).of_question(GeneralQuestion("g", "Q?", answer))


SAY = {
    "seek": {"kind": "tool", "tool": "seek"},
    "seen": {"kind": "observation"},
    "say": {"kind": "answer"},
}


@pytest.mark.parametrize(("muse", "way"), [(["muse", "weigh"], ("muse", "weigh", "say")), (["seek"], ())])
def test_the_way_to_a_direct_answer_goes_around_tools(muse, way):
    ways = {"start": ["seek", "muse"], "seek": ["say"], "muse": muse, "weigh": ["say"]}
    spec = AgentSpec(name="slow", roles=SAY | {"muse": {}, "weigh": {}}, transitions=ways)
    assert SampleMaker(spec).direct_way == way


def test_an_agent_without_thoughts_just_answers():
    spec = AgentSpec(name="terse", roles=SAY, transitions={"start": ["seek", "say"], "seek": ["say"]})
    seen = ("\n<seen>\ny\n</seen>\n", "environment")
    segments = (("<seek>x</seek>", "agent"), seen, ("<say>y</say>", "agent"))
    made = by_kind(SampleMaker(spec).of_record(record(segments, agent="terse")))
    assert made[NegativeKind.ABSENT_NEEDED].output == "<say>y</say>"


TURNS = ("system", "user", "assistant")


def spoken(*contents, roles=("user", "assistant", "user")):
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_general_rows_are_questions_with_answers_or_chat_messages():
    row = {"question": "Q", "answer": ["A", "B"]}
    assert general_question(row, default_id="7") == GeneralQuestion("7", "Q", "A")
    system = {"role": "system", "content": "S"}
    row = {"id": 5, "messages": [system, *spoken([{"type": "text", "text": "Q"}], "A", "more")]}
    assert general_question(row, default_id="7") == GeneralQuestion("5", "Q", "A", "S")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([], "got list, expected an object"),
        ({"question": "Q"}, "answer: got 'None', expected a text"),
        ({"question": " ", "answer": "A"}, "question: got ' ', expected a text that is not empty"),
        ({"messages": "hi"}, "expected a list of messages"),
        ({"messages": spoken(" ", "Q", "A", roles=TURNS)}, "system: got ' ', expected a text"),
        ({"messages": spoken("A", roles=["assistant"])}, "expected user, then assistant"),
        ({"messages": [*spoken("Q"), spoken("Q", "")[1] | {"tool_calls": [{}]}]}, "first reply calls a tool"),
    ],
)
def test_other_rows_are_refused_with_the_reason(row, complaint):
    with pytest.raises(DataError, match=complaint):
        general_question(row, default_id="1")
