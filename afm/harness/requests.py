"""What a program asks a model for, and the reply, whatever protocol they came by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afm.errors import AfmError
from afm.models.base import Generation


class RequestRefusedError(AfmError):
    """A request that is not answered; the program gets the reason.

    Attributes:
        status: For HTTP; none that clients try again.
        code: A word for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request of a program, whatever protocol it came by: a chat (``messages``), or a text to continue (``prompt``).

    Attributes:
        messages: As OpenAI's chat completions have them.
        tools: Likewise.
        prompt: Text or token ids.
        n: Replies.
        max_tokens: Of a reply; ``None``: as many as fit.
        continued: The last message is a reply of the assistant that is not over.
        json_schema: A JSON schema as text, which the reply must keep to; ``None`` for free text.
        member: Who asks, of a team; a conversation is one member's.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | None = None
    member: str = ""
    continued: bool = False

    @property
    def characters(self) -> int:
        """Characters of the prompt: messages with the arguments of their calls, and tools. Token ids count as none."""
        if self.prompt is not None:
            return len(self.prompt) if isinstance(self.prompt, str) else 0
        texts = [str(message.get("content") or "") for message in self.messages]
        for message in self.messages:
            calls = message.get("tool_calls") or ()
            texts += [str((call.get("function") or {}).get("arguments") or "") for call in calls]
        return sum(map(len, texts)) + (len(json.dumps(list(self.tools))) if self.tools else 0)


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call of a reply. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One reply.

    Attributes:
        text: What the program sees: up to the stop string, without the tool calls.
        raw_text: All that was sampled, stop string and calls included.
    """

    text: str
    raw_text: str
    calls: tuple[ReplyCall, ...]
    generation: Generation

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, as OpenAI's chat completions have it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The answer to a request, the ``call``-th of its session."""

    call: int
    model: str
    prompt_ids: tuple[int, ...]
    choices: tuple[ModelChoice, ...]

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(len(choice.generation.token_ids) for choice in self.choices)
