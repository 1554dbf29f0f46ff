from pathlib import Path

import pytest

from afm.errors import RewardError
from verl_ext.stock import compute_score

RIGHT = "<plan>Add.</plan><think>Easy.</think><answer>\\boxed{24}</answer>"


async def test_a_right_answer_scores_in_valid_form_alone() -> None:
    result = await compute_score("mini_math", RIGHT, "24", {"question": "12+12?"}, agent="math")
    assert result == {"score": 1.0, "acc": 1.0, "correct": 1.0, "format": 1.0}
    result = await compute_score("mini_math", RIGHT.replace("<plan>Add.</plan>", ""), "24", agent="math")
    assert result == {"score": 0.0, "acc": 0.0, "correct": 1.0, "format": 0.0}


async def test_an_answer_inside_an_observation_is_not_the_agents() -> None:
    text = "<plan>P.</plan><think>T.</think><code>print(1)</code>"
    text += "\n<observation>\n\\boxed{24}\n</observation>\n<reflection>Hm.</reflection>"
    result = await compute_score("mini_math", text, "24", agent="math")
    assert result["score"] == 0.0


async def test_a_reward_that_is_infinite_gives_no_score(tmp_path: Path) -> None:
    rewards = tmp_path / "endless.yaml"
    rewards.write_text("by_source: {mini_math: endless_scorer.Endless}\n")
    with pytest.raises(RewardError, match=r"abstained \(data_source 'mini_math'\): .* the score inf"):
        await compute_score("mini_math", RIGHT, "24", {"index": "q1"}, agent="math", rewards=str(rewards))


async def test_an_abstaining_reward_gives_no_score(tmp_path: Path) -> None:
    rewards = tmp_path / "reward.yaml"
    rewards.write_text("formula: correct + overlong\noverlong: {max_tokens: 100, buffer_tokens: 10}\n")
    with pytest.raises(RewardError, match="tokens is unknown"):
        await compute_score("mini_math", RIGHT, "24", agent="math", rewards=str(rewards))
