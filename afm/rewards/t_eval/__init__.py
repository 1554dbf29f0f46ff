"""T-Eval (arXiv 2312.14033): how well a reply follows instructions, plans, retrieves and understands tools."""

from __future__ import annotations

from afm.rewards.t_eval.scorer import TEval, TEvalSettings

__all__ = ["TEval", "TEvalSettings"]
