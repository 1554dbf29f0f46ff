"""A scorer of your own, named by a reward YAML; a row cannot name one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from answered import answered

from afm.errors import ConfigError
from afm.rewards import Sample, load_reward
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
    ("name", "told"),
    [
        ("my_own_rewards.NoScorer", "expected a class with async methods"),
        ("my_own_rewards.Absent", "expected a class with async methods"),
        ("no_such_module.X", "cannot be imported: No module named"),
    ],
)
async def test_what_is_no_scorer_is_explained(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward({"by_source": {"mirror": name}})
    with pytest.raises(ConfigError, match="is unknown"):
        load_reward({"by_source": {"mirror": "mirrored"}})
