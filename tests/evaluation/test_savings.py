import pytest

from afm.errors import DataError
from afm.evaluation.paired import Per, Played, Quantity, paired_difference, savings
from afm.evaluation.prices import Prices
from afm.evaluation.wording import CostCells, cost_cells, savings_words
from afm.trajectory.record import CallRecord, Cost

PRICES = Prices(prompt=1.0, completion=10.0, tools={"wiki_search": 0.5})
CALL = CallRecord(role="wiki_search", tool="wiki_search", argument="a", observation="b", ok=True)


def episode(record, task, score, *, read, wrote, calls, number=0, **cost):
    made = Cost(read_tokens=read, agent_tokens=wrote, tool_calls=calls, wall_seconds=1.0, **cost)
    return record(task, score, number=number, cost=made).model_copy(update={"calls": (CALL,) * calls})


def runs(record, *, prices=PRICES, **cost):
    """The team solves 3 of 4 at 1,000 tokens a task, the model 2 of 4 at 100."""
    team = [
        episode(record, f"q{n}", float(n > 0), read=900, wrote=100, calls=4, model_usd=3.0, **cost)
        for n in range(4)
    ]
    model = [episode(record, f"q{n}", float(n > 1), read=80, wrote=20, calls=1) for n in range(4)]
    return Played("team", team, prices, True), Played("model", model, PRICES, False)


def test_each_figure_is_paired_by_question(record):
    found = savings(*runs(record))

    score = found.row(Quantity.SCORE)
    assert (score.team, score.model, score.difference.value, score.saving) == (0.75, 0.5, -0.25, None)
    assert score.difference.low < -0.25 < score.difference.high == 0.0
    tokens = found.row(Quantity.TOKENS)
    assert (tokens.team, tokens.model, tokens.difference.value) == (1000, 100, -900)
    assert (tokens.saving.value, tokens.saving.low, tokens.saving.high) == pytest.approx((0.9, 0.9, 0.9))
    assert found.row(Quantity.CALLS).saving.value == 0.75
    dollars = found.row(Quantity.DOLLARS)  # the team by prices of its own, both with half a dollar a call
    assert (dollars.team, dollars.model) == pytest.approx((3.0 + 4 * 0.5, (80 + 200) / 1e6 + 0.5))
    observed = found.row(Quantity.OBSERVED)
    assert (observed.team, observed.model, observed.difference) == (None, 0.0, None)
    assert found.notes == ()


@pytest.mark.parametrize(("theirs", "ours"), [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
def test_where_all_questions_change_alike_no_score_is_certain(record, theirs, ours):
    made = {"read": 1, "wrote": 1, "calls": 0}
    team = [episode(record, f"q{n}", theirs, **made) for n in range(3)]
    model = [episode(record, f"q{n}", ours, **made) for n in range(3)]

    table = savings(Played("team", team, None, True), Played("model", model, None, False))

    found = table.row(Quantity.SCORE).difference
    assert found == paired_difference(team, model).difference
    assert found.low < found.value
    assert table.row(Quantity.TOKENS).difference.low == 0.0


def test_a_solved_task_carries_the_cost_of_the_failed_ones(record):
    found = savings(*runs(record))

    tokens = found.row(Quantity.TOKENS, Per.SOLVED)
    assert (tokens.team, tokens.model) == pytest.approx((4000 / 3, 400 / 2))
    assert tokens.saving.value == pytest.approx(1 - 200 * 3 / 4000)
    assert tokens.saving.low is None, "in (1/2)^4 = 6 % of the resamples the model solves nothing"
    assert tokens.saving.value <= tokens.saving.high <= 1
    assert cost_cells(tokens).saving_range.startswith("no lower end to ")
    assert savings_words(found) == (
        "team (team) and model (model) on the same 4 questions. The model needs 85.0 % fewer tokens and 62.5 % fewer "
        "tool calls per solved task."
    )


def test_rounds_of_a_question_count_as_their_mean_and_episodes_without_a_score_not_at_all(record):
    team, model = runs(record)
    more = [
        episode(record, "q0", 1.0, read=2900, wrote=100, calls=0, number=1),
        episode(record, "q0", None, read=10**6, wrote=0, calls=0, number=2),
        episode(record, "elsewhere", 1.0, read=10**6, wrote=0, calls=0),
    ]
    found = savings(Played("team", [*team.records, *more], PRICES, True), model)

    assert found.questions == 4
    assert found.row(Quantity.SCORE).team == (0.5 + 3) / 4
    assert found.row(Quantity.TOKENS).team == (2000 + 3 * 1000) / 4


def test_what_an_endpoint_did_not_report_and_what_has_no_price_is_not_known(record):
    free = savings(*runs(record, prices=None))
    assert (free.row(Quantity.DOLLARS).team, free.row(Quantity.TOKENS).team) == (None, 1000)
    assert free.notes == ("team has no prices, so its dollars are not known.",)
    found = savings(*runs(record, unmetered=1))

    assert found.row(Quantity.TOKENS).team is None
    assert found.row(Quantity.DOLLARS).team is None
    assert found.row(Quantity.TOKENS, Per.SOLVED).saving is None
    assert found.row(Quantity.CALLS).saving.value == 0.75
    assert found.notes == (
        "team: an endpoint did not report its usage, so tokens and dollars are not known.",
    )
    assert cost_cells(found.row(Quantity.TOKENS)) == CostCells("tokens", "–", "100", "–", "", "–", "")


def test_a_team_that_needs_nothing_leaves_nothing_to_save(record):
    team = [episode(record, f"q{n}", 0.0, read=0, wrote=0, calls=0) for n in range(4)]
    found = savings(Played("team", team, PRICES, True), runs(record)[1])
    assert found.row(Quantity.TOKENS).saving is None
    assert found.row(Quantity.TOKENS, Per.SOLVED).team is None
    with pytest.raises(DataError, match="no scored question in common"):
        savings(Played("team", [], None, True), runs(record)[1])
