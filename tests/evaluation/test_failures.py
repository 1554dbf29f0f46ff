import pytest

from afm.agents import load_agent
from afm.evaluation.failures import Failure, failure_of, scan
from afm.trajectory.record import Cost, StopReason, Verdict, sealed

SPEC = load_agent("math")
ANSWER = "<plan>p</plan><think>t</think><answer>\\boxed{2}</answer>"


def verdict(correct, form):
    return Verdict(score=correct * form, parts={"correct": correct, "format": form})


CASES = {
    Failure.INFRASTRUCTURE: {"error": "EngineError: gone", "verdict": None, "stop": StopReason.ERROR},
    Failure.ABSTAINED: {"score": None},
    Failure.CUT_SHORT: {"text": "<plan>p</plan>", "stop": StopReason.TURNS, "verdict": verdict(0.0, 0.0)},
    Failure.FORGED_OBSERVATION: {"text": "<plan>p</plan>", "stop": StopReason.FORGED_OBSERVATION},
    Failure.NO_ANSWER: {"text": "I give up.", "stop": StopReason.END_OF_TEXT, "verdict": verdict(0.0, 0.0)},
    Failure.PARTLY: {"text": "not tagged", "stop": StopReason.END_OF_TEXT, "verdict": verdict(0.5, 1.0)},
    Failure.FORMAT_ONLY: {"text": ANSWER, "verdict": verdict(1.0, 0.0)},
    Failure.WRONG_AND_FORMAT: {"text": ANSWER, "verdict": verdict(0.0, 0.0)},
    Failure.TOOL_ERRORS: {"text": ANSWER, "cost": Cost(tool_calls=4, tool_failures=2)},
    Failure.WRONG: {"text": ANSWER, "cost": Cost(tool_calls=4, tool_failures=1)},
}


def made(record, kind, task="a", number=0):
    fields = dict(CASES[kind])
    return record(task, fields.pop("score", 0.0), number=number, **fields)


@pytest.mark.parametrize("kind", CASES)
def test_each_class_has_its_episode(record, kind) -> None:
    assert failure_of(made(record, kind), SPEC) is kind


def test_every_class_has_a_case_and_a_name_and_passed_episodes_have_no_class(record) -> None:
    assert list(CASES) == list(Failure)
    assert len({kind.label for kind in Failure}) == len(Failure)
    assert failure_of(record("a", 1.0, text=ANSWER), SPEC) is None


def test_a_limit_after_an_answer_is_not_what_went_wrong(record) -> None:
    late = record("a", 0.0, text=ANSWER, stop=StopReason.RESPONSE_TOKENS, verdict=verdict(0.0, 1.0))
    assert failure_of(late, SPEC) is Failure.WRONG


def test_groups_count_and_show_the_first_of_different_questions(record) -> None:
    rows = [
        *(made(record, Failure.WRONG, task, number) for task in "ab" for number in range(2)),
        *(made(record, Failure.WRONG, task) for task in "cd"),
        made(record, Failure.CUT_SHORT, "e"),
        *(record(f"p{i}", 1.0, text=ANSWER) for i in range(3)),
    ]
    wrong, cut = scan(rows, SPEC).failures
    assert (wrong.kind, wrong.count, wrong.share) == (Failure.WRONG, 6, 0.6)
    assert [example.record.id for example in wrong.examples.values()] == ["a#0", "b#0", "c#0"]
    assert [example.answer for example in wrong.examples.values()] == ["2"] * 3
    assert (cut.kind, cut.count, cut.stops) == (Failure.CUT_SHORT, 1, {"turns": 1})


def test_a_sealed_episode_is_sorted_by_what_it_holds_and_shown_sealed(record) -> None:
    secret = sealed(made(record, Failure.WRONG), "canary")
    (group,) = scan([secret], SPEC).failures
    (example,) = group.examples.values()
    assert group.kind is Failure.WRONG
    assert (example.record.question, example.answer) == ("(sealed)", "")


def test_what_is_solved_within_a_budget(record) -> None:
    spent = {"a": (1.0, 90), "b": (1.0, 20), "c": (0.0, 5), "d": (1.0, 20), "e": (None, 1)}
    found = scan(
        (
            record(task, score, text=ANSWER, cost=Cost(agent_tokens=tokens, observation_tokens=10))
            for task, (score, tokens) in spent.items()
        ),
        SPEC,
    )
    assert (found.tokens, found.solved) == ((30.0, 100.0), (0.5, 0.75))
    assert scan([record("a", 0.0)], SPEC).tokens == ()
