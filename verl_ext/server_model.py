"""The rollout servers of verl as a :class:`afm.models.base.TokenModel`: what an episode drives in RL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from afm.errors import EngineError
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.codec import CodecModel
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import Episode
from verl_ext.register import CPU_ENGINE

_STOP_WINDOW = 8
"""Tokens beyond a stop string's own length that are decoded to find it."""


def engine_params(engine: str, params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in the words of a rollout engine; the stop string stays in the output of all.

    Raises:
        EngineError: An engine whose stop parameters are not known.
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
        f"rollout engine {engine!r}: its stop parameters are not known here; "
        f"expected vllm, sglang or {CPU_ENGINE} (actor_rollout_ref.rollout.name)"
    )


class ServerModel(CodecModel):
    """One episode's view of verl's servers.

    All turns of an episode go to the same server (its prefix cache), and the versions of the weights that
    took part are remembered for verl's staleness metrics.

    Args:
        servers: verl's ``LLMServerClient``.
        tokenizer: That of the model.
        engine: ``actor_rollout_ref.rollout.name``.
        request_id: Unique for the episode.
        context_tokens: Prompt and response together.
    """

    def __init__(
        self, servers: Any, tokenizer: ChatTokenizer, *, engine: str, request_id: str, context_tokens: int
    ) -> None:
        super().__init__(tokenizer, name=f"verl/{engine}", context_tokens=context_tokens)
        self._servers = servers
        self._end_ids = tokenizer.end_ids
        self._engine = engine
        self._request_id = request_id
        self._asked: list[int] = []
        self._sampled: list[tuple[int, tuple[int, ...]]] = []
        self._rewritten = 0
        self.weight_versions: list[int] = []
        self.preempted = -1

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids`` on a rollout server.

        Raises:
            EngineError: The server failed, or returned what cannot be trained on.
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
            raise EngineError(f"the rollout server failed: {type(error).__name__}: {error}") from error
        ids, logprobs = tuple(output.token_ids), tuple(output.log_probs or ())
        if len(ids) != len(logprobs):
            raise EngineError(
                f"the rollout server returned {len(ids)} tokens and {len(logprobs)} log-probabilities; "
                "expected one each (actor_rollout_ref.rollout.calculate_log_probs=true)"
            )
        self._remember(output.extra_fields, output.num_preempted)
        self._follow(prompt_ids, ids)
        return Generation(ids, logprobs, self._finish(ids, params, output.stop_reason))

    def drift(self, episode: Episode) -> int:
        """Tokens of an episode that are not what the servers were given and returned; 0 when training is exact.

        Counts tokens of a prompt that changed between turns, agent tokens that differ from the sampled ones, and agent
        tokens that nobody sampled. What was sampled beyond a stop string is dropped, which is no drift.
        """
        start, exact = len(episode.prompt_ids), 0
        ends = [at for at, _ in self._sampled[1:]] + [start + len(episode.response_ids)]
        for (at, sampled), end in zip(self._sampled, ends, strict=False):  # no generation, no end
            here = slice(at - start, end - start)
            kept = zip(episode.response_ids[here], episode.response_mask[here], sampled, strict=False)
            exact += sum(bool(by_agent) and token == given for token, by_agent, given in kept)
        return self._rewritten + sum(episode.response_mask) - exact

    async def close(self) -> None:
        """The servers belong to verl."""

    def _follow(self, prompt_ids: Sequence[int], sampled: tuple[int, ...]) -> None:
        before, self._asked = self._asked, list(prompt_ids)
        if self._asked[: len(before)] != before:
            self._rewritten += sum(old != new for old, new in zip(before, self._asked, strict=False))
        self._sampled.append((len(self._asked), sampled))

    def _finish(self, ids: Sequence[int], params: SamplingParams, stop_reason: str | None) -> FinishReason:
        # vLLM and SGLang report a stop string, the end of text and the limit alike: look at the tokens.
        if stop_reason in ("aborted", "abort"):
            return FinishReason.ABORTED
        if ids and ids[-1] in self._end_ids:
            return FinishReason.END_OF_TEXT
        if params.stop:
            window = max(map(len, params.stop)) + _STOP_WINDOW
            tail = self._codec.decode(ids[-window:])
            if any(stop in tail for stop in params.stop):
                return FinishReason.STOP
        if len(ids) >= params.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.END_OF_TEXT

    def _remember(self, extra_fields: Mapping[str, Any], preempted: int | None) -> None:
        for key in ("min_global_steps", "max_global_steps"):
            version = extra_fields.get(key)
            if version is not None:
                self.weight_versions.append(int(version))
        if preempted is not None:
            self.preempted = max(self.preempted, 0) + preempted
