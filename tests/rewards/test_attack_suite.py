"""The attack suite: every attack gets the score that it deserves, and a reward that scores too high is found."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from patient_scorer import PAUSE_S, ROUNDS, STARVED

from afm.errors import ConfigError
from afm.rewards import load_reward
from afm.rewards.attack_suite import Attack, Outcome, load_attacks, outcomes, shipped_attacks
from afm.trajectory.tags import Author, Segment


async def tried(reward: Any, scorer: str) -> list[Outcome]:
    attacks = [attack for attack in shipped_attacks() if attack.scorer == scorer]
    assert attacks
    try:
        return [outcome async for outcome in outcomes(reward, attacks)]
    finally:
        await reward.close()


def failures(found: list[Outcome]) -> list[tuple[str, float | None, str]]:
    return [(outcome.attack.name, outcome.got, outcome.evidence) for outcome in found if not outcome.passed]


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["math", "exact_match", "substring", "choice", "judge"])
async def test_everything_gets_what_it_deserves(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRM_BASE_URL", raising=False)
    assert failures(await tried(load_reward(), scorer)) == []


@pytest.mark.slow
@pytest.mark.sandbox
async def test_programs_get_what_they_deserve() -> None:
    reward = load_reward({"code_tests": {"case_s": 2.0, "total_s": 20.0}})
    attacks = [attack for attack in shipped_attacks() if attack.scorer == "code_tests"]
    try:
        for _ in range(ROUNDS):
            found = [outcome async for outcome in outcomes(reward, attacks)]
            # What the machine starved of CPU time says nothing about a reward: other tests run beside this one.
            attacks = [
                one.attack
                for one in found
                if one.got is None and any(sign in one.evidence for sign in STARVED)
            ]
            assert failures([one for one in found if one.attack not in attacks]) == []
            if not attacks:
                return
            await asyncio.sleep(PAUSE_S)
    finally:
        await reward.close()
    pytest.fail(f"starved again and again: {failures(found)}")


@pytest.mark.parametrize("character", ["strict", "gullible", "harsh", "parrot"])
async def test_no_judge_can_be_talked_into_paying(judge_server: Any, character: str) -> None:
    judge_server.character = character
    found = await tried(load_reward({"judge": {"attempts": 1}}), "judge")
    assert [outcome.attack.name for outcome in found if (outcome.got or 0.0) > outcome.attack.deserves] == []
    assert len(judge_server.requests) > 10
    if character in ("strict", "gullible"):
        assert failures(found) == []


async def test_the_suite_sees_what_a_careless_judge_pays_for(judge_server: Any) -> None:
    judge_server.character = "gullible"
    found = await tried(load_reward({"judge": {"control": False}}), "judge")
    paid = {outcome.attack.name for outcome in found if outcome.got == 1.0 and not outcome.passed}
    assert {"order to the judge", "end of the data", "reference without content"} <= paid


async def test_the_suite_sees_a_judge_that_is_down(judge_server: Any) -> None:
    judge_server.character = "mute"
    found = await tried(load_reward({"judge": {"attempts": 1}}), "judge")
    assert {outcome.got for outcome in found if outcome.attack.name == "wrong answer"} == {None}


def test_there_are_attacks_on_every_scorer_and_honest_rows_among_them() -> None:
    attacks = shipped_attacks()
    assert len(attacks) >= 100
    for scorer in ("math", "exact_match", "choice", "judge", "code_tests"):
        deserved = {attack.deserves for attack in attacks if attack.scorer == scorer}
        assert deserved == {0.0, 1.0}
    names = [(attack.scorer, attack.part, attack.name) for attack in attacks]
    assert len(names) == len(set(names))


ROW = {"name": "x", "scorer": "s", "agent": "math", "question": "q", "ground_truth": "g", "deserves": 0}


def test_pieces_become_segments_by_author() -> None:
    answer = ["x", {"repeat": "yz", "times": 2}, {"environment": "seen"}]
    attack = Attack.model_validate(ROW | {"frame": "<a>{answer}</a>", "answer": answer})
    assert attack.segments() == (
        Segment(Author.AGENT, "<a>xyzyz"),
        Segment(Author.ENVIRONMENT, "seen"),
        Segment(Author.AGENT, "</a>"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attacks: 3", "attacks: got number, expected a list of rows"),
        ("attacks: [{name: x}]", r"attacks\[0\]\.scorer: missing"),
        (json.dumps({"attacks": [ROW | {"anser": "z"}]}), r"attacks\[0\]\.anser: .*did you mean 'answer'"),
    ],
)
def test_a_wrong_file_is_explained(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "attacks.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_attacks(path)
