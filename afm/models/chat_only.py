"""A model behind a chat endpoint, text in and text out, as a baseline next to models with token ids.

Chat endpoints neither return nor accept token ids. Episodes are counted in pieces of about four characters instead. So
token counts, limits and prices are estimates, and reinforcement learning cannot train on the samples.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afm.configuration import merged
from afm.endpoints.chat import ChatEndpoint, ChatReply, EndpointSettings
from afm.errors import EngineError
from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel, ToolCalls
from afm.models.tokenizer import first_stop
from afm.trajectory.tags import blocks

DEFAULT_CONTEXT_TOKENS = 128_000
CHARACTERS_PER_TOKEN = 4
_MOST_STOPS = 4
"""Maximum number of stop strings of OpenAI's endpoint."""
_CONTINUE = "Continue exactly where you stopped."
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Utterance:
    """Text of one author, taken out of a sequence of ids.

    Attributes:
        author: ``system``, ``user``, ``assistant``, or ``environment`` for results of tools.
    """

    author: str
    text: str


class TextCodec:
    """Ids that encode text and its author, so that the conversation can be decoded from them.

    A piece of text is one integer: its UTF-8 bytes after a leading 1. The lowest bit is set if the model wrote it. Ids
    below 256 mark the end of a text and the beginning of a message.
    """

    end_id = 0
    _BEGINNINGS = ("system", "user", "assistant")

    def encode(self, text: str) -> list[int]:
        """Encode text of the environment in pieces of four characters."""
        return list(_pieces(text, CHARACTERS_PER_TOKEN, written=False))

    def encode_written(self, text: str, most: int) -> list[int]:
        """Encode text of the model in at most ``most`` pieces, of more than four characters if necessary."""
        size = max(CHARACTERS_PER_TOKEN, math.ceil(len(text) / max(1, most)))
        return list(_pieces(text, size, written=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, without marks of ends and beginnings."""
        return "".join(_text(token) for token in token_ids if token > 255)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode every message after an id of its role, and end with the id of the assistant.

        Raises:
            EngineError: A message has another role than system, user and assistant.
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

    def utterances(self, token_ids: Sequence[int]) -> list[Utterance]:
        """Return the conversation so far. Text of the environment in the assistant's turn is a separate utterance."""
        utterances: list[list[str]] = []
        role = "user"
        for token in token_ids:
            if 1 <= token <= len(self._BEGINNINGS):
                role = self._BEGINNINGS[token - 1]
                if role != "assistant":
                    utterances.append([role, ""])
            elif token > 255:
                inside = role == "assistant"
                author = ("assistant" if token & 1 else "environment") if inside else role
                if not utterances or utterances[-1][0] != author:
                    utterances.append([author, ""])
                utterances[-1][1] += _text(token)
        return [Utterance(author, text) for author, text in utterances]


def _pieces(text: str, size: int, *, written: bool) -> Iterator[int]:
    for begin in range(0, len(text), size):
        data = b"\1" + text[begin : begin + size].encode("utf-8", "surrogatepass")
        yield int.from_bytes(data, "big") << 1 | written


def _text(token: int) -> str:
    number = token >> 1
    return number.to_bytes((number.bit_length() + 7) // 8, "big")[1:].decode("utf-8", "surrogatepass")


class ChatOnlyModel(TokenModel):
    """Drives an episode over ``URL/v1/chat/completions``.

    After each observation the conversation is sent again: the agent's text as the assistant's message, the
    observation as the user's (or, with native tool calls, as the tool's). Stop strings are sent, at most four of
    them; a server that removes the one it stopped at has it put back by the tag that is still open.

    Args:
        url: Address of the server, with or without ``/v1``.
        name: Name of the model on the server.
        tool_roles: Tag and description of each tool role, for native calls.
        tool_calls: How the model calls tools.
        context_tokens: Maximum estimated length of prompt and response together.
        request: Fields to merge into the request. ``null`` removes a field that the server rejects.
        endpoint: Settings of the requests.
    """

    token_exact = False

    def __init__(
        self,
        url: str,
        *,
        name: str,
        tool_roles: Mapping[str, str] | None = None,
        tool_calls: ToolCalls = ToolCalls.TAGS,
        context_tokens: int | None = None,
        request: Mapping[str, Any] | None = None,
        endpoint: EndpointSettings | None = None,
    ) -> None:
        self._text_codec = TextCodec()
        super().__init__(self._text_codec, name=name, context_tokens=context_tokens or DEFAULT_CONTEXT_TOKENS)
        self._tool_roles = dict(tool_roles or {}) if tool_calls is ToolCalls.NATIVE else {}
        self._request = dict(request or {})
        self._endpoint = ChatEndpoint(endpoint or EndpointSettings(), url)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Return the reply to the conversation so far, without log-probabilities.

        Raises:
            EngineError: The server failed permanently, rejected the request, or sent no usable reply.
        """
        params.check()
        body = self._body(prompt_ids, params)
        reply = await self._endpoint.ask(body, lambda reply: reply, finishes=("stop", "length"))
        text, finish = self._ended(reply, params.stop)
        room = params.max_new_tokens - (finish is FinishReason.END_OF_TEXT)
        ids = self._text_codec.encode_written(text, room)[: params.max_new_tokens]
        if finish is FinishReason.END_OF_TEXT and len(ids) < params.max_new_tokens:
            ids.append(self._text_codec.end_id)
        return Generation(tuple(ids), (), finish)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    def _body(self, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.name,
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
        utterances = self._text_codec.utterances(prompt_ids)
        for number, utterance in enumerate(utterances):
            if utterance.author == "assistant":
                message = self._assistant(utterance.text, f"call_{number}")
                call = message["tool_calls"][0]["id"] if "tool_calls" in message else None
                yield message
            elif utterance.author == "environment" and call is not None:
                yield {"role": "tool", "tool_call_id": call, "content": utterance.text.strip()}
            else:
                yield {
                    "role": "user" if utterance.author == "environment" else utterance.author,
                    "content": utterance.text,
                }
        if utterances and utterances[-1].author == "assistant":
            yield {"role": "user", "content": _CONTINUE}

    def _assistant(self, text: str, call: str) -> dict[str, Any]:
        """Return the agent's turn. With native tool calls, its last call becomes one of the endpoint's."""
        for role in self._tool_roles:
            match = re.search(rf"<{role}>((?:(?!<{role}>).)*)</{role}>\s*\Z", text, re.DOTALL)
            if match:
                function = {"name": role, "arguments": json.dumps({_INPUT: match[1]}, ensure_ascii=False)}
                calls = [{"id": call, "type": "function", "function": function}]
                return {"role": "assistant", "content": text[: match.start()], "tool_calls": calls}
        return {"role": "assistant", "content": text}

    def _ended(self, reply: ChatReply, stop: Sequence[str]) -> tuple[str, FinishReason]:
        """Return the text up to its first stop string, and the finish reason."""
        text = reply.text + self._called(reply)
        end = first_stop(text, stop)
        if end >= 0:
            return text[:end], FinishReason.STOP
        if reply.finish == "length":
            return text, FinishReason.LENGTH
        if removed := _removed_stop(text, stop):
            return text + removed, FinishReason.STOP
        return text, FinishReason.END_OF_TEXT

    def _called(self, reply: ChatReply) -> str:
        """Return the first native tool call in the agent's tags. The agent makes one call at a time."""
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
    """Return the only argument of a call. Anything but an object with one text is returned unchanged."""
    try:
        value = json.loads(arguments)
        return str(value[_INPUT])
    except (ValueError, KeyError, TypeError):
        return arguments


def _removed_stop(text: str, stop: Sequence[str]) -> str:
    """Return the closing tag among ``stop`` whose element is open at the end of ``text``. Empty without one.

    Inside an element only its own closing tag counts, as in the agent's parser.
    """
    inside = next((block.role for block in blocks(text) if block.end < 0), "")
    closing = f"</{inside}>"
    return closing if closing in stop else ""
