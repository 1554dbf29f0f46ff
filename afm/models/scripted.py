"""A model that writes given texts: for tests, and for agents whose text comes from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from afm.errors import EngineError
from afm.models.base import Codec, FinishReason, Generation, SamplingParams, TokenModel
from afm.models.tokenizer import stop_length

Script = Callable[[str], str]
"""From the text so far (prompt and response, decoded) to what comes next."""


class ByteCodec:
    """A byte is a token; 256 ends a text."""

    end_id = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text`` in UTF-8."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the bytes; broken ones become replacement characters."""
        return bytes(token for token in token_ids if token < self.end_id).decode(errors="replace")

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """One ``role: content`` line a message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")


class ScriptedModel(TokenModel):
    """Emits a script token by token, up to the first stop string like a real model.

    What follows a stop string in a response comes with the next generation. A response that is used up
    ends with the end token; a stop string at its very end leaves nothing to end.

    Args:
        script: Responses in order (one text is one response), for one episode at a time; or a function of
            the text so far, for many.
        codec: Tokenizer; default: a byte is a token.
        context_tokens: Prompt and response together.
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
        """The next piece of the script; every log-probability is 0.

        Raises:
            EngineError: The script is used up.
        """
        params.check()
        self.params.append(params)
        pending = self._next(prompt_ids)
        ids, finish = self._cut(pending, params)
        if self._script is None and ids[: len(pending)] != pending:
            self._responses.insert(0, pending[len(ids) :])
        return Generation(tuple(ids), (0.0,) * len(ids), finish)

    async def close(self) -> None:
        """Nothing is held."""

    def _next(self, prompt_ids: Sequence[int]) -> list[int]:
        if self._script is not None:
            return self._codec.encode(self._script(self._codec.decode(prompt_ids)))
        if not self._responses:
            raise EngineError(
                f"the script of model {self.name!r} is used up after {len(self.params) - 1} generations"
            )
        return self._responses.pop(0)

    def _cut(self, pending: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
        """Up to the token that completes a stop string, the end of the response, or the limit."""
        length, finish = len(pending) + 1, FinishReason.END_OF_TEXT
        if (stopped := stop_length(self._codec.decode, pending, params.stop)) is not None:
            length, finish = stopped, FinishReason.STOP
        if length > params.max_new_tokens:
            length, finish = params.max_new_tokens, FinishReason.LENGTH
        return [*pending, self._codec.end_id][:length], finish
