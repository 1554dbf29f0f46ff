"""A model behind an OpenAI-compatible completions endpoint that speaks token ids (vLLM and its like)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from afm.endpoints.connections import Connections, base_url, bearer, without_key
from afm.endpoints.retry import RETRIED_STATUS, TryAgainError, persistently, retry_after_s
from afm.errors import EngineError, RefusedError
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.codec import CodecModel
from afm.models.replicas import Replicas, addresses
from afm.models.sampling import check_params
from afm.models.stop import first_stop
from afm.models.tokenizer import ChatTokenizer

_SHOWN_CHARACTERS = 300
_CONNECT_TIMEOUT_S = 10.0
_KEY = "AFM_MODEL_API_KEY"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says about a model it serves."""

    name: str
    context_tokens: int | None


class OpenAIModel(CodecModel):
    """Completions with a prompt of token ids, from ``URL/v1/completions``.

    The server must return the ids it sampled: vLLM does (``return_token_ids``, or
    ``return_tokens_as_token_ids`` in the log-probabilities). Log-probabilities are the server's; vLLM reports
    them without the temperature unless it runs with ``--logprobs-mode processed_logprobs``.

    Sampling defaults of the model's ``generation_config.json`` do not apply: what is not asked for is switched off.

    Args:
        url: Of the server, with or without ``/v1``; of several that serve the same model, with commas between. Each
            request goes to the least busy one, and to another when that fails.
        tokenizer: The served model's.
        name: The served model's.
        context_tokens: Prompt and response together.
        api_key: Sent in the header ``Authorization`` and nowhere else.
        timeout_s: For one generation.
        attempts: How often a request is sent when the server is busy or unreachable.
        max_parallel: Requests in flight.
    """

    def __init__(
        self,
        url: str,
        tokenizer: ChatTokenizer,
        *,
        name: str,
        context_tokens: int,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        attempts: int = 5,
        max_parallel: int = 64,
    ) -> None:
        super().__init__(tokenizer, name=name, context_tokens=context_tokens)
        self._replicas = Replicas([base_url(one) for one in addresses(url)])
        self._url = ", ".join(base_url(one) for one in addresses(url))
        self._end_ids = tokenizer.end_ids
        self._api_key = api_key
        self._attempts = attempts
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        self._connections = Connections(max_parallel, key=api_key, key_name=_KEY, timeout=timeout)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids`` on the server.

        Raises:
            EngineError: The server failed for good, refused, or returned no token ids.
        """
        check_params(params)
        body = _request(self._name, prompt_ids, params)
        try:
            async with self._connections.place() as client:
                answer = await persistently(self._attempts, lambda: self._ask(client, body))
        except TryAgainError as error:
            raise EngineError(f"{error} (after {self._attempts} attempts)") from error.__cause__
        return self._generation(_only_choice(answer), params)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def _ask(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
        """One request; where there are several servers, to as many of them as it takes, without a pause."""
        for left in reversed(range(len(self._replicas))):
            replica = self._replicas.next()
            try:
                with replica.busy():
                    return await self._post(client, f"{replica.url}/completions", body)
            except TryAgainError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _post(self, client: httpx.AsyncClient, where: str, body: Mapping[str, Any]) -> Any:
        try:
            response = await client.post(where, json=body)
        except httpx.TransportError as error:
            raise TryAgainError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in RETRIED_STATUS:
            raise TryAgainError(f"{where}: {self._failure(response)}", retry_after_s(response.headers))
        if not response.is_success:
            raise RefusedError(f"{where}: {self._failure(response)}")
        try:
            return response.json()
        except ValueError:
            raise EngineError(f"{where}: the answer is no JSON: {self._failure(response)}") from None

    def _failure(self, response: httpx.Response) -> str:
        text = without_key(response.text, self._api_key)
        return f"status {response.status_code}: {text[:_SHOWN_CHARACTERS] or 'no text'}"

    def _generation(self, choice: Mapping[str, Any], params: SamplingParams) -> Generation:
        ids = _token_ids(choice)
        if ids is None:
            raise EngineError(
                f"{self._url}: the server returned no token ids for model {self._name!r}; an episode needs them "
                "exactly as sampled. Serve the model with vLLM 0.10.2 or later, or give its folder instead of a URL"
            )
        if len(ids) > params.max_new_tokens:
            raise EngineError(
                f"{self._url}: got {len(ids)} tokens, asked for at most {params.max_new_tokens}"
            )
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if len(logprobs) != len(ids) or None in logprobs:
            logprobs = ()
        return Generation(tuple(ids), tuple(logprobs), self._finish(choice, ids, params.stop))

    def _finish(self, choice: Mapping[str, Any], ids: Sequence[int], stop: Sequence[str]) -> FinishReason:
        match choice.get("finish_reason"):
            case "length":
                return FinishReason.LENGTH
            case "abort":
                return FinishReason.ABORTED
            case "stop":
                return self._stopped(choice, ids, stop)
            case other:
                raise RefusedError(f"{self._url}: the server ended a generation for the reason {other!r}")

    def _stopped(self, choice: Mapping[str, Any], ids: Sequence[int], stop: Sequence[str]) -> FinishReason:
        """The end token or a stop string: servers report both as ``stop``."""
        reason = choice.get("stop_reason")
        if (ids and ids[-1] in self._end_ids) or isinstance(reason, int):
            return FinishReason.END_OF_TEXT
        if first_stop(self._codec.decode(ids), stop) >= 0:
            return FinishReason.STOP
        if isinstance(reason, str):
            raise EngineError(
                f"{self._url}: the server cut the stop string {reason!r} away; it must honour "
                "include_stop_str_in_output"
            )
        return FinishReason.END_OF_TEXT


def served_models(url: str, api_key: str | None = None) -> tuple[ServedModel, ...]:
    """The models that a server lists.

    Raises:
        EngineError: It cannot be reached, or does not answer like an OpenAI-compatible server.
    """
    where = f"{base_url(url)}/models"
    try:
        response = httpx.get(where, headers=bearer(api_key, _KEY), timeout=_CONNECT_TIMEOUT_S)
        response.raise_for_status()
        rows = response.json()["data"]
        return tuple(ServedModel(str(row["id"]), row.get("max_model_len")) for row in rows)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{where}: cannot be asked for its models: {type(error).__name__}: {error}"
        ) from None


def _request(name: str, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": name,
        "prompt": list(prompt_ids),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "no_stop_trim": True,  # SGLang's word for include_stop_str_in_output
        # Else servers take these from the model's generation_config.json (Qwen2.5: top_k 20, repetition_penalty 1.05).
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    return body


def _only_choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        shown = str(answer)[:_SHOWN_CHARACTERS]
        raise EngineError(f"the server's answer has no single choice: {shown}")
    return choices[0]


def _token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """The sampled ids, from either place where vLLM puts them; ``None`` when they are in neither."""
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
        return ids
    words = (choice.get("logprobs") or {}).get("tokens")
    if not isinstance(words, list):
        return None
    numbers = [str(word).removeprefix("token_id:") for word in words]
    if not all(str(word).startswith("token_id:") for word in words) or not all(map(str.isdecimal, numbers)):
        return None
    return [int(number) for number in numbers]
