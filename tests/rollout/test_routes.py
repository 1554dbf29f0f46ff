from pathlib import Path

import pytest
from pydantic import TypeAdapter

from afm.agents import load_agent, save_agent
from afm.errors import ConfigError, DataError
from afm.rollout.routes import AgentRoute, AgentRoutes, Opened, Routes, mismatch, routes_of

TOP = AgentRoute(agent="code", rewards={"formula": "correct"}, limits={"max_turns": 5, "max_seconds": 9})
SECTION = {
    "code": {"data_sources": ["livecodebench*", "codeforces"]},
    "math": {"agent": "math", "data_sources": ["AIME*", "math"], "limits": {"max_turns": 2}},
}


def routes(section: dict[str, object], top: AgentRoute = TOP) -> Routes:
    return routes_of(top, TypeAdapter(AgentRoutes).validate_python(section), load_agent)


def test_a_route_takes_from_the_top_level_what_it_does_not_say() -> None:
    found = routes(SECTION)
    code, math = found
    assert (code.declared.name, math.declared.name) == ("code", "math")
    assert code.rewards == math.rewards == {"formula": "correct"}
    assert (code.limits.max_turns, math.limits.max_turns) == (5, 2)
    assert (code.limits.max_seconds, math.limits.max_seconds) == (9, 9)
    assert math.spec.limits == math.limits
    assert found.first is code
    assert found.max_response_tokens == 16384


def test_rows_go_to_the_first_entry_that_takes_them_whatever_the_letter_case() -> None:
    found = routes(SECTION)
    assert found.of("livecodebench_v5").name == "code"
    assert found.of("aime24").name == found.of("MATH").name == "math"
    assert found.find("gaia") is None
    with pytest.raises(
        DataError, match=r"takes rows of data_source 'gaia' and ability 'web'; list it in .* code, math"
    ):
        found.of("gaia", "web")


def test_abilities_choose_too_and_an_entry_without_either_takes_the_rest() -> None:
    found = routes({"math": {"agent": "math", "abilities": "math"}, "code": {}})
    assert found.of("taco", "Math").name == "math"
    assert found.of("taco", "code").name == found.of("").name == "code"


def test_without_the_section_one_agent_takes_every_row() -> None:
    found = routes({})
    assert (found.by_row, found.of("anything").name, found.first.key) == (False, "", "agent")
    assert [spec.name for spec in found.specs] == ["code"]


def test_agents_that_several_entries_share_are_one() -> None:
    found = routes({"short": {"agent": "math", "data_sources": "aime*"}, "long": {"agent": "math"}})
    assert [spec.name for spec in found.specs] == ["math"]


def test_the_longest_response_is_that_of_the_agent_with_the_most() -> None:
    for most, longest in ((9, 16384), (None, None)):
        first = {"data_sources": "x", "limits": {"max_response_tokens": most}}
        assert routes({"a": first, "b": {}}).max_response_tokens == longest


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"a": {"agent": "maths"}}, r"agents\.a\.agent: agent 'maths' is not shipped"),
        ({"a": {}, "b": {"data_sources": "x"}}, r"agents\.b gets no row: agents\.a has neither"),
        (
            {"a": {"data_sources": "aime*"}, "b": {"data_sources": ["AIME24"]}},
            r"agents\.b\.data_sources: agents\.a\.data_sources already takes 'AIME24'",
        ),
    ],
)
def test_entries_that_contradict_each_other_are_refused_by_their_key(
    section: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        routes(section)


def test_two_declarations_of_one_name_are_refused(tmp_path: Path) -> None:
    save_agent(load_agent("math").model_copy(update={"prompt": "short"}), tmp_path / "own.yaml")
    section = {"a": {"agent": "math", "data_sources": "x"}, "b": {"agent": str(tmp_path / "own.yaml")}}
    with pytest.raises(ConfigError, match=r"agents\.a and agents\.b: two different agents are called 'math'"):
        routes(section)


def test_a_missing_agent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"agents\.a\.agent: missing, also at the top level"):
        routes({"a": {}}, AgentRoute())


def test_rows_that_nothing_takes_end_a_run_and_patterns_that_take_nothing_are_told() -> None:
    found = routes(SECTION)
    kinds = {("aime24", ""): 3, ("livecodebench", "code"): 2}
    assert found.check(kinds, "a.parquet") == [
        "agents.code.data_sources: no row of a.parquet matches codeforces",
        "agents.math.data_sources: no row of a.parquet matches math",
    ]
    with pytest.raises(
        DataError,
        match=r"^a\.parquet: no entry of `agents` takes rows of data_source 'gpqa' \(4 rows\); list",
    ):
        found.check({**kinds, ("gpqa", ""): 4}, "a.parquet")
    with pytest.raises(DataError, match=r"\(1 row\); list"):
        found.check({("gpqa", ""): 1}, "a.parquet")


def test_an_agent_can_only_solve_what_wants_the_form_of_its_answers() -> None:
    code, math, web = load_agent("code"), load_agent("math"), load_agent("web")
    wants_result = "agent 'code' answers with a program in a fence, but math expects a result"
    wants_program = "agent 'math' answers with a boxed result, but code_tests expects a program"
    assert (mismatch(code, "math"), mismatch(math, "code_tests")) == (wants_result, wants_program)
    assert mismatch(code, "code_tests") is mismatch(math, "math") is mismatch(web, "code_tests") is None
    assert mismatch(code, "my_rewards.Mine") is mismatch(code, "judge") is None


def test_what_several_agents_share_is_opened_once() -> None:
    opened: list[object] = []
    made = Opened(lambda source: opened.append(source) or len(opened))
    assert [made.of(source) for source in ({"a": 1}, Path("b"), {"a": 1}, None)] == [1, 2, 1, 3]
