"""The combined reward: parts, formula, data sources, abstention, configuration errors."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.rewards import CombinedReward, RewardSettings, Sample, load_reward
from afm.rewards.base import Part
from afm.rewards.registry import BY_SOURCE, scorer_name
from afm.trajectory import author_segments
from afm.trajectory.tags import Author, Segment

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_agent("math")
GOOD = r"<plan>p</plan><think>t</think><answer>\boxed{204}</answer>"
NO_PLAN = r"<think>t</think><answer>\boxed{204}</answer>"


def sample(response: str, *, source: str = "aime24", gold: Any = "204", tokens: int | None = None) -> Sample:
    return Sample(SPEC, source, "q", author_segments(response, SPEC), gold, agent_tokens=tokens)


async def test_a_right_answer_counts_where_it_is_well_formed() -> None:
    good, no_plan = [await load_reward().score(sample(response)) for response in (GOOD, NO_PLAN)]
    assert (good.score, good.parts) == (1.0, {"correct": 1.0, "format": 1.0})
    assert "'204' equals the gold answer" in good.evidence
    assert (no_plan.score, no_plan.parts) == (0.0, {"correct": 1.0, "format": 0.0})
    assert "format: <answer>" in no_plan.evidence


@pytest.mark.parametrize(
    "response",
    ["", "<answer>", "<answer>204</answer>", GOOD.replace("204", "205"), "\0", "<" * 1000, GOOD + GOOD],
)
async def test_no_response_raises_and_none_of_these_scores(response: str) -> None:
    assert (await load_reward().score(sample(response))).score == 0.0


class Exploding:
    """A scorer with a fault that some response has found."""

    async def judge(self, sample: Sample) -> Part:
        raise ValueError("Exceeds the limit (4300 digits)")

    async def close(self) -> None:
        """Nothing to free."""


async def test_an_unexpected_error_of_a_scorer_is_an_abstention_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "afm.rewards.registry")
    reward = CombinedReward(RewardSettings())
    reward._scorers["math"] = Exploding()
    verdict = await reward.score(sample(GOOD))
    assert verdict.abstained
    assert verdict.parts == {"format": 1.0}
    assert verdict.evidence == "correct: ValueError: Exceeds the limit (4300 digits)"
    [record, debugging] = caplog.records
    assert "correct of a 'aime24' row" in record.getMessage()
    assert (record.levelno, record.exc_info, debugging.levelno) == (logging.WARNING, None, logging.DEBUG)
    assert "4300 digits" in str(debugging.exc_info[1])


async def test_an_answer_written_by_the_environment_does_not_count() -> None:
    segments = (
        Segment(Author.AGENT, "<plan>p</plan><think>t</think><code>```py\n1\n```</code>"),
        Segment(
            Author.ENVIRONMENT, "\n<observation>\n" + r"<answer>\boxed{204}</answer>" + "\n</observation>\n"
        ),
    )
    verdict = await load_reward().score(Sample(SPEC, "aime24", "q", segments, "204"))
    assert (verdict.score, verdict.parts["correct"]) == (0.0, 0.0)


async def test_a_formula_from_yaml_with_overlong() -> None:
    overlong = {"max_tokens": 100, "buffer_tokens": 20, "count": "agent"}
    reward = load_reward({"formula": "correct * format + overlong", "overlong": overlong})
    verdict = await reward.score(sample(GOOD, tokens=90))
    assert verdict.parts == {"correct": 1.0, "format": 1.0, "overlong": -0.5}
    assert verdict.score == 0.5
    unknown = await reward.score(sample(GOOD))
    assert unknown.abstained
    assert "tokens is unknown" in unknown.evidence


async def test_sources_can_be_added_and_changed() -> None:
    reward = load_reward({"by_source": {"My_Set*": "exact_match", "aime24": "exact_match"}})
    assert (await reward.score(sample(GOOD, source="my_set_v2"))).score == 1.0
    assert (await reward.score(sample(GOOD.replace("204", "204.0")))).score == 0.0


async def test_a_row_can_name_its_scorer() -> None:
    named = replace(sample(GOOD, gold="204.0"), extra_info={"reward": "exact_match"})
    assert (await load_reward().score(sample(GOOD, gold="204.0"))).score == 1.0
    assert (await load_reward().score(named)).score == 0.0
    wrong = replace(named, extra_info={"reward": "exact"})
    with pytest.raises(
        ConfigError, match=r"extra_info\.reward of a 'aime24' row: reward 'exact' is unknown, did you"
    ):
        await load_reward().score(wrong)


async def test_an_unknown_source_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data_source 'aime2024': did you mean 'aime24' or 'aime25'\? `afm list rewards` prints the 45 built-in ones; or name one",
    ):
        await load_reward().score(sample(GOOD, source="aime2024"))


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ("math_dapo aime24 aime25 MATH MATH500 gsm8k gms8k amc23 OlympiadBench skywork_math", "math"),
        ("openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500", "math"),
        ("math_dapo_reasoning numina_aops_forum", "math"),
        ("nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle mercury tq", "exact_match"),
        ("searchR1_nq searchR1_musique", "exact_match"),
        ("GPQA gpqa_diamond", "choice"),
        ("search gaia gaia_text hle webwalker browsecomp", "judge"),
        (
            "livecodebench lcbv4 lcbv5 skywork skywork_livecodebench_v4 codecontests codecontests_test codeforces codeforces_1",
            "code_tests",
        ),
    ],
)
def test_the_published_sources(sources: str, name: str) -> None:
    assert {scorer_name(source, BY_SOURCE) for source in sources.split()} == {name}


@pytest.mark.parametrize("order", [1, -1])
def test_the_longest_pattern_that_fits_counts(order: int) -> None:
    table = dict([("math*", "math"), ("math_hard*", "choice")][::order])
    assert [scorer_name(source, table) for source in ("math_easy", "math_hard_1")] == ["math", "choice"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/rewards/*.yaml")), ids=lambda path: path.name)
async def test_every_shipped_file_loads_and_judges(path: Path) -> None:
    verdict = await load_reward(path).score(sample(GOOD, tokens=10))
    assert verdict.score == 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"formular": "correct"}, r"formular: unknown key; did you mean 'formula'\?"),
        ({"formula": "correct * wrong"}, "unknown name 'wrong'"),
        ({"formula": "correct + overlong"}, "`overlong` belong together"),
        ({"overlong": {"max_tokens": 9, "buffer_tokens": 3}}, "`overlong` belong together"),
        ({"overlong": {"max_tokens": 9, "buffer_tokens": 10}}, "at most max_tokens = 9"),
        # It would be taken letter by letter, "/" among them.
        ({"code_tests": {"sandbox": {"packages": "/opt"}}}, r"sandbox\.packages: got '/opt' \(text\)"),
        ({"by_source": {"x": "mth"}}, r"by_source\.x: reward 'mth' is unknown, did you mean 'math'"),
    ],
)
def test_a_wrong_configuration_is_explained(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward(data)
    assert str(caught.value).startswith("reward configuration: ")


def test_programs_run_here_or_elsewhere() -> None:
    settings = RewardSettings.model_validate(
        {"code_tests": {"sandbox": {"backend": "bubblewrap"}, "urls": ["http://127.0.0.1:9"]}}
    )
    with pytest.raises(ConfigError, match="either `urls` of code servers or a local `sandbox`, not both"):
        settings.code_tests.scorer()


@pytest.mark.parametrize(
    ("source", "own", "hint"),
    [
        ("unheard_of", 0, "'unheard_of': `afm list rewards` prints"),
        ("unheard_of", 2, "'unheard_of': `by_source` has mine_0, mine_1; `afm list rewards` prints"),
        ("unheard_of", 7, "`by_source` has mine_0, mine_1, mine_2, mine_3, mine_4 and 2 more; `afm list"),
        ("mine_x", 1, "'mine_x': did you mean 'mine_0'"),
    ],
)
def test_an_unknown_source_is_answered_with_near_ones_and_the_users_own(
    source: str, own: int, hint: str
) -> None:
    table = BY_SOURCE | {f"mine_{number}": "math" for number in range(own)}
    with pytest.raises(ConfigError, match=hint):
        scorer_name(source, table)
