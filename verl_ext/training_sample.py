"""verl's rollout servers as a model, and the conversion of a finished episode to a sample of verl.

A sample has tokens, a loss mask, a reward and logged facts. Observations have mask 0, as do all tokens of a sample
without a score. verl is imported only to build a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from afm.errors import EngineError
from afm.harness.credit import Credit, MemberCredit, MemberPart, member_advantages
from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel
from afm.models.tokenizer import ChatTokenizer, stop_length
from afm.rollout import Episode
from afm.trajectory.record import StopReason, Verdict
from verl_ext.algorithms import BY_MEMBER, CPU_ENGINE, CREDIT
from verl_ext.curriculum import QUESTION
from verl_ext.group_guard import ABSTAINED, AGENT, DRIFT, FAILED, SOURCE
from verl_ext.ray_watch import report_engine_error
from verl_ext.settings import CUT_SHORT

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

_SGLANG_RESERVE = 6
"""SGLang 0.5.12 rejects inputs that leave fewer than this many tokens of its context, which ends the run."""


def engine_params(engine: str, params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters in the format of a rollout engine. All engines keep the stop string in their output.

    Raises:
        EngineError: The stop parameters of the engine are unknown.
    """
    common: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "stop": list(params.stop),
    }
    match engine:
        case "vllm":
            return common | {"max_tokens": params.max_new_tokens, "include_stop_str_in_output": True}
        case "sglang":
            return common | {"max_new_tokens": params.max_new_tokens, "no_stop_trim": True}
        case name if name == CPU_ENGINE:
            return common | {"max_tokens": params.max_new_tokens, "seed": params.seed}
    raise EngineError(
        f"rollout engine {engine!r}: its stop parameters are unknown; "
        f"expected vllm, sglang or {CPU_ENGINE} (actor_rollout_ref.rollout.name)"
    )


def room_of(rollout: Any) -> int:
    """Return the most tokens of prompt and response together with which the engine accepts every input."""
    whole: int = rollout.prompt_length + rollout.response_length
    reserve = _SGLANG_RESERVE if rollout.name == "sglang" else 0
    return min(whole, (rollout.max_model_len or whole) - reserve)


