"""A chat as token ids: the model's own template, and only what is new when a conversation continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from afm.errors import ConfigError, DataError
from afm.models.base import TokenModel
from afm.models.tokenizer import ChatTokenizer

_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""What Qwen2.5 and Hermes models read; for templates that know no tools."""


class ChatRenderer:
    """Renders chats for one model.

    A template that knows no tools gets them in the system message, and calls in the text, in the form of Hermes models.

    Args:
        tokenizer: The model's, with a chat template.
        options: Further arguments of the template, ``enable_thinking`` say.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None) -> None:
        template = tokenizer.backend.chat_template
        if not template:
            raise ConfigError("the tokenizer has no chat template; expected one, in chat_template.jinja say")
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._knows_tools = "tools" in str(template)
        self._knows_calls = "tool_calls" in str(template)
        self._sentinel = f"AFM{uuid4().hex}"

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The whole chat, ready for the assistant to begin.

        Raises:
            DataError: The template refuses these messages.
        """
        import jinja2

        rows = [self._readable(message) for message in messages]
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        if offered and not self._knows_tools:
            rows, offered = _with_tools(rows, offered), None
        try:
            text: str = self._tokenizer.backend.apply_chat_template(
                rows, tools=offered, add_generation_prompt=True, tokenize=False, **self._options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"messages: the model's chat template refuses them: {error}") from None
        return text

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of :meth:`text`."""
        return self._tokenizer.encode_rendered(self.text(messages, tools))

    def new_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        sampled: int,
        last_id: int | None,
    ) -> list[int] | None:
        """Ids of what follows a turn that was sampled, up to where the assistant begins again.

        The chat is rendered with a mark in place of that turn; what follows the mark is new. So whatever the template
        does to the turn's text (it strips blanks and thoughts) is not done to the sampled ids.

        Args:
            messages: The whole chat.
            sampled: Index of the message that was sampled.
            last_id: The last id that was sampled. An end token is not written twice.

        Returns:
            ``None`` when the template does not show the turn exactly once, or refuses it.
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
        """A message as templates read it: text for content, arguments decoded."""
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
    """The chat template of a model; ``None`` for one without."""
    codec = model.codec
    if not isinstance(codec, ChatTokenizer) or not codec.backend.chat_template:
        return None
    return ChatRenderer(codec)


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, where they are the JSON of one."""
    function = dict(call["function"])
    with suppress(TypeError, ValueError):
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return {**call, "type": "function", "function": function}


def _with_tools(rows: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _TOOLS.format(tools=lines)
    if rows and rows[0]["role"] == "system":
        first = {**rows[0], "content": f"{rows[0]['content']}\n\n{words}"}
        return [first, *rows[1:]]
    return [{"role": "system", "content": words}, *rows]
