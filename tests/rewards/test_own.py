"""Your own scorers: a reward YAML can name one, a row cannot."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from answered import answered

from afm.errors import ConfigError
from afm.rewards import Sample, load_reward
from afm.rewards.base import Part
from afm.trajectory.record import Verdict

pytestmark = pytest.mark.usefixtures("own")

MODULE = '''
from afm.rewards.base import Part
from afm.trajectory import answers

class Backwards:
    """Right when the answer is the gold answer backwards."""

    async def judge(self, sample):
        right = answers(sample.segments, sample.spec) == (str(sample.ground_truth)[::-1],)
        return Part(float(right), f"wanted {sample.ground_truth} backwards \\ud800")

    async def close(self):
        pass

class NoScorer:
    pass
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rewards.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_own_rewards", raising=False)


def sample(answer: str, **extra: str) -> Sample:
    return answered("mhqa", "mirror", answer, "abc", extra_info=extra)


async def test_the_yaml_names_the_class_and_the_formula_combines_it() -> None:
    reward = load_reward({"by_source": {"mirror": "my_own_rewards.Backwards"}, "formula": "correct"})
    right, wrong = await reward.score(sample("cba")), await reward.score(sample("abc"))
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert "wanted abc backwards \ufffd" in right.evidence
    assert Verdict.model_validate_json(right.model_dump_json()) == right
    await reward.close()


async def test_a_row_cannot_have_a_module_imported() -> None:
    reward = load_reward({"by_source": {"mirror": "exact_match"}})
    with pytest.raises(ConfigError, match=r"reward 'my_own_rewards\.Backwards' is unknown"):
        await reward.score(sample("cba", reward="my_own_rewards.Backwards"))
    assert "my_own_rewards" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_own_rewards.NoScorer", "expected a class with async methods"),
        ("my_own_rewards.Backward", "my_own_rewards has no class 'Backward'; did you mean 'Backwards'"),
        ("no_such_module.X", "cannot be imported: No module named"),
        ("Backwards", r"a class of your own in FILE.py beside this YAML: FILE\.Backwards"),
    ],
)
async def test_what_is_no_scorer_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward({"by_source": {"mirror": name}})
    with pytest.raises(ConfigError, match="is unknown"):
        load_reward({"by_source": {"mirror": "mirrored"}})


RETURNS = """
from afm.rewards.base import Part

class Returns:
    value = None

    async def judge(self, sample):
        return self.value

    async def close(self):
        pass
"""


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (Part(float("nan")), "the score nan (float), expected a number from 0 to 1, or None to abstain"),
        (Part(float("inf")), "the score inf (float), expected a number from 0 to 1"),
        (Part(float("-inf")), "the score -inf (float), expected a number from 0 to 1"),
        (Part(1.5), "the score 1.5 (float), expected a number from 0 to 1"),
        (Part({"a": 1}), "the score {'a': 1} (dict), expected a number from 0 to 1"),  # type: ignore[arg-type]
        (Part("1"), "the score '1' (str), expected a number from 0 to 1"),  # type: ignore[arg-type]
        (Part(10**400), "(int), expected a number from 0 to 1"),
        (Part(1.0, ["a", "b"]), "the reason ['a', 'b'] (list), expected a string"),  # type: ignore[arg-type]
        ({"a": 1}, "{'a': 1} (dict), expected Part(score, why)"),
        (1.0, "1.0 (float), expected Part(score, why)"),
        (None, "None (NoneType), expected Part(score, why)"),
    ],
)
async def test_a_scorer_that_returns_no_score_abstains_and_is_named_with_its_line(
    value: object, reported: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_own_rewards.py").write_text(RETURNS, encoding="utf-8")
    reward = load_reward({"by_source": {"mirror": "my_own_rewards.Returns"}, "formula": "correct + format"})
    sys.modules["my_own_rewards"].Returns.value = value  # type: ignore[attr-defined]
    verdict = await reward.score(sample("cba"))
    assert (verdict.score, verdict.parts) == (None, {"format": 1.0})
    assert verdict.evidence.startswith("correct: my_own_rewards.py:7: Returns.judge returned ")
    assert reported in verdict.evidence
    assert "my_own_rewards.py:7" in caplog.text


FAILS = """
class Fails:
    async def judge(self, sample):
        if sample.ground_truth == "short":
            raise ValueError("of another type")
        raise KeyError(sample.ground_truth)

    async def close(self):
        pass
"""


async def test_faults_of_one_type_and_place_are_logged_three_times_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_own_rewards.py").write_text(FAILS, encoding="utf-8")
    reward = load_reward({"by_source": {"mirror": "my_own_rewards.Fails"}})
    for gold in ("it's a", "b c", "d" * 9, "e\nf", "g", "short"):
        assert (await reward.score(answered("mhqa", "mirror", "x", gold))).abstained
    await reward.close()
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if "of another type" in line] == [logged[3]]
    assert [line.split(": ")[-1].split(" (")[0] for line in logged[:3]] == [
        '"it\'s a"',
        "'b c'",
        "'ddddddddd'",
    ]
    assert logged[4:] == ['... and 2 more like it: KeyError: "it\'s a"']


async def test_numbers_of_other_types_are_scores(tmp_path: Path) -> None:
    (tmp_path / "my_own_rewards.py").write_text(RETURNS, encoding="utf-8")
    reward = load_reward({"by_source": {"mirror": "my_own_rewards.Returns"}, "formula": "correct"})
    for score in (True, 1, Fraction(1), np.float32(1.0), 1 + 1e-9):
        sys.modules["my_own_rewards"].Returns.value = Part(score)  # type: ignore[arg-type, attr-defined]
        verdict = await reward.score(sample("cba"))
        assert verdict.score == pytest.approx(1.0)
        assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


async def test_a_formula_that_overflows_has_no_score() -> None:
    huge = " * ".join(["1000000"] * 60)
    reward = load_reward(
        {"by_source": {"mirror": "my_own_rewards.Backwards"}, "formula": f"correct * {huge}"}
    )
    verdict = await reward.score(sample("cba"))
    assert verdict.score is None
    assert "formula" in verdict.evidence
    assert "inf, expected a finite number" in verdict.evidence
