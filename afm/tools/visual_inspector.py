"""The image tool, which asks the vision model of an image server about a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.errors import BadArgumentError
from afm.tools.base import ToolResult
from afm.tools.web_tool import MARGIN_S, ServerKind, WebTool, WebToolSettings

HOW_TO = (
    'Nothing was looked at: expected a JSON object {"file_path": "path or address of the image", "question": "..."} '
    "between a line ```json and a line ```."
)
_FENCE = re.compile(r"\s*```\s*(?:json)?\s*(.*?)\s*```\s*\Z", re.DOTALL | re.IGNORECASE)


class VisualInspectorSettings(WebToolSettings):
    """Settings of :class:`VisualInspectorTool`. Without ``urls``: ``SERVER_HOST`` and ``VISUAL_INSPECTOR_PORT``."""

    timeout_s: float = Field(default=95.0, gt=2 * MARGIN_S)
    """Time limit of a request in seconds. The server receives it too and answers in time."""


class _Look(BaseModel):
    model_config = ConfigDict(extra="ignore")

    file_path: str = Field(min_length=1, max_length=200_000)
    question: str | None = Field(default=None, max_length=8_000)


class _LookReply(BaseModel):
    text: str
    kind: str | None = None
    cached: bool = False


class VisualInspectorTool(WebTool[VisualInspectorSettings, _Look, _LookReply]):
    """Inspects one picture per call. A JSON object, with or without a fence, names it."""

    settings_type = VisualInspectorSettings
    reply_type = _LookReply
    server = ServerKind(
        path="/inspect",
        answer="{text, kind, cached}",
        token="WEB_SERVER_TOKEN",
        address=lambda environment: environment.server_address(environment.visual_inspector_port),
    )
    usual_name = "visual_inspector"
    failure = "nothing was looked at"

    @classmethod
    def read(cls, argument: str) -> _Look:
        """Return the picture and the question."""
        fenced = _FENCE.fullmatch(argument)
        try:
            return _Look.model_validate_json(fenced[1] if fenced else argument)
        except ValidationError:
            raise BadArgumentError(HOW_TO) from None

    def request(self, asked: _Look) -> Mapping[str, Any]:
        """Return the request body with the picture and the question."""
        return {
            "image": asked.file_path,
            "question": asked.question or "",
            "seconds": self.settings.timeout_s - MARGIN_S,
        }

    def shown(self, reply: _LookReply) -> ToolResult:
        """Return the model's answer, or the reason for its absence."""
        meta = {"cached": reply.cached}
        if reply.kind is not None:
            text = f"This image could not be looked at: {reply.text}."
            return ToolResult(text, meta=meta | {"reason": reply.kind})
        return ToolResult(reply.text, meta=meta)
