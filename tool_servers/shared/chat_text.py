"""What a model said in a chat completion."""

from __future__ import annotations

from typing import Any

from afm.endpoints.replies import UnfinishedReasoningError, without_reasoning
from afm.trajectory.observation import readable


def chat_text(answer: Any) -> str:
    """The readable text of a decoded completion without the model's reasoning; empty when it holds none."""
    try:
        text = answer["choices"][0]["message"]["content"]
        return readable(without_reasoning(text)).strip() if isinstance(text, str) else ""
    except (KeyError, IndexError, TypeError, UnfinishedReasoningError):
        return ""
