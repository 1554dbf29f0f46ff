"""A model behind an OpenAI-compatible completions endpoint with token ids, such as vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from afm.endpoints.chat import EndpointSettings
from afm.endpoints.connections import (
    CONNECT_TIMEOUT_S,
    Connections,
    Replicas,
    addresses,
    base_url,
    bearer,
    post,
)
from afm.endpoints.pace import TryAgainError, persistently
from afm.errors import EngineError, RefusedError
from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel
from afm.models.tokenizer import ChatTokenizer, first_stop
from afm.terminal import plural

_SHOWN = 300
_LONGEST_ANSWER = 256 << 20
"""Maximum size of an answer in bytes. A token with its text, id and log-probability takes up to a few hundred bytes."""


class OpenAIModel(TokenModel):
    """Completions with a prompt of token ids, from ``URL/v1/completions``.

    The server must return the ids it sampled: vLLM does (``return_token_ids``, or
    ``return_tokens_as_token_ids`` in the log-probabilities). Log-probabilities are the server's; vLLM reports
    them without the temperature unless it runs with ``--logprobs-mode processed_logprobs``.

    Sampling defaults of the model's ``generation_config.json`` do not apply. Parameters that are not set are switched off.

    Args:
        url: Address of the server, with or without ``/v1``. Or a comma-separated list of servers of the same model. Each
            request goes to the least busy server, and to another one if that fails.
        tokenizer: Tokenizer of the served model.
        name: Name of the served model.
        context_tokens: Maximum length of prompt and response together.
        endpoint: Settings of the requests. Limits per minute do not apply.
    """

    constrains = True
    """The server constrains the generation. vLLM and SGLang support this, `afm serve model` rejects it."""

    def __init__(
        self,
        url: str,
        tokenizer: ChatTokenizer,
        *,
        name: str,
        context_tokens: int,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        super().__init__(tokenizer, name=name, context_tokens=context_tokens)
        self._settings = endpoint or EndpointSettings()
        self._replicas = Replicas([base_url(address) for address in addresses(url)])
        self._urls = ", ".join(self._replicas.urls)
        self._end_ids = tokenizer.end_ids
        self._api_key = self._settings.key()
        self._connections = Connections(
            self._settings.max_parallel,
            key=self._api_key,
            key_name=self._settings.key_variable,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(self._settings.timeout_s, connect=CONNECT_TIMEOUT_S),
        )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids`` on the server.

        Raises:
            EngineError: The server failed permanently, rejected the request, or returned no token ids.
        """
        params.check()
        choice = await self._choice(_request(self.name, prompt_ids, params))
        return self._generation(choice, params)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """See :meth:`afm.models.base.TokenModel.score`. Uses the server's ``prompt_logprobs``."""
        ids = list(token_ids)
        scored = await self._prompt_logprobs(ids)
        try:
            return tuple(
                float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], scored, strict=True)
            )
        except (KeyError, TypeError, ValueError):
            raise EngineError(
                f"{self._urls}: the prompt_logprobs of model {self.name!r} are not those of the {len(ids)} ids "
                "that were sent; expected one entry per id"
            ) from None

    async def served_ids(self, text: str) -> list[int]:
        """Return the server's own encoding of ``text`` without the first id, to compare tokenizers.

        Raises:
            EngineError: The server failed, or returns no ``prompt_logprobs``.
        """
        return [int(next(iter(entry))) for entry in await self._prompt_logprobs(text)]

    async def _prompt_logprobs(self, prompt: str | list[int]) -> list[Mapping[str, Any]]:
        """Return an entry for each token of ``prompt`` after the first: id (as text) to ``{"logprob": ...}``."""
        body = {
            "model": self.name,
            "prompt": prompt,
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        entries = (await self._choice(body)).get("prompt_logprobs")
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and entry for entry in entries[1:]
        ):
            raise EngineError(
                f"{self._urls}: the server returned no prompt_logprobs for model {self.name!r}; "
                "expected vLLM or `afm serve model`"
            )
        return entries[1:]

    async def _choice(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        attempts = self._settings.attempts
        try:
            async with self._connections.place() as client:
                answer = await persistently(attempts, lambda: self._ask(client, body))
        except TryAgainError as error:
            raise EngineError(f"{error} (after {plural(attempts, 'attempt')})") from error.__cause__
        return _only_choice(answer)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def _ask(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> bytes:
        """Send one request. With several servers, try one after another without a pause."""
        failure: TryAgainError | None = None
        for _ in self._replicas.urls:
            replica = self._replicas.next()
            where = f"{replica.url}/completions"
            try:
                with replica.busy():
                    return await post(
                        client,
                        where,
                        body,
                        timeout_s=self._settings.timeout_s,
                        max_bytes=_LONGEST_ANSWER,
                        key=self._api_key,
                    )
            except TryAgainError as error:
                failure = TryAgainError(f"{where}: {error}", error.wait_s)
                failure.__cause__ = error.__cause__
        assert failure is not None, "there is at least one server"
        raise failure

    def _generation(self, choice: Mapping[str, Any], params: SamplingParams) -> Generation:
        ids = _token_ids(choice)
        if ids is None:
            raise EngineError(
                f"{self._urls}: the server returned no token ids for model {self.name!r}; an episode needs them "
                "exactly as sampled. Serve the model with vLLM 0.10.2 or later, or give its folder instead of a URL"
            )
        if len(ids) > params.max_new_tokens:
            raise EngineError(
                f"{self._urls}: got {len(ids)} tokens, asked for at most {params.max_new_tokens}"
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
                raise RefusedError(f"{self._urls}: the server ended a generation for the reason {other!r}")

    def _stopped(self, choice: Mapping[str, Any], ids: Sequence[int], stop: Sequence[str]) -> FinishReason:
        """Return whether the end token or a stop string ended the generation. Servers report both as ``stop``."""
        reason = choice.get("stop_reason")
        if (ids and ids[-1] in self._end_ids) or isinstance(reason, int):
            return FinishReason.END_OF_TEXT
        if first_stop(self._codec.decode(ids), stop) >= 0:
            return FinishReason.STOP
        if isinstance(reason, str):
            raise EngineError(
                f"{self._urls}: the server cut the stop string {reason!r} away; it must honour "
                "include_stop_str_in_output"
            )
        return FinishReason.END_OF_TEXT


def served_models(url: str) -> dict[str, int | None]:
    """Return the context of each model that a server lists. ``None`` if the server does not report it.

    With several addresses, these are the models that all of them list, with the smallest context.

    Raises:
        EngineError: A server cannot be reached or is not OpenAI-compatible, or the servers have no model in common.
    """
    urls = addresses(url)
    lists = [_listed(base_url(address)) for address in urls]
    common = [name for name in lists[0] if all(name in models for models in lists)]
    if lists[0] and not common:
        served = "; ".join(f"{url} serves {', '.join(names)}" for url, names in zip(urls, lists, strict=True))
        raise EngineError(f"the servers have no model in common: {served}")
    return {
        name: min((tokens for models in lists if (tokens := models[name])), default=None) for name in common
    }


def _listed(url: str) -> dict[str, int | None]:
    settings = EndpointSettings()
    where = f"{url}/models"
    headers = bearer(settings.key(), settings.key_variable)
    try:
        response = httpx.get(where, headers=headers, timeout=CONNECT_TIMEOUT_S)
        response.raise_for_status()
        return {str(row["id"]): row.get("max_model_len") for row in response.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected a running OpenAI-compatible server, for example `afm serve model FOLDER`"
        reason = f"{type(error).__name__}: {error}"
        raise EngineError(f"{where} did not list its models: {reason}; {expected}") from None


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
        "no_stop_trim": True,  # SGLang's name for include_stop_str_in_output
        # Else servers take these from the model's generation_config.json (Qwen2.5: top_k 20, repetition_penalty 1.05).
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if params.json_schema is not None:
        schema = {"name": "reply", "schema": json.loads(params.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body["json_schema"] = params.json_schema  # SGLang's word for it
    return body


def _only_choice(answer: bytes) -> Mapping[str, Any]:
    shown = answer[:_SHOWN].decode("utf-8", "replace")
    try:
        data = json.loads(answer)
    except (ValueError, RecursionError):
        raise EngineError(f"the server's answer is not JSON: {shown or 'no text'}") from None
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
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
