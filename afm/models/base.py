"""The interface of models (token ids in, token ids out), and a model that follows a script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from afm.errors import ConfigError, EngineError
from afm.models.tokenizer import ChatTokenizer, stop_length

FloatType = Literal["float32", "bfloat16"]
"""Data type of the weights of a model in this process."""


class ToolCalls(StrEnum):
    """How a chat-only model calls tools."""

    TAGS = "tags"
    """In the agent's tags, as part of its text."""
    NATIVE = "native"
    """By the endpoint's own tool calls: one function per tool role, with the role's content as its only argument."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop string was completed (its last token is kept exactly as sampled)."""
    END_OF_TEXT = "end_of_text"
    """The model sampled an end-of-sequence token (kept as the last id)."""
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation.

    Attributes:
        max_new_tokens: Upper bound on sampled tokens.
        temperature: 0 means greedy.
        top_p: Nucleus mass in (0, 1]; 1 switches it off.
        top_k: Number of candidates; 0 switches it off.
        stop: Strings that end the generation once completed; they stay in the output.
        seed: Makes this generation reproducible, whatever else is in the batch.
        json_schema: A JSON schema as text that constrains the generation. Only for models with ``constrains``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | None = None

    def check(self) -> None:
        """Reject invalid values.

        Raises:
            ConfigError: Names the invalid value.
        """
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}, expected 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p is {self.top_p}, expected more than 0 and at most 1 (1 switches it off)"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}, expected 0 (off) or more")
        if "" in self.stop:
            raise ConfigError("stop contains an empty string, which would end every generation")


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished generation.

    Attributes:
        token_ids: Sampled ids, in order, stop or end token included.
        logprobs: Log-probability of each id under the distribution it was sampled from when top-p and
            top-k are off (temperature applied); greedy: under temperature 1. Same length as ``token_ids``;
            empty when the backend reports none.
        finish: Why the generation ended.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason

    def stopped(self, count: int) -> Generation:
        """Return the first ``count`` tokens, which end with a stop string. Later tokens are discarded."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish=FinishReason.STOP,
        )


class Codec(Protocol):
    """The tokenizer of a model. It neither adds nor drops special tokens, and ``decode(encode(text)) == text``."""

    @property
    def end_id(self) -> int:
        """Id of the end-of-sequence token."""
        ...

    def encode(self, text: str) -> list[int]:
        """See :meth:`TokenModel.encode`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :meth:`TokenModel.decode`."""
        ...

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See :meth:`TokenModel.encode_prompt`."""
        ...


class TokenModel(ABC):
    """A model that an episode can drive.

    Args:
        codec: The model's tokenizer.
        name: Identifies the model in records.
        context_tokens: Prompt and response together may not exceed this.
    """

    cancellable = True
    """Whether cancelling :meth:`generate` ends the generation. Otherwise a time limit waits for its end."""
    token_exact = True
    """Whether the ids are those that the model reads and samples. Otherwise they only represent its text."""
    constrains = False
    """Whether the model supports ``json_schema`` of :class:`SamplingParams`."""
    folder: Path | None = None
    """Folder of the model, or of a served model's tokenizer, with the records of its training."""

    def __init__(self, codec: Codec, *, name: str, context_tokens: int) -> None:
        self._codec = codec
        self.name = name
        self.context_tokens = context_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, context_tokens={self.context_tokens})"

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""
        return self._codec

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``. End-of-sequence tokens are left out."""
        return self._codec.decode(token_ids)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render chat messages with the model's template, up to the beginning of the assistant's turn."""
        return self._codec.encode_prompt(messages)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer.

        Raises:
            ConfigError: The model's ids only represent its text.
        """
        if not isinstance(self._codec, ChatTokenizer):
            raise ConfigError(
                f"{self.name}: this model shows no token ids; use a folder, or a server that returns them"
            )
        return self._codec

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids``. Raises :class:`afm.errors.EngineError` if the engine fails."""

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each id after the first, given those before it, at temperature 1.

        Raises:
            EngineError: The engine failed, or this kind of model cannot score given tokens.
        """
        raise EngineError(
            f"{self.name}: a {type(self).__name__} cannot score given tokens; "
            "use a model's folder, or a server that returns prompt_logprobs (vLLM, `afm serve model`)"
        )

    @abstractmethod
    async def close(self) -> None:
        """Free the model's memory and connections."""


@runtime_checkable
class StreamingModel(Protocol):
    """A model that can also report its tokens one by one. The result is that of ``generate``."""

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[int], None]
    ) -> Generation:
        """Do the same as ``generate``. ``on_token`` is called in the same event loop, before this returns."""
        ...


Script = Callable[[str], str]
"""Maps the decoded text so far (prompt and response) to the next text."""


class ByteCodec:
    """A codec with one token per byte. Token 256 ends a text."""

    end_id = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the bytes. Invalid bytes become replacement characters."""
        return bytes(token for token in token_ids if token < self.end_id).decode(errors="replace")

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render one ``role: content`` line per message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")


class ScriptedModel(TokenModel):
    """A model that emits a script token by token, up to the first stop string, as a real model does.

    It is for tests, and for text from other sources. Text after a stop string in a response comes with the next
    generation. The end of a response is an end token, except directly after a stop string.

    Args:
        script: Responses in order for one episode at a time (a single text is one response). Or a function of the text
            so far, for any number of episodes.
        codec: Tokenizer. The default has one token per byte.
        context_tokens: Maximum length of prompt and response together.
        name: Identifies the model in records.
    """

    def __init__(
        self,
        script: str | Iterable[str] | Script,
        codec: Codec | None = None,
        *,
        context_tokens: int = 1_000_000,
        name: str = "scripted",
    ) -> None:
        super().__init__(codec or ByteCodec(), name=name, context_tokens=context_tokens)
        self._script = script if callable(script) else None
        texts = [script] if isinstance(script, str) else [] if callable(script) else list(script)
        self._responses = [self._codec.encode(text) for text in texts]
        self.params: list[SamplingParams] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Return the next part of the script. Every log-probability is 0.

        Raises:
            EngineError: The script has ended.
        """
        params.check()
        self.params.append(params)
        pending = self._next(prompt_ids)
        ids, finish = self._cut(pending, params)
        if self._script is None and ids[: len(pending)] != pending:
            self._responses.insert(0, pending[len(ids) :])
        return Generation(tuple(ids), (0.0,) * len(ids), finish)

    async def close(self) -> None:
        """Do nothing, because nothing is open."""

    def _next(self, prompt_ids: Sequence[int]) -> list[int]:
        if self._script is not None:
            return self._codec.encode(self._script(self._codec.decode(prompt_ids)))
        if not self._responses:
            raise EngineError(
                f"the script of model {self.name!r} is used up after {len(self.params) - 1} generations"
            )
        return self._responses.pop(0)

    def _cut(self, pending: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
        """Return the tokens up to a complete stop string, the end of the response, or the limit."""
        length, finish = len(pending) + 1, FinishReason.END_OF_TEXT
        if (stopped := stop_length(self._codec.decode, pending, params.stop)) is not None:
            length, finish = stopped, FinishReason.STOP
        if length > params.max_new_tokens:
            length, finish = params.max_new_tokens, FinishReason.LENGTH
        return [*pending, self._codec.end_id][:length], finish