class ServerModel(TokenModel):
    """One episode's view of verl's servers.

    All turns of an episode go to the same server, because of its prefix cache. The versions of the weights that sampled
    them are recorded for verl's staleness metrics.

    Args:
        servers: verl's ``LLMServerClient``.
        tokenizer: The model's tokenizer.
        engine: ``actor_rollout_ref.rollout.name``.
        request_id: Unique id of the episode.
        context_tokens: Most tokens of prompt and response together.
    """

    cancellable = False
    """Ray does not cancel the generation of a cancelled wait, which would continue while the trainer puts engines to sleep."""

    def __init__(
        self, servers: Any, tokenizer: ChatTokenizer, *, engine: str, request_id: str, context_tokens: int
    ) -> None:
        super().__init__(tokenizer, name=f"verl/{engine}", context_tokens=context_tokens)
        self._servers = servers
        self._end_ids = tokenizer.end_ids
        self._engine = engine
        self._request_id = request_id
        self._sampled: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        """The tokens that the servers returned, by prompt."""
        self.weight_versions: list[int] = []
        self.preempted = -1

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids`` on a rollout server.

        Raises:
            EngineError: The server failed, or returned tokens without log-probabilities.
        """
        try:
            output = await self._servers.generate(
                self._request_id,
                prompt_ids=list(prompt_ids),
                sampling_params=engine_params(self._engine, params),
            )
        except EngineError:
            raise
        except Exception as error:
            report_engine_error(error, "in generate")
            raise EngineError(f"the rollout server failed: {type(error).__name__}: {error}") from error
        ids, logprobs = tuple(output.token_ids), tuple(output.log_probs or ())
        if len(ids) != len(logprobs):
            raise EngineError(
                f"the rollout server returned {len(ids)} tokens and {len(logprobs)} log-probabilities; "
                "expected one log-probability per token (actor_rollout_ref.rollout.calculate_log_probs=true)"
            )
        self._remember(output.extra_fields, output.num_preempted)
        generation = self._ended(Generation(ids, logprobs, FinishReason.STOP), params, output.stop_reason)
        self._sampled.setdefault(tuple(prompt_ids), []).append(generation.token_ids)
        return generation

    def drift(self, episode: Episode) -> int:
        """Return the number of trained tokens that the servers did not sample exactly so. 0 means that training is exact.

        A token is exact if a server returned it at this position, in a reply to exactly the tokens before that reply.
        Dropped tokens after a stop string are not drift.
        """
        ids, mask = (*episode.prompt_ids, *episode.response_ids), episode.response_mask
        begin, exact = len(episode.prompt_ids), 0
        at = begin
        while at < len(ids):
            if not mask[at - begin]:
                at += 1
                continue
            answers = self._sampled.get(ids[:at], ())
            same = max((_same(ids[at:], mask[at - begin :], answer) for answer in answers), default=0)
            exact, at = exact + same, at + max(same, 1)
        return sum(mask) - exact

    async def close(self) -> None:
        """Do nothing: the servers belong to verl."""

    def _ended(self, sampled: Generation, params: SamplingParams, stop_reason: str | None) -> Generation:
        """Return the generation up to the first stop string, with the reason of its end.

        An engine may continue after a stop string. After an update of its weights it resumes with a new request, and looks
        for stop strings in the new text only. SGLang checks one token more than its encoding of the stop string has.
        vLLM and SGLang report the same reason for a stop string and the end of text, and vLLM also for the limit. So
        the tokens decide.
        """
        count = stop_length(self._codec.decode, sampled.token_ids, params.stop)
        generation = sampled if count is None else sampled.stopped(count)
        if stop_reason in ("aborted", "abort"):
            finish = FinishReason.ABORTED
        elif generation.token_ids and generation.token_ids[-1] in self._end_ids:
            finish = FinishReason.END_OF_TEXT
        elif count is not None:
            finish = FinishReason.STOP
        elif stop_reason == "length" or len(sampled.token_ids) >= params.max_new_tokens:
            finish = FinishReason.LENGTH
        else:
            finish = FinishReason.END_OF_TEXT
        return replace(generation, finish=finish)

    def _remember(self, extra_fields: Mapping[str, Any], preempted: int | None) -> None:
        for key in ("min_global_steps", "max_global_steps"):
            version = extra_fields.get(key)
            if version is not None:
                self.weight_versions.append(int(version))
        if preempted is not None:
            self.preempted = max(self.preempted, 0) + preempted


def _same(ids: Sequence[int], mask: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of leading trained tokens that equal a server's reply."""
    same = 0
    for token, by_agent, returned in zip(ids, mask, sampled, strict=False):
        if not by_agent or token != returned:
            break
        same += 1
    return same


