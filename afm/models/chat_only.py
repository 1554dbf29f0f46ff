"""A model behind a chat endpoint, text in and text out: a baseline that stands in one table with models of known tokens.

Such an endpoint shows no token ids and takes none. An episode is counted in pieces of about four characters instead, so token
counts, limits and prices are estimates, and what was sampled cannot be trained on by reinforcement learning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afm.configuration import merged
from afm.endpoints.chat import ChatEndpoint, ChatReply, UnusableReplyError
from afm.endpoints.connections import base_url
from afm.endpoints.retry import TryAgainError, persistently
from afm.errors import EngineError
from afm.models.base import FinishReason, Generation, SamplingParams
from afm.models.codec import CodecModel
from afm.models.sampling import check_params
from afm.models.stop import first_stop
from afm.models.tool_calls import ToolCalls

DEFAULT_CONTEXT_TOKENS = 128_000
CHARACTERS_PER_TOKEN = 4
_KEY = "AFM_MODEL_API_KEY"
_MOST_STOPS = 4
"""More stop strings than this are refused by OpenAI's endpoint."""
_CONTINUE = "Continue exactly where you stopped."
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Passage:
    """Text of one author, taken out of a sequence of ids.

    Attributes:
        author: ``system``, ``user``, ``assistant``, or ``environment`` for what came back from tools.
    """

    author: str
    text: str


