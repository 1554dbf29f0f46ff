"""Rewards: each response gets a verdict with evidence, or the reward abstains."""

from afm.rewards.base import Reward, Sample, score_many
from afm.rewards.registry import CombinedReward, RewardSettings, load_reward
from afm.trajectory.record import Verdict

__all__ = ["CombinedReward", "Reward", "RewardSettings", "Sample", "Verdict", "load_reward", "score_many"]
