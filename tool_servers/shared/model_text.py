"""Asking a model behind an OpenAI-compatible endpoint for one text."""

from __future__ import annotations

from typing import Any

from afm.endpoints.replies import UnfinishedReasoningError, without_reasoning
from afm.trajectory.observation import readable
from tool_servers.shared.upstream import Trouble, Upstream, UpstreamError


async def ask_model(
    service: Upstream, model: str, task: str, material: object, *, max_tokens: int, seconds: float
) -> str:
    """The readable text of a model's reply, without its reasoning.

    Args:
        task: The system message.
        material: Content of the user's message, text or parts.

    Raises:
        UpstreamError: There is none within ``seconds``.
    """
    messages = [{"role": "system", "content": task}, {"role": "user", "content": material}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    text = _text(await service.ask("POST", "/chat/completions", body=body, seconds=seconds))
    if not text:
        raise UpstreamError(Trouble.BROKEN, f"the answer of {service.name} holds no text")
    return text


def _text(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
        return readable(without_reasoning(text)).strip() if isinstance(text, str) else ""
    except (KeyError, IndexError, TypeError, UnfinishedReasoningError):
        return ""
