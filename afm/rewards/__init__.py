"""Rewards: a verdict with evidence for each response, or an abstention; never a guess."""

from afm.rewards.base import Reward, Sample, score_many
from afm.rewards.registry import CombinedReward, RewardSettings, load_reward
from afm.trajectory.record import Verdict

__all__ = ["CombinedReward", "Reward", "RewardSettings", "Sample", "Verdict", "load_reward", "score_many"]