class TextCodec:
    """Ids that hold their text and its author, so that a conversation can be read back from them.

    A piece of text is one integer: its UTF-8 bytes behind a leading 1, and a lowest bit that says whether the model wrote
    it. Ids below 256 stand for the end of a text and for the beginning of a message.
    """

    end_id = 0
    _BEGINNINGS = ("system", "user", "assistant")

    def encode(self, text: str) -> list[int]:
        """Pieces of four characters, by the environment."""
        return list(_pieces(text, CHARACTERS_PER_TOKEN, written=False))

    def encode_written(self, text: str, most: int) -> list[int]:
        """At most ``most`` pieces, by the model; they are longer than four characters where need be."""
        size = max(CHARACTERS_PER_TOKEN, math.ceil(len(text) / max(1, most)))
        return list(_pieces(text, size, written=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; ends and beginnings are nothing."""
        return "".join(_text(token) for token in token_ids if token > 255)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Every message behind an id of its role, and the id of the assistant at the end.

        Raises:
            EngineError: A message is of another role than system, user and assistant.
        """
        ids: list[int] = []
        for message in messages:
            role, text = message["role"], message["content"]
            if role not in self._BEGINNINGS:
                raise EngineError(
                    f"a message of the role {role!r}, expected one of {', '.join(self._BEGINNINGS)}"
                )
            written = role == "assistant"
            ids += [1 + self._BEGINNINGS.index(role), *_pieces(text, CHARACTERS_PER_TOKEN, written=written)]
        return [*ids, 1 + self._BEGINNINGS.index("assistant")]

    def passages(self, token_ids: Sequence[int]) -> list[Passage]:
        """The conversation so far; text of the environment inside the assistant's turn is a passage of its own."""
        found: list[list[str]] = []
        role = "user"
        for token in token_ids:
            if 1 <= token <= len(self._BEGINNINGS):
                role = self._BEGINNINGS[token - 1]
                if role != "assistant":
                    found.append([role, ""])
            elif token > 255:
                inside = role == "assistant"
                author = ("assistant" if token & 1 else "environment") if inside else role
                if not found or found[-1][0] != author:
                    found.append([author, ""])
                found[-1][1] += _text(token)
        return [Passage(author, text) for author, text in found]


def _pieces(text: str, size: int, *, written: bool) -> Iterator[int]:
    for begin in range(0, len(text), size):
        data = b"\1" + text[begin : begin + size].encode("utf-8", "surrogatepass")
        yield int.from_bytes(data, "big") << 1 | written


def _text(token: int) -> str:
    number = token >> 1
    return number.to_bytes((number.bit_length() + 7) // 8, "big")[1:].decode("utf-8", "surrogatepass")


class ChatOnlyModel(CodecModel):
    """Drives an episode over ``URL/v1/chat/completions``.

    After each observation the conversation is sent again: the agent's text as the assistant's message, the observation as the
    user's (or, with native tool calls, as the tool's). Stop strings are sent, at most four of them; a server that removes the
    one it stopped at has it put back by the tag that is still open.

    Args:
        url: Of the server, with or without ``/v1``.
        name: Of the model on the server.
        tool_roles: Tag and description of each tool role, for native calls.
        tool_calls: How it calls tools.
        context_tokens: Bound on prompt and response together, as estimated.
        request: Laid over the request's own fields; ``null`` removes one, for servers that refuse it.
        attempts: How often a request is sent when the server is busy or unreachable.
        timeout_s: For one generation.
        max_parallel: Requests in flight.
    """

    token_exact: bool = False

    def __init__(
        self,
        url: str,
        *,
        name: str,
        tool_roles: Mapping[str, str] | None = None,
        tool_calls: ToolCalls = ToolCalls.TAGS,
        context_tokens: int | None = None,
        request: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        attempts: int = 5,
        timeout_s: float = 600.0,
        max_parallel: int = 64,
    ) -> None:
        self._text_codec = TextCodec()
        super().__init__(self._text_codec, name=name, context_tokens=context_tokens or DEFAULT_CONTEXT_TOKENS)
        self._tool_roles = dict(tool_roles or {}) if tool_calls is ToolCalls.NATIVE else {}
        self._request = dict(request or {})
        self._attempts = attempts
        self._endpoint = ChatEndpoint(
            base_url(url), api_key=api_key, key_name=_KEY, max_parallel=max_parallel, timeout_s=timeout_s
        )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The reply to the conversation so far; it has no log-probabilities.

        Raises:
            EngineError: The server failed for good, refused, or sent no usable reply.
        """
        check_params(params)
        body = self._body(prompt_ids, params)
        try:
            async with self._endpoint.place() as client:
                reply, finish = await persistently(self._attempts, lambda: self._ask(client, body))
        except TryAgainError as error:
            raise EngineError(
                f"{self._endpoint.where}: {error} (after {self._attempts} attempts)"
            ) from error.__cause__
        text, finish = self._ended(reply, finish, params.stop)
        room = params.max_new_tokens - (finish is FinishReason.END_OF_TEXT)
        ids = self._text_codec.encode_written(text, room)[: params.max_new_tokens]
        if finish is FinishReason.END_OF_TEXT and len(ids) < params.max_new_tokens:
            ids.append(self._text_codec.end_id)
        return Generation(tuple(ids), (), finish)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    async def _ask(self, client: Any, body: Mapping[str, Any]) -> tuple[ChatReply, FinishReason]:
        try:
            return await self._endpoint.ask(client, body), FinishReason.END_OF_TEXT
        except UnusableReplyError as error:
            if error.finish == "length":
                return error.reply, FinishReason.LENGTH
            raise

    def _body(self, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self._name,
            "messages": list(self._messages(prompt_ids)),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop": list(params.stop[:_MOST_STOPS]) or None,
            "top_p": params.top_p if params.top_p < 1 else None,
            "seed": params.seed,
            "tools": [_function(role, text) for role, text in self._tool_roles.items()] or None,
        }
        return {key: value for key, value in merged(fields, self._request).items() if value is not None}

    def _messages(self, prompt_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        call = None
        passages = self._text_codec.passages(prompt_ids)
        for number, passage in enumerate(passages):
            if passage.author == "assistant":
                message = self._assistant(passage.text, f"call_{number}")
                call = message["tool_calls"][0]["id"] if "tool_calls" in message else None
                yield message
            elif passage.author == "environment" and call is not None:
                yield {"role": "tool", "tool_call_id": call, "content": passage.text.strip()}
            else:
                author = "user" if passage.author == "environment" else passage.author
                yield {"role": author, "content": passage.text}
        if passages and passages[-1].author == "assistant":
            yield {"role": "user", "content": _CONTINUE}

    def _assistant(self, text: str, call: str) -> dict[str, Any]:
        """The agent's turn; its last tool call becomes one of the endpoint's, where those are used."""
        for role in self._tool_roles:
            match = re.search(rf"<{role}>((?:(?!<{role}>).)*)</{role}>\s*\Z", text, re.DOTALL)
            if match:
                function = {"name": role, "arguments": json.dumps({_INPUT: match[1]}, ensure_ascii=False)}
                calls = [{"id": call, "type": "function", "function": function}]
                return {"role": "assistant", "content": text[: match.start()], "tool_calls": calls}
        return {"role": "assistant", "content": text}

    def _ended(self, reply: ChatReply, finish: FinishReason, stop: Sequence[str]) -> tuple[str, FinishReason]:
        """The text up to its first stop string, and why it ends there."""
        text = reply.text + self._called(reply)
        end = first_stop(text, stop)
        if end >= 0:
            return text[:end], FinishReason.STOP
        if finish is FinishReason.END_OF_TEXT and (removed := _removed_stop(text, stop)):
            return text + removed, FinishReason.STOP
        return text, finish

    def _called(self, reply: ChatReply) -> str:
        """The first native tool call in the agent's tags; the agent makes one at a time."""
        for name, arguments in reply.calls[:1]:
            if name not in self._tool_roles:
                raise EngineError(
                    f"{self._endpoint.where}: the model calls {name!r}, which is not offered; "
                    f"offered: {', '.join(self._tool_roles)}"
                )
            return f"<{name}>{_argument(arguments)}</{name}>"
        return ""


def _function(role: str, description: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
    }
    return {
        "type": "function",
        "function": {"name": role, "description": description, "parameters": parameters},
    }


def _argument(arguments: str) -> str:
    """The one argument of a call; whatever is no such object is passed on as it is."""
    try:
        value = json.loads(arguments)
        return str(value[_INPUT])
    except (ValueError, KeyError, TypeError):
        return arguments


def _removed_stop(text: str, stop: Sequence[str]) -> str:
    """The closing tag among ``stop`` whose element is still open at the end of ``text``, empty if there is none.

    Inside an element only its own closing tag counts, as for the agent's parser.
    """
    inside = ""
    for slash, name in re.findall(r"<(/?)([\w-]+)>", text):
        if not inside and not slash:
            inside = name
        elif slash and name == inside:
            inside = ""
    closing = f"</{inside}>"
    return closing if closing in stop else ""