LOGGED = "reward_extra_info"
"""Key of a sample's extra fields: the facts that verl logs."""
SHARE = "credit"
"""Key of a harness sample: its share in the advantage of its episode."""
MEMBER = "member"
"""Key of a team sample: the fields of its :class:`~afm.harness.credit.MemberPart`."""
_ERROR_CHARACTERS = 500
"""Most characters of an error in a sample. ``failures.jsonl`` has the whole error."""


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
    """Return the sample of an episode for verl.

    Args:
        episode: The episode, with at least one response token.
        verdict: Its score, or the reason why it has no score.
        model: The model that played the episode.
        data_source: Data source of the question.
        question_index: ``extra_info.index`` of the question.
        agent: Agent of the episode, in a run of several agents.
        score_seconds: Seconds spent on the verdict.
        mask_observations: Exclude tokens of the environment from the loss.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    length = _trained_length(episode.response_mask)
    # No token of a sample without a score has a loss.
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
            LOGGED: facts(episode, verdict)
            | {DRIFT: float(model.drift(episode))}
            | ({AGENT: agent} if agent else {}),
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "stop": episode.stop.value,
            SOURCE: data_source,
            QUESTION: question_index,
            ABSTAINED: verdict.evidence if verdict.abstained else "",
            FAILED: "",
            SHARE: 1.0,
            MEMBER: {},
        },
    )


def failed_sample(error: Exception, row: Mapping[str, Any], *, episode: str, token: int) -> AgentLoopOutput:
    """Return the sample of a failed episode: without a score, so it is never trained on.

    Args:
        error: The error of the episode.
        row: Row of the data.
        episode: Name of the episode.
        token: See :func:`unscored_sample`.
    """
    message = f"episode {episode}: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    sample = unscored_sample(f"failed: {message}", row, token=token)
    sample.extra_fields[FAILED] = message
    return sample


def unscored_sample(
    evidence: str, row: Mapping[str, Any], *, token: int, more: Mapping[str, float] | None = None
) -> AgentLoopOutput:
    """Return a sample for an episode without sampled tokens.

    Args:
        evidence: Why the sample has no score.
        row: Row of the data.
        token: Used as prompt and response, because verl requires a token of each.
        more: Further facts.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

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
            LOGGED: {"score": 0.0, "acc": 0.0, ABSTAINED: 1.0, **(more or {})},
            "min_global_steps": step,
            "max_global_steps": step,
            "stop": StopReason.ABORTED.value,
            SOURCE: str(row.get("data_source") or ""),
            QUESTION: str(row.get("index", "")),
            ABSTAINED: evidence,
            FAILED: "",
            SHARE: 1.0,
            MEMBER: {},
        },
    )


def share_advantages(queue: Any, batch: Any, config: Any) -> Any:
    """Apply member advantages and shares (:data:`SHARE`) to the sequences of a batch in verl's transfer queue.

    Args:
        config: verl's configuration, with ``trainer.harness_credit`` and ``trainer.harness_by_member``.

    Returns:
        The updated batch.
    """
    by_member = MemberCredit(config.trainer.get(BY_MEMBER, MemberCredit.SHARED))
    if by_member is MemberCredit.SHARED and config.trainer[CREDIT] != Credit.BY_TURN:
        return batch
    by_std = bool(config.algorithm.get("norm_adv_by_std_in_grpo", True))
    import torch
    from tensordict import TensorDict

    told_apart = by_member is not MemberCredit.SHARED
    fields = ["advantages", "extra_fields", *(["response_mask"] if told_apart else [])]
    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    extras = [getattr(extra, "data", extra) for extra in data["extra_fields"]]
    values = [*data["advantages"].unbind()]
    parts = {
        place: MemberPart(question=key.rsplit("_", 2)[0], episode=key.rpartition("_")[0], **extra[MEMBER])
        for place, (key, extra) in enumerate(zip(batch.keys, extras, strict=True))
        if told_apart and extra.get(MEMBER)
    }
    for place, advantage in zip(
        parts, member_advantages([*parts.values()], by_member, by_std=by_std), strict=True
    ):
        values[place] = data["response_mask"][place].to(values[place].dtype) * advantage
    shared = [value * float(extra.get(SHARE, 1.0)) for value, extra in zip(values, extras, strict=True)]
    nested = torch.nested.as_nested_tensor(shared, layout=torch.jagged)
    output = TensorDict({"advantages": nested, "returns": nested}, batch_size=len(batch))
    return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=output)


def _trained_length(mask: Sequence[int]) -> int:
    """Return the number of tokens up to the agent's last one, or of all tokens if the agent wrote none.

    verl puts the reward on a response's last token and excludes tokens with mask 0 from GAE. If a limit ended the
    episode after an observation, PPO would never see the reward.
    """
    written = [at for at, sampled in enumerate(mask) if sampled]
    return written[-1] + 1 if written else len(mask)


def facts(episode: Episode, verdict: Verdict) -> dict[str, Any]:
    """Return the facts of a sample, which verl logs and groups can be filtered by.

    They are the parts of the reward (``correct``, ``format`` ...), ``score`` (their combination), ``acc`` (solved in
    valid format, without shaping), counts and shares.
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
