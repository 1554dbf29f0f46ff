"""Render chats to token ids with the model's chat template, and parse tool calls in sampled text.

Only the new messages of a known conversation are encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from afm.errors import ConfigError, DataError
from afm.harness.requests import decoded_arguments, json_text
from afm.models.base import TokenModel
from afm.models.tokenizer import ChatTokenizer

_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""Tool declarations in the form of Qwen2.5 and Hermes models, for templates without tools."""


class ChatRenderer:
    """Renderer of chats for one model.

    If the template does not support tools, they are written into the system message, and calls into the text, in the form
    of Hermes models.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        options: Further arguments of the template, for example ``enable_thinking``.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None) -> None:
        template = tokenizer.backend.chat_template
        if not template:
            raise ConfigError(
                "the tokenizer has no chat template; expected one, for example in chat_template.jinja"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._knows_tools = "tools" in str(template)
        self._knows_calls = "tool_calls" in str(template)
        self._sentinel = f"AFM{uuid4().hex}"

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the whole chat with the header of the next assistant message.

        Raises:
            DataError: The template rejects these messages.
        """
        from jinja2 import TemplateError

        rows = [self._readable(message) for message in messages]
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        if offered and not self._knows_tools:
            rows, offered = _with_tools(rows, offered), None
        try:
            text: str = self._tokenizer.backend.apply_chat_template(
                rows, tools=offered, add_generation_prompt=True, tokenize=False, **self._options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(f"messages: the model's chat template rejects them: {error}") from None
        return text

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of :meth:`text`."""
        return self._tokenizer.encode_rendered(self.text(messages, tools))

    def new_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        sampled: int,
        last_id: int | None,
    ) -> list[int] | None:
        """Return the ids that follow a sampled message, up to the start of the next assistant message.

        The chat is rendered with a placeholder for the sampled message, and the text after the placeholder is encoded.
        This keeps the sampled ids unchanged where the template would change the message, for example strip blanks or
        thoughts.

        Args:
            messages: The whole chat.
            sampled: Index of the sampled message.
            last_id: Last sampled id. If it is an end token, it is not written twice.

        Returns:
            The ids, or ``None`` if the template rejects the placeholder or does not render it exactly once.
        """
        rows = list(messages)
        rows[sampled] = {"role": "assistant", "content": self._sentinel}
        try:
            text = self.text(rows, tools)
        except DataError:
            return None
        _, mark, rest = text.partition(self._sentinel)
        if not mark or self._sentinel in rest:
            return None
        ids = self._tokenizer.encode(rest)
        return ids[1:] if ids and ids[0] == last_id and last_id in self._tokenizer.end_ids else ids

    def _readable(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form of chat templates: content as text, arguments decoded."""
        row = {key: value for key, value in message.items() if value is not None}
        row["content"] = message.get("content") or ""
        calls = [_decoded(call) for call in message.get("tool_calls") or ()]
        row.pop("tool_calls", None)
        if calls and self._knows_calls:
            row["tool_calls"] = calls
        elif calls:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            blocks = [f"<tool_call>\n{text}\n</tool_call>" for text in written]
            row["content"] = "\n".join(filter(None, [row["content"], *blocks]))
        return row


def renderer_of(model: TokenModel) -> ChatRenderer | None:
    """Return a renderer for a model, or ``None`` if the model has no chat template."""
    codec = model.codec
    if not isinstance(codec, ChatTokenizer) or not codec.backend.chat_template:
        return None
    return ChatRenderer(codec)


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments decoded if they are JSON."""
    function = call["function"]
    arguments = decoded_arguments(function.get("arguments") or "{}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_tools(rows: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _TOOLS.format(tools=lines)
    if rows and rows[0]["role"] == "system":
        first = {**rows[0], "content": f"{rows[0]['content']}\n\n{words}"}
        return [first, *rows[1:]]
    return [{"role": "system", "content": words}, *rows]


_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Hermes and Qwen, Mistral, Llama 3."""
_BETWEEN = re.compile(r"(?:\s|</tool_call>|<tool_call>|;|,(?=\s*\{))*")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class TextCall:
    """One tool call in sampled text. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


def split_calls(text: str, offered: Collection[str]) -> tuple[str, tuple[TextCall, ...]]:
    """Return the text before the first tool call, and the calls. If a call is broken, return the whole text and no calls.

    Supported forms are ``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes and Qwen), ``[TOOL_CALLS] [...]``
    (Mistral), and an object with ``name`` and ``parameters``, also after ``<|python_tag|>`` (Llama 3). Without a tag
    before it, the object has to name one of the ``offered`` tools.
    """
    found = [at for mark in _OPENINGS if (at := text.find(mark)) >= 0]
    if not found:
        bare = text.strip()
        calls = _calls(bare, offered) if bare.startswith('{"') else None
        return ("", calls) if calls else (text, ())
    begin = min(found)
    mark = next(mark for mark in _OPENINGS if text.startswith(mark, begin))
    calls = _calls(text[begin + len(mark) :])
    return (text[:begin].rstrip(), calls) if calls else (text, ())


def _calls(text: str, offered: Collection[str] | None = None) -> tuple[TextCall, ...]:
    """Parse the calls at the beginning of a text and ignore text after them. Return none if one is broken."""
    calls: list[TextCall] = []
    at = _end_of_gap(text, 0)
    while at < len(text) and text[at] in "{[":
        try:
            value, at = _DECODER.raw_decode(text, at)
            calls += _read(value, offered)
        except (ValueError, RecursionError):
            return ()
        at = _end_of_gap(text, at)
    return tuple(calls)


def _end_of_gap(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    return match.end() if match else at


def _read(value: Any, offered: Collection[str] | None) -> Iterator[TextCall]:
    """Yield the calls in a JSON value. Raises ValueError if it is not a call that can be written again as JSON.

    Args:
        offered: If given, a call has one of these names, and arguments.
    """
    if isinstance(value, list):
        for item in value:
            yield from _read(item, offered)
        return
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {} if offered is None else None))
    if not isinstance(arguments, dict) or (offered is not None and name not in offered):
        raise ValueError("no arguments, or no tool of this name")
    name.encode()
    yield TextCall(name, json_text(arguments, allow_nan=False))


class VisibleText:
    """Filter for streamed text. It ends the visible text at a stop string or, if tools are offered, at a tool call.

    It holds back only a suffix that may be the beginning of one of these.

    Args:
        stop: Strings that end the visible text. They are not shown.
        tools: Whether tool calls end it too.
    """

    def __init__(self, stop: Sequence[str], *, tools: bool) -> None:
        self._marks = (*stop, *(_OPENINGS if tools else ()))
        self._tools = tools
        self._rest = ""
        self._begun = self._over = False

    def feed(self, piece: str) -> str:
        """Take the next piece and return the text that can be shown now."""
        if self._over:
            return ""
        self._rest += piece
        if self._tools and not self._begun:  # a text that starts as a JSON object may be a call
            if not self._rest.strip() or self._rest.lstrip().startswith("{"):
                return ""
            self._begun = True
        ends = [at for mark in self._marks if (at := self._rest.find(mark)) >= 0]
        if ends:
            shown, self._over = self._rest[: min(ends)], True
            return shown.rstrip() if self._tools else shown
        held = max((_overlap(self._rest, mark) for mark in self._marks), default=0)
        shown = self._rest[: len(self._rest) - held]
        if self._tools:
            shown = shown.rstrip()  # white space before a call is not shown
        self._rest = self._rest[len(shown) :]
        return shown


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0
    )


def until_stop(text: str, stop: Sequence[str]) -> str:
    """Return ``text`` up to its first stop string."""
    return text[: min((at for item in stop if (at := text.find(item)) >= 0), default=len(text))]
