"""A finished episode as the sample that verl trains on: tokens, loss mask, reward, and the facts that are logged.

An observation has mask 0 here, and a sample without a score has no token with a loss. verl is imported only to build
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from afm.rollout import Episode
from afm.trajectory.record import StopReason, Verdict
from verl_ext.curriculum import QUESTION
from verl_ext.group_guard import ABSTAINED, AGENT, DRIFT, FAILED, SOURCE
from verl_ext.server_model import ServerModel
from verl_ext.settings import CUT_SHORT

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

_ERROR_CHARACTERS = 500
"""Of an error that travels with its sample; ``failures.jsonl`` has it whole."""


def training_sample(
    episode: Episode,
    verdict: Verdict,
    model: ServerModel,
    *,
    data_source: str,
    question_index: str,
    agent: str = "",
    score_seconds: float,
    mask_observations: bool = True,
) -> AgentLoopOutput:
    """What verl's agent loop returns for an episode.

    Args:
        episode: What happened; at least one response token.
        verdict: Its score, or the reason for its absence.
        model: The one it happened with.
        data_source: Where the question comes from.
        question_index: Which question of the data it is.
        agent: Which of the run's agents it is, where there are several.
        score_seconds: Spent on the verdict.
        mask_observations: Whether tokens of the environment have no loss.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    length = _trained_length(episode.response_mask)
    # A sample without a score has no loss: not one of its tokens counts.
    mask = list(episode.response_mask[:length]) if mask_observations else [1] * length
    if verdict.abstained:
        mask = [0] * length
    versions = model.weight_versions or [0]
    return AgentLoopOutput(
        prompt_ids=list(episode.prompt_ids),
        response_ids=list(episode.response_ids[:length]),
        response_mask=mask,
        response_logprobs=list(episode.logprobs[:length]),
        reward_score=0.0 if verdict.score is None else verdict.score,
        num_turns=1 + episode.cost.generations + episode.cost.tool_calls,
        metrics=AgentLoopMetrics(
            generate_sequences=episode.cost.generation_seconds,
            tool_calls=episode.cost.tool_seconds,
            compute_score=score_seconds,
            num_preempted=model.preempted,
        ),
        extra_fields={
            "reward_extra_info": facts(episode, verdict)
            | {DRIFT: float(model.drift(episode))}
            | ({AGENT: agent} if agent else {}),
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "stop": episode.stop.value,
            SOURCE: data_source,
            QUESTION: question_index,
            ABSTAINED: verdict.evidence if verdict.abstained else "",
            FAILED: "",
        },
    )


def failed_sample(error: Exception, row: Mapping[str, Any], *, episode: str, token: int) -> AgentLoopOutput:
    """What verl's agent loop returns for an episode that failed: a sample without a score, which is never trained on.

    Args:
        error: Why it failed.
        row: Of the data.
        episode: Its name.
        token: Stands for prompt and response, of which verl wants one token each.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    message = f"episode {episode}: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    step = int(row.get("global_steps") or 0)
    return AgentLoopOutput(
        prompt_ids=[token],
        response_ids=[token],
        response_mask=[0],
        response_logprobs=[0.0],
        reward_score=0.0,
        num_turns=1,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "reward_extra_info": {"score": 0.0, "acc": 0.0, ABSTAINED: 1.0},
            "min_global_steps": step,
            "max_global_steps": step,
            "stop": StopReason.ABORTED.value,
            SOURCE: str(row.get("data_source") or ""),
            QUESTION: str(row.get("index", "")),
            ABSTAINED: f"failed: {message}",
            FAILED: message,
        },
    )


def _trained_length(mask: Sequence[int]) -> int:
    """Tokens up to the agent's last one; all of them when it wrote none.

    verl puts the reward on a response's last token and leaves tokens with mask 0 out of GAE. When a limit ends the
    episode after an observation, PPO would never see the reward.
    """
    written = [at for at, sampled in enumerate(mask) if sampled]
    return written[-1] + 1 if written else len(mask)


def facts(episode: Episode, verdict: Verdict) -> dict[str, Any]:
    """What is logged for a sample, and what groups can be filtered by.

    The parts of the reward (``correct``, ``format`` ...), ``score`` (their combination), ``acc`` (solved in
    valid form, without any shaping), counts and shares.
    """
    cost = episode.cost
    parts = {key: float(value) for key, value in verdict.parts.items()}
    score = 0.0 if verdict.score is None else verdict.score
    return {
        **parts,
        "score": score,
        "acc": parts.get("correct", 0.0) * parts.get("format", 0.0),
        ABSTAINED: float(verdict.abstained),
        "tool_calls": float(cost.tool_calls),
        "tool_failures": float(cost.tool_failures),
        "duplicate_calls": float(sum(call.duplicate for call in episode.calls)),
        "used_tool": float(cost.tool_calls > 0),
        "agent_tokens": float(sum(episode.response_mask)),
        "response_tokens": float(len(episode.response_ids)),
        "cut_short": float(episode.stop in CUT_SHORT),
        "seconds": cost.wall_seconds,
        "answered": float(episode.stop is StopReason.ANSWER),
    }
